"""Micro-batches: nothing lost, nothing doubled, and a gradient that does not depend on how the rows were packed."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import collate
from token_columns import marked, places_of
from torch import Tensor, nn
from torch.nn.functional import log_softmax, one_hot

from condensegrpo.algorithms.losses import clipped
from condensegrpo.algorithms.packing import (
    Block,
    PackedBatch,
    balanced_owners,
    block_tokens,
    blocks,
    dummy,
    first_fit,
    lay_out,
    micro_batches,
    pack,
    pack_padded,
)
from condensegrpo.core.errors import LearnerError
from condensegrpo.core.trajectory import Segment, TrainedTurn

VOCABULARY = 12


def row(text: str, *, advantage: float = 1.0, weight: float = 0.25) -> Segment:
    """Token ids by their numbers, trained where starred: ``row("5 6 7*")``."""
    words = text.split()
    ids, flags = [int(word.rstrip("*")) for word in words], [word.endswith("*") for word in words]
    return marked(ids, flags, advantage=advantage, weight=weight, logprob=-1.5, trajectory="q/0", first_turn=2)


def test_rows_go_longest_first_into_the_first_micro_batch_with_room() -> None:
    assert pack([3, 9, 5, 2], 10) == ((1,), (0, 2, 3))
    assert pack([6, 5, 4, 4, 1], 10) == ((0, 2), (1, 3, 4))


def test_equal_lengths_go_by_index() -> None:
    assert pack([5, 5, 5, 5, 5], 10) == ((0, 1), (2, 3), (4,))


def test_no_rows_make_no_micro_batches() -> None:
    assert pack([], 10) == ()


def test_a_row_as_long_as_the_budget_fits() -> None:
    assert pack([10, 10], 10) == ((0,), (1,))


def test_a_row_over_the_budget_is_an_error_that_names_it_and_the_cure() -> None:
    with pytest.raises(
        LearnerError, match=r"row 2 has 40 tokens .* hold 10\. .*learner\.tokens_per_micro_batch to at least 40"
    ):
        pack([3, 30, 40], 10)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60))
def test_every_row_is_in_exactly_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = pack(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in batch) <= budget for batch in batches)
    assert len(batches) <= len(first_fit(lengths, budget))  # none more for being even


@settings(max_examples=100)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60))
def test_rows_that_are_padded_to_the_longest_are_within_the_budget_with_their_padding(
    lengths: list[int], budget: int
) -> None:
    batches = pack_padded(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= budget for batch in batches)


def test_micro_batches_are_near_equal() -> None:
    # filled one after another they would be 10, 10 and 4
    sizes = [sum([4, 4, 4, 4, 2, 2, 2, 2][row] for row in batch) for batch in pack([4, 4, 4, 4, 2, 2, 2, 2], 10)]
    assert sizes == [8, 8, 8]


def test_rows_of_like_length_come_together_where_that_takes_no_more_micro_batches() -> None:
    assert pack([2, 8, 2, 8, 2, 2], 16) == ((1, 3), (0, 2, 4, 5))


@settings(max_examples=100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(20, 40))
def test_no_micro_batch_is_larger_than_an_even_share_and_one_row(lengths: list[int], budget: int) -> None:
    batches = pack(lengths, budget)
    largest = max(sum(lengths[row] for row in batch) for batch in batches)
    assert largest <= sum(lengths) / len(batches) + max(lengths)


def test_a_row_over_the_budget_is_named_by_its_trajectory_and_turn() -> None:
    long = replace(row("1 2 3 4*"), trajectory="q7/2", first_turn=5)
    with pytest.raises(LearnerError, match=r"the row of trajectory 'q7/2' from turn 5 on has 4 tokens .* at least 4"):
        blocks([row("1 2*"), long], max_tokens=3, share=True)


def test_rows_that_share_a_prefix_become_a_block_where_the_model_computes_trees() -> None:
    some = [row("1 2 3 4*"), row("8 9*"), row("1 2 3 5*")]
    assert blocks(some, max_tokens=16, share=True) == ((some[0], some[2]), (some[1],))
    assert blocks(some, max_tokens=16, share=False) == tuple((one,) for one in some)
    assert [block_tokens(block) for block in blocks(some, max_tokens=16, share=True)] == [5, 2]


def test_for_several_ranks_blocks_are_small_enough_to_load_them_alike() -> None:
    some = [row(f"1 2 3 {number}*") for number in range(4, 12)] * 4
    assert len(blocks(some, max_tokens=99, share=True)) == 1
    several = blocks(some, max_tokens=99, share=True, ranks=2)
    assert max(map(block_tokens, several)) == 4  # a row; the eighth part of 11 tokens is less
    assert len(several) == 8  # equal rows stay together


def test_the_rank_with_most_gives_until_the_ranks_are_as_equal_as_a_block_allows() -> None:
    assert balanced_owners([[6, 5, 4], [3]]) == ((1, 0, 0), (1,))
    assert balanced_owners([[5, 5], []]) == ((1, 0), ())
    assert balanced_owners([[7]]) == ((0,),)
    assert balanced_owners([[], []]) == ((), ())


def test_ranks_that_are_as_equal_as_can_be_keep_what_they_have() -> None:
    assert balanced_owners([[6, 4], [5, 4]]) == ((0, 0), (1, 1))


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(1, 20), max_size=8), min_size=1, max_size=4))
def test_shares_differ_by_less_than_the_smallest_block_of_the_busiest(sizes: list[list[int]]) -> None:
    owners = balanced_owners(sizes)
    assert [len(own) for own in owners] == [len(own) for own in sizes]
    pairs = [(o, s) for own, there in zip(sizes, owners, strict=True) for s, o in zip(own, there, strict=True)]
    loads = [sum(size for owner, size in pairs if owner == rank) for rank in range(len(sizes))]
    busiest = [size for owner, size in pairs if owner == loads.index(max(loads))]
    assert not busiest or max(loads) - min(loads) <= min(busiest)


def test_a_block_is_laid_out_as_a_tree_and_trains_every_row_of_it() -> None:
    twice = lay_out([(row("5 6 7*", weight=0.25), row("5 6 8*", weight=0.5), row("5 6 7*", weight=1.0))])
    assert twice.token_ids.tolist() == [[5, 6, 7, 8]]
    assert twice.position_ids.tolist() == [[0, 1, 2, 2]]
    assert twice.source.tolist() == [1, 1, 1]
    assert twice.target.tolist() == [7, 8, 7]
    assert twice.weights.tolist() == [0.25, 0.5, 1.0]
    assert twice.turns.tolist() == [0, 1, 2]


def test_blocks_lie_behind_each_other() -> None:
    batch = lay_out([(row("5 6*"), row("5 7*")), (row("8 9*"),)])
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 1, 0, 1]]
    assert batch.source.tolist() == [0, 0, 3]


def test_no_block_is_split_and_the_budget_counts_what_is_computed() -> None:
    some: list[Block] = [(row("5 6 1*"), row("5 6 2*")), (row("8 9*"),), (row("7 7 7 7*"),)]  # 4, 2 and 4 tokens
    first, second = micro_batches(some, max_tokens=6)
    assert first.token_ids.tolist() == [[5, 6, 1, 2]]
    assert second.token_ids.tolist() == [[8, 9, 7, 7, 7, 7]]
    assert micro_batches([], max_tokens=6) == []


def test_rows_lie_behind_each_other_with_positions_of_their_own() -> None:
    batch = collate([row("5 6 7*"), row("8 9*", advantage=-2, weight=0.5)])
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.source.tolist() == [1, 3]
    assert batch.target.tolist() == [7, 9]
    assert batch.logprobs.tolist() == [-1.5, -1.5]
    assert batch.advantages.tolist() == [1, -2]
    assert batch.weights.tolist() == [0.25, 0.5]


def test_tool_tokens_between_two_replies_are_context() -> None:
    batch = collate([row("1 2* 3* 4 5 6*")])
    assert batch.target.tolist() == [2, 3, 6]
    assert batch.source.tolist() == [0, 1, 4]


def test_the_padding_id_is_trained_where_it_was_sampled() -> None:
    # trl#4974, MemGen#33: padding inferred from the id; there is no padding here
    batch = collate([row("0 3 0*"), row("0 0*")])
    assert batch.target.tolist() == [0, 0]
    assert batch.token_ids.shape == (1, 5)


def test_types_and_shapes_are_what_a_model_takes() -> None:
    batch = collate([row("5 6 7* 8*")])
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.columns.items()}
    assert shapes == {
        "token_ids": ((1, 4), torch.int64),
        "position_ids": ((1, 4), torch.int64),
        "source": ((2,), torch.int64),
        "target": ((2,), torch.int64),
        "turns": ((2,), torch.int64),
        "logprobs": ((2,), torch.float32),
        "old": ((2,), torch.float32),
        "reference": ((2,), torch.float32),
        "advantages": ((2,), torch.float32),
        "weights": ((2,), torch.float32),
        "kl_weights": ((2,), torch.float32),
    }


def test_turns_are_numbered_over_all_rows_and_told_apart_where_they_touch() -> None:
    touching = tuple(
        TrainedTurn(turn=turn, start=start, logprobs=(-1.0,) * length, advantage=1.0, weight=0.5)
        for turn, start, length in ((0, 1, 1), (1, 2, 2), (2, 5, 1))
    )
    merged = replace(row("5 6* 7* 8* 9 5*"), turns=touching)
    again = row("5 6* 7")  # its turn has the number of another trajectory's
    assert collate([merged, again]).turns.tolist() == [0, 1, 1, 2, 3]


def test_turns_that_overlap_or_leave_their_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"samples the positions range\(1, 3\), wanted .* in a row of 2 tokens"):
        replace(row("5 6*"), turns=(TrainedTurn(turn=0, start=1, logprobs=(-1.0, -1.0), advantage=1.0, weight=1.0),))
    one = row("5 6* 7").turns[0]
    with pytest.raises(ValueError, match="that follow those of the turn before, ending at 2"):
        replace(row("5 6* 7"), turns=(one, one))


def test_ratios_and_divergence_are_those_to_the_sampler_until_others_are_measured() -> None:
    batch = collate([row("5 6* 7*")])
    assert torch.equal(batch.old, batch.logprobs)
    assert torch.equal(batch.reference, batch.logprobs)


def test_a_trained_token_without_context_is_an_error_that_names_its_row() -> None:
    with pytest.raises(
        LearnerError, match=r"row 1 \(trajectory 'q/0', from turn 2\): its first token is to be trained"
    ):
        collate([row("5 6*"), row("7* 8*")])


def test_no_rows_make_no_batch() -> None:
    with pytest.raises(ValueError, match=r"takes dummy\(\)"):
        collate([])


@settings(max_examples=100)
@given(st.lists(st.lists(st.tuples(st.integers(0, 11), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=5))
def test_packing_keeps_every_trained_token_and_what_predicts_it(texts: list[list[tuple[int, bool]]]) -> None:
    rows = [
        row(" ".join(f"{token}{'*' if yes and place else ''}" for place, (token, yes) in enumerate(text)))
        for text in texts
    ]
    wanted = [(one.token_ids[place - 1], one.token_ids[place], place - 1) for one in rows for place in places_of(one)]
    batch = collate(rows)
    source_ids = batch.token_ids[0, batch.source].tolist()
    source_positions = batch.position_ids[0, batch.source].tolist()
    assert list(zip(source_ids, batch.target.tolist(), source_positions, strict=True)) == wanted


class Bigram(nn.Module):
    """The smallest language model: the logits after a token depend on that token and its position."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.after = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.place = nn.Parameter(torch.randn(16, VOCABULARY, generator=generator))

    def forward(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities (T,) of the trained tokens."""
        logits_SV = self.after[batch.token_ids[0]] + self.place[batch.position_ids[0]]
        return log_softmax(logits_SV[batch.source], dim=-1).gather(1, batch.target[:, None]).flatten()


def gradient(batches: Sequence[PackedBatch]) -> Tensor:
    """The gradient of Σ w·l over some micro-batches, all parameters in one vector."""
    model = Bigram()
    for batch in batches:
        found = clipped(model(batch), batch.logprobs, batch.advantages, clip_low=0.9, clip_high=9)
        (batch.weights * found.loss_T).sum().backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def sixteen_rows() -> list[Segment]:
    draw = random.Random(3)
    lengths = [draw.randint(2, 12) for _ in range(16)]
    return [
        row(
            " ".join(
                f"{draw.randrange(VOCABULARY)}{'*' if place and draw.random() < 0.6 else ''}" for place in range(size)
            ),
            advantage=draw.uniform(-2, 2),
            weight=draw.uniform(0.01, 0.1),
        )
        for size in lengths
    ]


@pytest.mark.parametrize("per_batch", [1, 4, 16])
def test_the_gradient_is_the_same_for_any_micro_batches(per_batch: int) -> None:
    # trl#3021, mlx-lm#1413: means of micro-batches; 16×1, 4×4 and 1×16 rows here
    rows = sixteen_rows()
    shuffled = random.Random(per_batch).sample(rows, 16)
    batches = [collate(shuffled[start : start + per_batch]) for start in range(0, 16, per_batch)]
    torch.testing.assert_close(gradient(batches), gradient([collate(rows)]), rtol=1e-5, atol=1e-7)


def test_the_gradient_is_the_same_for_rows_packed_to_a_budget() -> None:
    rows = sixteen_rows()
    packed = pack([len(one.token_ids) for one in rows], 20)
    assert 1 < len(packed) < 16
    batches = [collate([rows[index] for index in batch]) for batch in packed]
    torch.testing.assert_close(gradient(batches), gradient([collate(rows)]), rtol=1e-5, atol=1e-7)


def test_the_gradient_is_the_same_for_a_merged_row_and_one_row_a_turn() -> None:
    merged = row("1 2* 3* 4 5*")
    apart = [row("1 2* 3*"), row("1 2 3 4 5*")]
    torch.testing.assert_close(gradient([collate([merged])]), gradient([collate(apart)]), rtol=1e-5, atol=1e-7)


def test_gradient_flows_from_sampled_tokens_only_and_from_the_place_before_them() -> None:
    # RAGEN#71 (inverted mask), minimind#621 (off by one): the logits that get a gradient are those that predict a
    # sampled token, the first of which is predicted by the last token of its context
    batch = collate([row("1 2 3* 4* 5 6*"), row("7 8*")])
    logits_SV = torch.zeros(8, VOCABULARY, requires_grad=True)
    logp_T = log_softmax(logits_SV[batch.source], dim=-1).gather(1, batch.target[:, None]).flatten()
    (batch.weights * clipped(logp_T, logp_T.detach(), batch.advantages).loss_T).sum().backward()
    assert logits_SV.grad is not None
    moved = logits_SV.grad.abs().sum(dim=1) > 0
    assert moved.tolist() == [False, True, True, False, True, False, True, False]
    # −w·A·∇logp of a uniform distribution: w·(1/V − one_hot)
    wanted_TV = 0.25 * (1 / VOCABULARY - one_hot(torch.tensor([3, 4, 6, 8]), VOCABULARY).float())
    torch.testing.assert_close(logits_SV.grad[moved], wanted_TV)


def test_a_dummy_touches_every_parameter_with_a_gradient_of_zero() -> None:
    # ms-swift#8102: a rank without rows must join forward and backward
    found = gradient([dummy()])
    assert len(found) == VOCABULARY * VOCABULARY + 16 * VOCABULARY
    assert not found.any()


def test_a_dummy_beside_real_rows_changes_nothing() -> None:
    # verl#5969: padding with copies of real rows pollutes loss and metrics
    rows = [collate([row("1 2* 3*")])]
    assert torch.equal(gradient([*rows, dummy()]), gradient(rows))
