"""Prefix trees: every token sees exactly its own row, at its own depth, and trees are made where they are cheaper."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.prefix_tree import Tree, causal_cost, cost, different, grouped, in_order, tree

Rows = list[list[int]]
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)  # much is shared


def visible(laid_out: Tree, query: int) -> list[int]:
    """The ids that a query sees, by the rule that masks are made of."""
    keys = range(len(laid_out.token_ids))
    return [laid_out.token_ids[key] for key in keys if key <= query < laid_out.reach[key]]


def test_the_example_of_the_docstring() -> None:
    found = tree([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]])
    assert found.token_ids == (1, 2, 3, 4, 5, 6)
    assert found.positions == (0, 1, 2, 3, 3, 1)
    assert found.reach == (6, 5, 5, 4, 5, 6)
    assert found.places == ((0, 1, 2, 3), (0, 1, 2, 4), (0, 5))


def test_a_row_alone_reaches_its_end() -> None:
    assert tree([[7, 8, 9]]) == Tree((7, 8, 9), (0, 1, 2), (3, 3, 3), ((0, 1, 2),))


def test_equal_rows_share_all_their_tokens() -> None:
    found = tree([[4, 5], [4, 5], [4, 5]])
    assert found.token_ids == (4, 5)
    assert found.places == ((0, 1),) * 3


def test_a_row_that_begins_another_one_lies_within_it() -> None:
    found = tree([[4, 5, 6], [4], [4, 5]])
    assert found.token_ids == (4, 5, 6)
    assert found.places == ((0, 1, 2), (0,), (0, 1))


def test_rows_that_begin_differently_are_trees_behind_each_other() -> None:
    found = tree([[4, 5], [6, 5]])
    assert found.token_ids == (4, 5, 6, 5)
    assert found.positions == (0, 1, 0, 1)
    assert found.reach == (2, 2, 4, 4)


def test_no_rows_are_an_empty_tree() -> None:
    assert tree([]) == Tree((), (), (), ())
    assert in_order([]) == ([], [])
    assert grouped([], width=8, max_tokens=8) == ()


def test_the_order_of_ids_is_depth_first_with_what_each_shares_with_the_last() -> None:
    assert in_order([[1, 2, 3], [4], [1, 2]]) == ([2, 0, 1], [0, 2, 0])


@settings(deadline=None, max_examples=300)
@given(ROWS)
def test_every_token_sees_exactly_its_own_row_up_to_itself(rows: Rows) -> None:
    laid_out = tree(rows)
    for row, places in zip(rows, laid_out.places, strict=True):
        assert [laid_out.token_ids[place] for place in places] == row
        assert [laid_out.positions[place] for place in places] == list(range(len(row)))
        for depth, place in enumerate(places):
            assert visible(laid_out, place) == row[: depth + 1]
    assert {place for places in laid_out.places for place in places} == set(range(len(laid_out.token_ids)))


@settings(deadline=None, max_examples=200)
@given(ROWS)
def test_a_tree_holds_every_different_prefix_once(rows: Rows) -> None:
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert different(rows) == len(tree(rows).token_ids) == len(prefixes)


def runs(order: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to cut a sequence into runs."""
    for cuts in range(2 ** (len(order) - 1)):
        groups, start = [], 0
        for end in range(1, len(order) + 1):
            if end == len(order) or cuts >> (end - 1) & 1:
                groups.append(tuple(order[start:end]))
                start = end
        yield groups


@settings(deadline=None, max_examples=100)
@given(ROWS, st.sampled_from([1, 3, 50]), st.integers(7, 20))
def test_the_trees_are_the_cheapest_cut_of_the_ordered_rows(rows: Rows, width: int, max_tokens: int) -> None:
    def price(groups: Sequence[Sequence[int]]) -> float:
        sizes = [different([rows[index] for index in group]) for group in groups]
        return sum(cost(size, width) for size in sizes) if max(sizes) <= max_tokens else float("inf")

    found = grouped(rows, width=width, max_tokens=max_tokens)
    assert sorted(index for group in found for index in group) == list(range(len(rows)))
    cheapest = min(price(groups) for groups in runs(in_order(rows)[0]))
    plain = sum(causal_cost(len(row), width) for row in rows)
    if plain <= cheapest:
        assert found == tuple((index,) for index in range(len(rows)))
    else:
        assert price(found) == cheapest


def siblings(count: int, shared: int, own: int) -> Rows:
    return [[*range(shared), *([1000 + number] * own)] for number in range(count)]


@pytest.mark.parametrize(
    ("shared", "own", "trees"),
    [
        (500, 100, 1),  # 1300·(384 + 1300) = 2.2 M against 8·600·(384 + 300) = 3.3 M
        (100, 500, 8),  # 4100·(384 + 4100) = 18.4 M against the same
        (450, 150, 2),  # in fours, 2·1050·(384 + 1050) = 3.0 M
    ],
)
def test_what_is_shared_is_computed_once_where_that_is_cheaper(shared: int, own: int, trees: int) -> None:
    found = grouped(siblings(8, shared, own), width=64, max_tokens=16384)
    assert len(found) == trees
    assert {len(group) for group in found} == {8 // trees}


def test_in_a_wide_model_attention_weighs_less_and_trees_are_larger() -> None:
    rows = siblings(8, 100, 500)
    # 2·1600·(24576 + 1600) + 1100·(24576 + 1100) = 112 M; one tree costs 118 M, eight rows 121 M
    assert sorted(map(len, grouped(rows, width=4096, max_tokens=16384))) == [2, 3, 3]
    assert len(grouped(rows, width=65536, max_tokens=16384)) == 1


def test_a_tree_is_no_larger_than_allowed_and_a_row_that_is_stays_alone() -> None:
    rows = siblings(8, 50, 10)
    found = grouped(rows, width=4096, max_tokens=90)
    assert {len(group) for group in found} == {4}
    assert grouped([list(range(30)), list(range(29))], width=64, max_tokens=20) == ((0,), (1,))
