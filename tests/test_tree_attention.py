"""Attention along paths: every query sees its own row up to itself, whatever is computed together."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import computed
from tiny import forking_rows, llama
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from condensegrpo.algorithms.packing import lay_out
from condensegrpo.algorithms.prefix_tree import tree
from condensegrpo.core.errors import LearnerError
from condensegrpo.learner.logprobs import CPU, TrainedLogprobs
from condensegrpo.learner.tree_attention import PIECE, BranchPiece, Paths, paths, pattern_attention, pieces

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)  # much is shared


def seen(found: Paths, place: int) -> list[int]:
    """The places that the query at ``place`` sees."""
    output, first_query, first_key = int(found.outputs[place]), 0, 0
    for bucket in found.buckets:
        count, most = bucket.queries
        if output < first_query + count * most:
            assert found.queries[output] == place
            piece, query = divmod(output - first_query, most)
            keys = found.keys[first_key : first_key + math.prod(bucket.keys)].view(bucket.keys)
            return keys[piece, bucket.visible[piece, 0, query]].tolist()
        first_query += count * most
        first_key += math.prod(bucket.keys)
    raise AssertionError(f"no bucket holds place {place}")


def test_the_example_of_the_docstring() -> None:
    depths = tree([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]]).positions
    assert pieces(depths) == [
        BranchPiece(0, 4, [0, 1, 2, 3]),
        BranchPiece(4, 5, [0, 1, 2, 4]),
        BranchPiece(5, 6, [0, 5]),
    ]
    found = paths(depths).on(CPU)
    assert [seen(found, place) for place in range(6)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 5]]


def test_a_branch_below_a_branch_looks_back_through_both() -> None:
    depths = tree([[1, 2, 3], [1, 4, 5], [1, 4, 6]]).positions
    assert depths == (0, 1, 2, 1, 2, 2)
    assert pieces(depths)[-1] == BranchPiece(5, 6, [0, 3, 5])  # 6 behind 4, the child of 1


def test_long_branches_are_cut_into_like_pieces_that_see_no_further_than_their_end() -> None:
    found = pieces(range(PIECE + 2))
    assert [(piece.start, piece.end, len(piece.keys)) for piece in found] == [
        (0, PIECE // 2 + 1, PIECE // 2 + 1),
        (PIECE // 2 + 1, PIECE + 2, PIECE + 2),
    ]


@settings(max_examples=60)
@given(ROWS)
def test_every_token_sees_exactly_its_own_row_up_to_itself(rows: list[list[int]]) -> None:
    laid_out = tree(rows)
    found = paths(laid_out.positions).on(CPU)
    for row, places in zip(rows, laid_out.indices, strict=True):
        for depth, place in enumerate(places):
            assert [laid_out.token_ids[key] for key in seen(found, place)] == row[: depth + 1]
    assert all(bucket.visible.any(dim=-1).all() for bucket in found.buckets)  # attention to nothing would be NaN


def dense(query: Tensor, key: Tensor, value: Tensor, places: list[tuple[int, ...]], scaling: float) -> Tensor:
    """The same by the book: each row alone, causal, with key heads repeated."""
    output = torch.zeros(query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype)
    sharing = query.shape[1] // key.shape[1]
    for row in places:
        index = torch.tensor(row)
        one, keys, values = (each[:, :, index] for each in (query, key, value))
        keys, values = (each.repeat_interleave(sharing, dim=1) for each in (keys, values))
        found = scaled_dot_product_attention(one, keys, values, is_causal=True, scale=scaling)
        output = output.index_put((index,), found[0].transpose(0, 1))
    return output[None]


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 160), min_size=1, max_size=5), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.integers(0, 9)
)
def test_outputs_and_gradients_are_those_of_every_row_alone(
    tails: list[int], heads: tuple[int, int], seed: int
) -> None:
    rows = [[*range(seed * 30 % 170 + 1), *[1000 + number] * tail] for number, tail in enumerate(tails)]
    laid_out = tree(rows)
    size = len(laid_out.token_ids)
    torch.manual_seed(seed)
    query, key, value = (torch.randn(1, h, size, 8, dtype=torch.float64) for h in (heads[0], heads[1], heads[1]))
    weight = torch.randn(1, size, heads[0], 8, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in (query, key, value)]
    found, _ = pattern_attention(
        nn.Module(), query, key, value, None, pattern=paths(laid_out.positions).on(CPU), scaling=0.3
    )
    wanted = dense(query, key, value, list(laid_out.indices), 0.3)
    torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad((found * weight).sum(), inputs)
    for one, other in zip(gradients, torch.autograd.grad((wanted * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_masks_are_of_pieces_and_not_of_all_pairs() -> None:
    found = paths(tree([[1, *[2] * 200], [1, *[3] * 200], [4] * 60]).positions).on(CPU)
    assert sum(bucket.visible.numel() for bucket in found.buckets) < 461**2 / 2


def test_a_softcap_on_attention_is_not_left_out() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(LearnerError, match=r"Module asks for softcap, wanted is plain attention"):
        pattern_attention(
            nn.Module(), query, query, query, None, pattern=paths(range(3)).on(CPU), scaling=0.3, softcap=50.0
        )


def test_linear_layers_compute_the_packed_tokens_and_no_padding() -> None:
    model, some = llama(), forking_rows(6)
    batch = lay_out([tuple(some[:3]), *((row,) for row in some[3:])])
    sizes: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[:2].numel()))
    computed(TrainedLogprobs(model), batch, 1.0)
    assert sizes == [batch.token_ids.numel()]
