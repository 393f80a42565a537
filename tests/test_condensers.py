"""The condensers that keep or drop whole units, case by case; the laws that all keep are in the conformance suite."""

from typing import Any

import pytest
from conformance import PINNED, condense, history, spans, turns, unit

from condensegrpo.condensers.whole_units import Full, LastK, RandomDrop, Truncate
from condensegrpo.config.options import build_plugin
from condensegrpo.core.condenser import Condensed
from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import History, Message
from condensegrpo.core.plugins import installed
from condensegrpo.core.trajectory import Span, SpanStatus


def test_the_condensers_of_the_package_are_installed() -> None:
    ours = {
        "attention",
        "full",
        "last_k",
        "observation_mask",
        "pipeline",
        "random_drop",
        "summary",
        "summary_model",
        "truncate",
    }
    assert ours <= {point.name for point in installed("condensers")}


# --- full ---------------------------------------------------------------------------------------------------------


def test_full_keeps_everything_even_over_budget() -> None:
    past = history(unit(0, "a" * 50), unit(1, "b", "cc"))
    found = condense(Full(), past, tokens=10)
    assert found.units == past.units
    assert spans(past, found) == (Span(first=0, last=1, units=2, status=SpanStatus.KEPT, tokens=54 + 11),)


# --- last_k -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "keep_first", "kept"),
    [
        (1, 0, [4]),
        (2, 0, [3, 4]),
        (0, 0, []),  # x[-0:] would keep everything
        (0, 2, [0, 1]),
        (2, 1, [0, 3, 4]),
        (3, 3, [0, 1, 2, 3, 4]),  # the unit in both halves stands once
        (9, 9, [0, 1, 2, 3, 4]),
    ],
)
def test_last_k_is_the_union_of_first_and_last_in_order(keep_last: int, keep_first: int, kept: list[int]) -> None:
    past = history(*(unit(turn) for turn in range(5)))
    assert turns(condense(LastK(keep_last, keep_first), past, tokens=10_000)) == kept


@pytest.mark.parametrize(
    ("tokens", "kept"),
    # the pinned messages take 23 tokens, each unit 4 + 6
    [(53, [0, 3, 4]), (52, [3, 4]), (43, [3, 4]), (42, [4]), (33, [4]), (32, [4]), (0, [4])],
)
def test_last_k_drops_the_oldest_first_and_never_the_newest(tokens: int, kept: list[int]) -> None:
    past = history(*(unit(turn, "sixsix") for turn in range(5)))
    assert turns(condense(LastK(2, 1), past, tokens)) == kept


def test_last_k_keeps_a_tool_result_with_its_call() -> None:
    past = history(unit(0, "x", "y"), unit(1, "call", "result", "second result"))
    (kept,) = condense(LastK(), past, tokens=1000).units
    assert kept is past.units[1]


def test_last_k_says_what_it_did() -> None:
    past = history(*(unit(turn, "sixsix") for turn in range(5)))
    found = condense(LastK(keep_last=3), past, tokens=43)
    assert found.reason == "kept 3 of 5 units, without the 1 oldest of them to fit 20 tokens"
    assert [(span.units, span.status.value, span.tokens) for span in spans(past, found)] == [
        (3, "dropped", 30),
        (2, "kept", 20),
    ]
    assert condense(LastK(keep_last=3), past, tokens=1000).reason == "kept 3 of 5 units"
    assert condense(LastK(keep_last=5), past, tokens=1000).reason == ""


def test_last_k_of_an_empty_history_is_empty() -> None:
    assert condense(LastK(2, 2), history(), tokens=0) == Condensed(units=())


@pytest.mark.parametrize("options", [{"keep_last": -1}, {"keep_first": -2}, {"keep_last": 1.5}, {"keep_last": "two"}])
def test_last_k_refuses_what_is_no_count(options: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match="setting up the condenser 'last_k'"):
        build_plugin("condensers", "last_k", options)


# --- the controls: truncate, random_drop --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kept"),
    # the pinned messages take 23 tokens, each unit 4 + 6
    [(73, [0, 1, 2, 3, 4]), (72, [1, 2, 3, 4]), (43, [3, 4]), (33, [4]), (32, [4]), (0, [4])],
)
def test_truncate_cuts_off_the_oldest_and_never_the_newest(tokens: int, kept: list[int]) -> None:
    past = history(*(unit(turn, "sixsix") for turn in range(5)))
    assert turns(condense(Truncate(), past, tokens)) == kept


def test_truncate_leaves_no_trace() -> None:
    past = history(*(unit(turn, "sixsix") for turn in range(5)))
    found = condense(Truncate(), past, 43)
    assert found.units == past.units[3:]
    assert found.reason == "cut off the 3 oldest of 5 units"
    assert condense(Truncate(), past, 1000).reason == ""


def test_truncate_is_last_k_of_everything() -> None:
    past = history(*(unit(turn, "x" * (turn % 5)) for turn in range(20)))
    for tokens in range(20, 200, 7):
        assert condense(Truncate(), past, tokens).units == condense(LastK(keep_last=20), past, tokens).units


def test_random_drop_keeps_the_newest_and_fills_the_budget() -> None:
    past = history(*(unit(turn, "sixsix") for turn in range(9)))
    found = condense(RandomDrop(), past, 53)  # the pinned messages and three units
    assert len(found.units) == 3
    assert found.units[-1] is past.units[-1]
    assert found.reason == "dropped 6 of 9 units at random"
    assert condense(RandomDrop(), past, 113).reason == ""


def test_random_drop_drops_old_and_new_units_alike() -> None:
    """Over many questions every older unit is kept about as often: two of eight, besides the newest."""
    kept = [0] * 9
    for question in range(400):
        pinned = (PINNED[0], Message(role="user", content=f"{question:4}"))
        past = History(pinned=pinned, units=tuple(unit(turn, "sixsix") for turn in range(9)))
        for turn in turns(condense(RandomDrop(), past, 53)):
            kept[turn] += 1
    assert kept[8] == 400
    assert all(70 < count < 130 for count in kept[:8])


def test_random_drop_depends_on_its_seed_and_the_question_alone() -> None:
    past = history(*(unit(turn, "sixsix") for turn in range(9)))
    assert condense(RandomDrop(seed=1), past, 53) == condense(RandomDrop(seed=1), past, 53)
    choices = {tuple(turns(condense(RandomDrop(seed=seed), past, 53))) for seed in range(20)}
    assert len(choices) > 10
    said_otherwise = history(*(unit(turn, "SIXSIX") for turn in range(9)))
    assert turns(condense(RandomDrop(), said_otherwise, 53)) == turns(condense(RandomDrop(), past, 53))


def test_what_random_drop_dropped_does_not_come_back_as_the_history_grows() -> None:
    gone: set[int] = set()
    for length in range(1, 30):
        past = history(*(unit(turn, "sixsix") for turn in range(length)))
        shown = turns(condense(RandomDrop(), past, 63))
        assert not gone & set(shown)
        gone = set(range(length)) - set(shown)


def test_random_drop_takes_text_that_cannot_be_encoded() -> None:
    past = History(pinned=(Message(role="user", content="lone \udc80"),), units=(unit(0), unit(1)))
    assert turns(condense(RandomDrop(), past, 1000)) == [0, 1]


def test_random_drop_refuses_what_is_no_seed() -> None:
    with pytest.raises(PluginError, match="setting up the condenser 'random_drop'"):
        build_plugin("condensers", "random_drop", {"seed": "two"})
