"""Prefix trees: every token sees exactly its own row, at its own depth, and trees are cut where least is shared."""

from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.algorithms.prefix_tree import Tree, distinct_tokens, sorted_rows, tree, tree_groups

Rows = list[list[int]]
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)  # much is shared


def continued(laid_out: Tree, place: int) -> list[int]:
    """The ids of a token's row up to itself, by the rule of the module's docstring: positions alone tell it."""
    path: list[int] = []
    for token, position in zip(laid_out.token_ids[: place + 1], laid_out.positions, strict=False):
        path[position:] = [token]
    return path


def test_the_example_of_the_docstring() -> None:
    found = tree([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]])
    assert found.token_ids == (1, 2, 3, 4, 5, 6)
    assert found.positions == (0, 1, 2, 3, 3, 1)
    assert found.indices == ((0, 1, 2, 3), (0, 1, 2, 4), (0, 5))


def test_a_row_alone_is_a_tree() -> None:
    assert tree([[7, 8, 9]]) == Tree((7, 8, 9), (0, 1, 2), ((0, 1, 2),))


def test_equal_rows_share_all_their_tokens() -> None:
    found = tree([[4, 5], [4, 5], [4, 5]])
    assert found.token_ids == (4, 5)
    assert found.indices == ((0, 1),) * 3


def test_a_row_that_begins_another_one_lies_within_it() -> None:
    found = tree([[4, 5, 6], [4], [4, 5]])
    assert found.token_ids == (4, 5, 6)
    assert found.indices == ((0, 1, 2), (0,), (0, 1))


def test_rows_that_begin_differently_are_trees_behind_each_other() -> None:
    found = tree([[4, 5], [6, 5]])
    assert found.token_ids == (4, 5, 6, 5)
    assert found.positions == (0, 1, 0, 1)


def test_no_rows_are_an_empty_tree() -> None:
    assert tree([]) == Tree((), (), ())
    assert sorted_rows([]) == ([], [])
    assert tree_groups([], max_tokens=8) == ()


def test_the_order_of_ids_is_depth_first_with_what_each_shares_with_the_last() -> None:
    assert sorted_rows([[1, 2, 3], [4], [1, 2]]) == ([2, 0, 1], [0, 2, 0])


@settings(max_examples=100)
@given(ROWS)
def test_every_token_sees_exactly_its_own_row_up_to_itself(rows: Rows) -> None:
    laid_out = tree(rows)
    for row, places in zip(rows, laid_out.indices, strict=True):
        assert [laid_out.token_ids[place] for place in places] == row
        assert [laid_out.positions[place] for place in places] == list(range(len(row)))
        for depth, place in enumerate(places):
            assert continued(laid_out, place) == row[: depth + 1]
    assert {place for places in laid_out.indices for place in places} == set(range(len(laid_out.token_ids)))


@settings(max_examples=80)
@given(ROWS)
def test_a_tree_holds_every_different_prefix_once(rows: Rows) -> None:
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert distinct_tokens(rows) == len(tree(rows).token_ids) == len(prefixes)


def test_what_is_too_large_is_cut_where_least_is_shared() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [1, 5], [6]]
    assert tree_groups(rows, max_tokens=5) == ((0, 1, 2), (3,))
    assert tree_groups(rows, max_tokens=4) == ((0, 1), (2,), (3,))
    assert tree_groups(rows, max_tokens=3) == ((0,), (1,), (2,), (3,))


def test_of_places_where_as_much_is_shared_the_middle_one_is_cut() -> None:
    rows = [[*range(50), *([1000 + number] * 10)] for number in range(8)]  # one tree of 130 tokens
    assert tree_groups(rows, max_tokens=130) == (tuple(range(8)),)
    assert tree_groups(rows, max_tokens=129) == ((0, 1, 2, 3), (4, 5, 6, 7))  # 90 tokens each


def test_rows_that_share_nothing_are_trees_of_their_own_however_much_fits() -> None:
    assert tree_groups([[1, 2], [3, 4]], max_tokens=99) == ((0,), (1,))


def test_a_row_over_the_budget_stays_alone() -> None:
    assert tree_groups([list(range(30)), list(range(29))], max_tokens=20) == ((1,), (0,))


def test_hundreds_of_rows_with_a_common_start_and_a_small_budget_are_cut_without_deep_recursion() -> None:
    found = tree_groups([[0, *[number] * 9] for number in range(1, 3000)], max_tokens=10)
    assert len(found) == 2999


@settings(max_examples=80)
@given(ROWS, st.integers(1, 20))
def test_every_row_is_in_one_tree_that_fits_and_nothing_is_repeated_that_needs_not(rows: Rows, max_tokens: int) -> None:
    found = tree_groups(rows, max_tokens=max_tokens)
    assert sorted(index for group in found for index in group) == list(range(len(rows)))
    sizes = [distinct_tokens([rows[index] for index in group]) for group in found]
    assert all(size <= max_tokens or len(group) == 1 for size, group in zip(sizes, found, strict=True))
    assert sum(sizes) <= sum(map(len, rows))
    if distinct_tokens(rows) <= max_tokens:
        assert sum(sizes) == distinct_tokens(rows)  # nothing is computed twice
