"""The condensers that keep or drop whole units, case by case; the laws that all keep are in the conformance suite."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from conformance import condense, count, history, turns, unit

from condensegrpo import plugins
from condensegrpo.condensers.full import Full
from condensegrpo.condensers.last_k import LastK
from condensegrpo.errors import PluginError
from condensegrpo.messages import Message
from condensegrpo.protocols import Budget, Condensed
from condensegrpo.trajectory import Fate


def test_the_condensers_of_the_package_are_installed() -> None:
    assert {"full", "last_k", "observation_mask", "pipeline", "summary"} <= {
        point.name for point in plugins.installed("condensers")
    }


# --- full ---------------------------------------------------------------------------------------------------------


def test_full_keeps_everything_even_over_budget() -> None:
    past = history(unit(0, "a" * 50), unit(1, "b", "cc"))
    found = condense(Full(), past, tokens=10)
    assert found.units == past.units
    assert [(span.turn, span.fate, span.tokens) for span in found.spans] == [(0, Fate.KEPT, 54), (1, Fate.KEPT, 11)]


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
    # the head takes 23 tokens, each unit 4 + 6
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
    assert found.reason == "kept 3 of 5 units, without the 1 oldest of them to fit 43 tokens"
    assert [span.fate.value for span in found.spans] == ["dropped", "dropped", "dropped", "kept", "kept"]
    assert [span.tokens for span in found.spans] == [10] * 5
    assert condense(LastK(keep_last=3), past, tokens=1000).reason == "kept 3 of 5 units"
    assert condense(LastK(keep_last=5), past, tokens=1000).reason == ""


def test_last_k_of_an_empty_history_is_empty() -> None:
    assert condense(LastK(2, 2), history(), tokens=0) == Condensed(units=(), spans=())


def test_last_k_asks_for_few_counts() -> None:
    asked: list[int] = []

    def counted(messages: Sequence[Message]) -> int:
        asked.append(len(messages))
        return count(messages)

    past = history(*(unit(turn) for turn in range(60)))
    asyncio.run(LastK(keep_last=60).condense(past, Budget(tokens=50, count=counted), ()))
    assert len(asked) <= 60 + 1 + 7


@pytest.mark.parametrize("options", [{"keep_last": -1}, {"keep_first": -2}, {"keep_last": 1.5}, {"keep_last": "two"}])
def test_last_k_refuses_what_is_no_count(options: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match=r"setting up 'last_k' of the condensers"):
        plugins.build("condensers", "last_k", options)
