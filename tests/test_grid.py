"""The grid that dense attention computes: nothing lost, nobody sees a stranger, and no more padding than pays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import segment

from condensegrpo.errors import LearnerError
from condensegrpo.learner.grid import Arrangement, apart, arrange, laid_out
from condensegrpo.packing import PackedBatch, collate, lay_out

ROWS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=7), min_size=1, max_size=6)


def batch_of(blocks: list[list[list[int]]]) -> PackedBatch:
    return lay_out([tuple(segment(row, [len(row) - 1]) for row in block) for block in blocks])


def test_plain_rows_of_like_length_lie_side_by_side() -> None:
    assert arrange([30] * 64, width=64, branching=False) == apart([30] * 64)  # 1920·(384 + 15)


def test_short_rows_share_a_row_of_the_grid() -> None:
    found = arrange([100, 50, 50], width=64, branching=False)  # masked 200·(384 + 100), apart 300·(384 + 50)
    assert found == Arrangement([[0], [1, 2]], 100, masked=True)


def test_one_long_row_and_few_tokens_beside_it_lie_behind_each_other() -> None:
    # 1080·(24576 + 1080) = 27.7 M; two rows of 1000 columns 51.2 M, and side by side 9000·(24576 + 500)
    found = arrange([1000, *[10] * 8], width=4096, branching=False)
    assert (len(found.rows), found.columns, found.masked) == (1, 1080, True)


def test_a_row_that_branches_needs_a_mask_even_alone() -> None:
    assert arrange([7], width=64, branching=True) == Arrangement([[0]], 7, masked=True)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.sampled_from([1, 64, 4096]), st.booleans())
def test_an_arrangement_holds_every_tree_once_and_costs_no_more_than_plain_ones(
    lengths: list[int], width: int, branching: bool
) -> None:
    found = arrange(lengths, width=width, branching=branching)
    assert sorted(tree for row in found.rows for tree in row) == list(range(len(lengths)))
    assert max(sum(lengths[tree] for tree in row) for row in found.rows) == found.columns
    assert found.masked or not branching
    price = len(found.rows) * found.columns * (6 * width + found.columns / (1 if found.masked else 2))
    longest, total = max(lengths), sum(lengths)
    assert price <= len(lengths) * longest * (6 * width + longest / (1 if branching else 2))
    assert price <= total * (6 * width + total)


@settings(deadline=None, max_examples=150)
@given(st.lists(ROWS, min_size=1, max_size=4), st.sampled_from([1, 4096]))
def test_in_the_grid_every_token_sees_its_own_row_and_padding_sees_itself(
    blocks: list[list[list[int]]], width: int
) -> None:
    batch = batch_of(blocks)
    grid = laid_out(batch.token_ids, batch.position_ids, batch.reach, width=width)
    columns = grid.token_ids.shape[1]
    visible = torch.ones(columns, columns).tril().bool().expand(len(grid.token_ids), 1, columns, columns)
    if grid.visible is not None:
        visible = grid.visible
    assert visible.any(dim=-1).all()  # attention to nothing at all would be NaN
    rows = [row for block in blocks for row in block]
    for row, source in zip(rows, batch.source.tolist(), strict=True):
        line, column = int(grid.row_S[source]), int(grid.column_S[source])
        seen = visible[line, 0, column].nonzero().flatten()
        assert grid.token_ids[line, seen].tolist() == row[:-1]
        assert grid.position_ids[line, seen].tolist() == list(range(len(row) - 1))


def test_a_model_that_takes_plain_rows_gets_each_in_a_row_of_its_own_without_a_mask() -> None:
    batch = collate([segment([5, 6, 7], [2]), segment([8, 9], [1])])
    grid = laid_out(batch.token_ids, batch.position_ids, batch.reach, width=None)
    assert grid.token_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert grid.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert grid.visible is None


def test_a_model_that_takes_plain_rows_refuses_a_tree() -> None:
    batch = batch_of([[[5, 6, 7], [5, 6, 8]]])
    with pytest.raises(LearnerError, match=r"takes plain rows only .* Pack its rows with width=None"):
        laid_out(batch.token_ids, batch.position_ids, batch.reach, width=None)
