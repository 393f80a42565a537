"""The condenser's stopwatch: overlapping stays count once."""

import time

import pytest

from condensegrpo.episodes.engine import Stopwatch


def test_stays_that_overlap_count_once() -> None:
    watch, began = Stopwatch(), time.monotonic()
    watch.__enter__()
    time.sleep(0.02)
    watch.__enter__()
    time.sleep(0.02)
    watch.__exit__()
    time.sleep(0.02)
    watch.__exit__()
    assert 0.06 <= watch.seconds <= time.monotonic() - began


def test_stays_apart_add_up_and_the_time_between_them_does_not_count() -> None:
    watch, began = Stopwatch(), time.monotonic()
    for _ in range(2):
        with watch:
            time.sleep(0.02)
        before = watch.seconds
        time.sleep(0.02)
        assert watch.seconds == before
    assert 0.04 <= watch.seconds <= time.monotonic() - began - 0.04


def test_a_failure_inside_stops_the_watch_too() -> None:
    watch = Stopwatch()
    with pytest.raises(KeyError), watch:
        raise KeyError
    before = watch.seconds
    time.sleep(0.01)
    assert watch.seconds == before
