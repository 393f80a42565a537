"""Views: units add up to the prompt, a condenser is called again if it is over budget, and a question survives."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from talk import Counting, agent, counting, engine, play_all, problem

from condensegrpo.condensers.observation_mask import ObservationMask
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.messages import History, Message, Unit, note
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.trajectory import StopReason, Trajectory


def play(condenser: Condenser, environment: type = Counting, **limits: Any) -> Trajectory:
    (one,) = play_all(engine(agent(counting), condenser=condenser, **limits), [problem()], environment)
    return one


@dataclass
class Watching(Condenser):
    """Keeps everything but the first ``dropped`` units, and remembers what it was given."""

    dropped: int = 0
    histories: list[History] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)

    async def condense(self, history: History, budget: Budget) -> Condensed:
        self.histories.append(history)
        self.rooms.append(budget.tokens)
        return Condensed(units=history.units[self.dropped :] if len(history.units) > self.dropped else history.units)


def test_the_tokens_of_units_add_up_to_the_prompt() -> None:
    watching = Watching()
    one = play(watching)
    pinned = len(one.turns[0].prompt_ids)
    for history, turn in zip(watching.histories, one.turns[1:], strict=True):
        assert pinned + sum(unit.tokens for unit in history.units) == len(turn.prompt_ids)
    assert watching.rooms == [1000 - pinned] * 5


class Optimist(Condenser):
    """Takes its units for half as long as they are."""

    def __init__(self) -> None:
        self.rooms: list[int] = []

    async def condense(self, history: History, budget: Budget) -> Condensed:
        self.rooms.append(budget.tokens)
        units = list(history.units)
        while len(units) > 1 and sum(unit.tokens for unit in units) > 2 * budget.tokens:
            del units[0]
        return Condensed(units=tuple(units), reason="by guess")


def test_a_condenser_is_called_again_with_the_overflow_taken_off() -> None:
    """Pinned 42, units of 30: three units make 132 tokens, and 110 are allowed."""
    optimist = Optimist()
    one = play(optimist, max_context_tokens=110)
    assert one.stop is StopReason.ANSWERED
    assert [len(turn.prompt_ids) for turn in one.turns[:4]] == [42, 72, 102, 72]
    # 3 · 30 are less than 2 · 68 and 2 · 46, and the prompt has 132 − 110 = 22 tokens too many; 2 · 24 hold one unit
    assert optimist.rooms[:5] == [68, 68, 68, 46, 24]


def test_a_condenser_that_changes_nothing_is_called_three_times_more() -> None:
    watching = Watching()
    one = play(watching, max_context_tokens=110)
    assert one.stop is StopReason.CONTEXT_OVERFLOW
    assert watching.rooms == [68, 68, 68, 46, 24, 2]


WHY = "because of it " * 5


class Asking(Counting):
    """Asks a further question with its second observation, and another with its fourth."""

    async def step(self, reply: Message) -> Step:
        step = await super().step(reply)
        number = len(self.replies)
        if step.done or number not in (2, 4):
            return step
        return Step(observations=(Message(role="user", content=f"seen {number}, and now? {WHY}"),), new_query=True)


@pytest.mark.parametrize("condenser", [LastK(keep_last=1), ObservationMask(keep=0)], ids=["last_k", "observation_mask"])
def test_further_questions_stay_shown(condenser: Condenser) -> None:
    replies = agent(lambda prompt: f"hello {prompt.count('hello')}")
    (one,) = play_all(engine(replies, condenser=condenser, max_turns=6), [problem()], Asking)
    asked = [[message.text[:6] for message in turn.context if "and now?" in message.text] for turn in one.turns]
    assert asked == [[], [], *[["seen 2"]] * 2, *[["seen 2", "seen 4"]] * 2]
    for turn in one.turns:
        roles = [message.role for message in turn.context[2:]]
        assert roles == ["assistant", "user"] * (len(roles) // 2)  # with its reply, in order


class Listing(Condenser):
    """Shows a text in the place of all units but the newest."""

    async def condense(self, history: History, budget: Budget) -> Condensed:
        *dropped, newest = history.units
        if not dropped:
            return Condensed(units=history.units)
        listed = note(history, dropped, f"{len(dropped)} replies")
        return Condensed(units=(listed, newest), note=listed, reason="listed")


def test_a_note_stands_for_units_and_is_the_historys_from_then_on() -> None:
    one = play(Listing())
    assert [message.text for message in one.turns[3].context[2:]] == [
        "2 replies",
        "[turns up to 1 omitted, replaced by the note above: 60 tokens]",
        "hello 2",
        "seen 3",
    ]
    assert one.turns[3].condensation is not None
    assert [(span.status.value, span.units) for span in one.turns[3].condensation.spans] == [
        ("rewritten", 2),
        ("kept", 1),
    ]


class Forgetful(Condenser):
    """A note of all units but the newest, which it does not give back as the history's."""

    async def condense(self, history: History, budget: Budget) -> Condensed:
        *dropped, newest = history.units
        return Condensed(units=(note(history, dropped, "x"), newest) if dropped else (newest,))


def test_messages_of_the_user_stay_under_a_note_that_is_not_the_historys() -> None:
    """It ended the episode: the units of the messages stood out of order."""

    class Asking(Counting):
        async def step(self, reply: Message) -> Step:
            step = await super().step(reply)
            return replace(step, new_query=len(self.replies) in (1, 3))

    made = engine(agent(lambda _: "hello"), condenser=Forgetful(), max_turns=6, condense_when="every_turn")
    (one,) = play_all(made, [problem()], Asking)
    assert (one.stop, len(one.turns)) == (StopReason.TURN_LIMIT, 6), one.detail
    assert all("seen 3" in "".join(message.text for message in turn.context) for turn in one.turns[3:])


def test_rewritten_units_have_estimated_tokens() -> None:
    """Two messages of 4 tokens more than their characters: the density is 1, so that a shorter text has fewer."""
    reply, result = Message(role="assistant", content="a" * 10), Message(role="user", content="b" * 30)
    unit = Unit(turn=0, reply=reply, results=(result,), tokens=48)
    assert (unit.tokens_of(reply), unit.tokens_of(result)) == (14, 34)
    assert unit.with_results((Message(role="user", content="b" * 5),)).tokens == 14 + 9
    dense = Unit(turn=0, reply=reply, results=(result,), tokens=18)  # a quarter of a token a character
    assert dense.with_results((Message(role="user", content="b" * 6),)).tokens == 18 - 12 + 4 + 2  # a third of one
