"""Prompts as copies of earlier ids: what is stored gives the ids back, and is short."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from condensegrpo.core.shared_sequence import shared_ids
from condensegrpo.storage.stored_trajectory import copied_parts, ids_of_parts

EARLIER = tuple(range(100, 140))
FEW = st.lists(st.integers(0, 3), max_size=60)  # ids that repeat: copies may start at several places


@given(earlier=FEW, ids=FEW)
def test_parts_give_the_ids_back(earlier: list[int], ids: list[int]) -> None:
    assert list(ids_of_parts(copied_parts(ids, earlier), earlier)) == ids


@given(earlier=st.lists(st.integers(0, 2**32 - 1), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_ids_that_were_cut_and_put_together_again_come_back(earlier: list[int], cuts: list[int]) -> None:
    ids = [each for cut in cuts for each in (*earlier[cut:], 7)]
    assert list(ids_of_parts(copied_parts(shared_ids(ids), shared_ids(earlier)), shared_ids(earlier))) == ids


@pytest.mark.parametrize(
    ("ids", "stored"),
    [
        (EARLIER, [[0, 40]]),
        ((*EARLIER[:10], *EARLIER[20:]), [[0, 10], [20, 40]]),
        ((*EARLIER[:10], 1, 2, *EARLIER[12:], 3), [[0, 10, 1, 2], [12, 40, 3]]),
        ((1, *EARLIER[5:]), [[0, 0, 1], [5, 40]]),
        ((*EARLIER[:4], 1), [[0, 0, 100, 101, 102, 103, 1]]),
        ((), []),
    ],
    ids=["all", "dropped", "masked", "first is new", "too short to copy", "none"],
)
def test_what_was_dropped_or_masked_makes_few_parts(ids: tuple[int, ...], stored: list[list[int]]) -> None:
    assert copied_parts(ids, EARLIER) == stored
    assert tuple(ids_of_parts(stored, EARLIER)) == ids


def test_ids_whose_bytes_stand_between_others_cost_no_search_each() -> None:
    """1 is the bytes 1 0 0 0 and 256 the bytes 0 1 0 0: within repeated 256 there are repeated 1."""
    began = time.process_time()
    assert copied_parts([1] * 16000, [256] * 16000) == [[0, 0, *[1] * 16000]]
    assert time.process_time() - began < 1


@pytest.mark.parametrize("part", [[], [1], [3, 2], [0, 41], [-1, 4]])
def test_a_damaged_part_is_named(part: list[int]) -> None:
    with pytest.raises(ValueError, match=r"wanted parts \[first, end, new, …\] of 40 earlier ids, found"):
        ids_of_parts([part], EARLIER)
