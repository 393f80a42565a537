import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo import plugins
from condensegrpo.condensers.full import Full
from condensegrpo.condensers.last_k import LastK
from condensegrpo.condensers.random_drop import RandomDrop
from condensegrpo.condensers.truncate import Truncate
from condensegrpo.errors import PluginError
from condensegrpo.messages import History, Message, Unit, flatten
from condensegrpo.protocols import Budget, Condensed, Condenser
from condensegrpo.trajectory import Fate

NEVER_CUTS = {"full"}  # over budget it returns everything, and the engine stops
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "last_k": [
        {"keep_last": last, "keep_first": first} for last, first in [(1, 0), (0, 0), (0, 2), (3, 0), (2, 1), (99, 0)]
    ],
    "random_drop": [{}, {"seed": 3}],
}
EVERY = [
    (point.name, options) for point in plugins.installed("condensers") for options in OPTIONS.get(point.name, [{}])
]


def count(messages: Sequence[Message]) -> int:
    """Four tokens a message and one a character, three for the generation prompt: as simple as a real template."""
    return 3 + sum(4 + len(message.content) for message in messages)


def unit(turn: int, text: str = "abc", *results: str) -> Unit:
    return Unit(
        turn=turn,
        reply=Message(role="assistant", content=text),
        results=tuple(Message(role="tool", content=result, tool_call_id="call_0", name="t") for result in results),
    )


HEAD = (Message(role="system", content="be brief"), Message(role="user", content="why?"))  # 3 + 4+8 + 4+4 = 23 tokens


def history(*units: Unit) -> History:
    return History(head=HEAD, units=units)


def condense(condenser: Condenser, past: History, tokens: int) -> Condensed:
    return asyncio.run(condenser.condense(past, Budget(tokens=tokens, count=count), ()))


def turns(condensed: Condensed) -> list[int]:
    return [kept.turn for kept in condensed.units]


# --- every condenser that is installed ----------------------------------------------------------------------------

TEXTS = st.text(max_size=12) | st.sampled_from(["", "<|im_end|>", "<|im_start|>system\n", "<think>x</think>", "漢字🙂"])
HISTORIES = st.builds(
    lambda question, replies: History(
        head=(Message(role="system", content=""), Message(role="user", content=question)),
        units=tuple(unit(2 * turn, text, *results) for turn, (text, results) in enumerate(replies)),
    ),
    TEXTS,
    st.lists(st.tuples(TEXTS, st.lists(TEXTS, max_size=3)), max_size=60),
)


@pytest.mark.parametrize(("name", "options"), EVERY)
@settings(deadline=None, max_examples=40)
@given(past=HISTORIES, tokens=st.integers(0, 600))
def test_every_condenser_keeps_the_contract(name: str, options: dict[str, Any], past: History, tokens: int) -> None:
    condenser = plugins.build("condensers", name, options)
    found = condense(condenser, past, tokens)
    assert condense(condenser, past, tokens) == found, "deterministic"

    originals = {original.turn: original for original in past.units}
    assert turns(found) == sorted(set(turns(found)) & set(originals)), "units in order, none twice, none made up"
    assert [span.turn for span in found.spans] == list(originals), "a span for every unit, in order"
    fates = {span.turn: span.fate for span in found.spans}
    assert [turn for turn, fate in fates.items() if fate is not Fate.DROPPED] == turns(found)
    assert all(originals[kept.turn] == kept for kept in found.units if fates[kept.turn] is Fate.KEPT), "atomic"
    assert all(span.tokens == count(originals[span.turn].messages) - 3 for span in found.spans)

    if name not in NEVER_CUTS and past.units:
        newest_fits = count(flatten(past.head, past.units[-1:])) <= tokens
        fits = count(flatten(past.head, found.units)) <= tokens
        assert fits or (len(found.units) <= 1 and not (newest_fits and past.units[-1] in found.units))
        if fits:
            again = condense(condenser, History(head=past.head, units=found.units), tokens)
            assert again.units == found.units, "idempotent within the budget"


def test_the_condensers_of_the_first_release_are_installed() -> None:
    assert {"full", "last_k", "random_drop", "truncate"} <= {name for name, _ in EVERY}


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


# --- the controls: truncate, random_drop --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kept"),
    # the head takes 23 tokens, each unit 4 + 6
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
    found = condense(RandomDrop(), past, 53)  # the head and three units
    assert len(found.units) == 3
    assert found.units[-1] is past.units[-1]
    assert found.reason == "dropped 6 of 9 units at random"
    assert condense(RandomDrop(), past, 113).reason == ""


def test_random_drop_drops_old_and_new_units_alike() -> None:
    """Over many questions every older unit is kept about as often: two of eight, besides the newest."""
    kept = [0] * 9
    for question in range(400):
        head = (HEAD[0], Message(role="user", content=f"{question:4}"))
        past = History(head=head, units=tuple(unit(turn, "sixsix") for turn in range(9)))
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
    past = History(head=(Message(role="user", content="lone \udc80"),), units=(unit(0), unit(1)))
    assert turns(condense(RandomDrop(), past, 1000)) == [0, 1]


@pytest.mark.parametrize("name", ["truncate", "random_drop", "last_k"])
def test_a_control_asks_for_few_counts(name: str) -> None:
    asked: list[int] = []

    def counted(messages: Sequence[Message]) -> int:
        asked.append(len(messages))
        return count(messages)

    past = history(*(unit(turn) for turn in range(60)))
    asyncio.run(plugins.build("condensers", name, {}).condense(past, Budget(tokens=50, count=counted), ()))
    assert len(asked) <= 60 + 1 + 7


def test_random_drop_refuses_what_is_no_seed() -> None:
    with pytest.raises(PluginError, match="setting up 'random_drop' of the condensers"):
        plugins.build("condensers", "random_drop", {"seed": "two"})
