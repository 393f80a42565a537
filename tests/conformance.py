"""What every condenser owes, as checks that any of them can be put through: `from conformance import …`.

A condenser joins by being installed, with a line in ``OPTIONS`` if it cannot be built without options. One in a file is
put through the same by ``CONDENSER=path/to/file.py:Name pytest tests/test_condenser_conformance.py``.
"""

import asyncio
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from answering import always
from hypothesis import strategies as st

from condensegrpo.assembly.build import build_condenser
from condensegrpo.attention.scorer import ScriptedScorer
from condensegrpo.condensers.observation_mask import PLACEHOLDER
from condensegrpo.config.use import CondenserUse
from condensegrpo.core import plugins
from condensegrpo.core.condenser import (
    Budget,
    Condensed,
    Condenser,
    Count,
    Request,
    WrittenSummary,
    condensation_spans,
    with_tokens,
)
from condensegrpo.core.messages import History, Message, ToolCall, Unit, flatten
from condensegrpo.core.trajectory import FinishReason, Span, SpanStatus
from condensegrpo.episodes.prompt import REPEATS

Options = dict[str, Any]
NEVER_CUTS = {"full", "fold", "prune", "compact", "recall"}  # over budget they return everything, and the engine stops
CHOOSING = {"random_drop": "by lot", "attention": "by score"}  # what goes is not the oldest
MASK, LAST = {"name": "observation_mask"}, {"name": "last_k", "options": {"keep_last": 300}}
DECIDED: Options = {  # by the policy, with rules as the safety net
    "stages": [
        *({"name": name, "over": 0} for name in ("fold", "prune", "recall")),
        {"name": "compact", "over": 0, "options": {"max_tokens": 40}},
        MASK,
        {"name": "memory", "over": 0},
    ]
}
OPTIONS: dict[str, list[Options | Callable[[], Options]]] = {  # a callable is called when its condenser is tested
    "anchors": [
        {},
        {"share": 0.5, "stages": [MASK]},
        {"stages": [{"name": "attention"}], "kinds": ["number", "path"]},
        {"stages": [{"name": "summary", "options": {"max_tokens": 40}}, LAST]},
    ],
    "last_k": [
        {"keep_last": last, "keep_first": first} for last, first in [(1, 0), (0, 0), (0, 2), (3, 0), (2, 1), (99, 0)]
    ],
    "attention": [{}, {"smoothing": 0.0, "lookback": 0, "hysteresis": 1.0}],
    "observation_mask": [{}, {"keep": 0}, {"keep": 1, "exclude_tools": ["t"]}, {"keep": 2, "only_tools": True}],
    "summary": [{}, {"max_tokens": 40, "keep_last": 3}],
    "summary_model": [lambda: {"model": "m", "url": always("done: all <|im_end|>"), "max_tokens": 40}],
    "pipeline": [
        {"stages": [MASK, LAST]},
        {"stages": [{**MASK, "options": {"keep": 1, "drop_oldest": False}}, LAST]},
        {"stages": [{**MASK, "over": 0.5}, {"name": "summary", "options": {"max_tokens": 40}}, LAST]},
        {"stages": [{**MASK, "over": 0.5}, {"name": "last_k", "options": {"keep_last": 4, "keep_first": 1}}]},
        DECIDED,
    ],
    "random_drop": [{}, {"seed": 3}],
    "compact": [{"max_tokens": 40}, {"max_tokens": 40, "keep_last": 2, "over_budget": True}],
}


@dataclass(frozen=True)
class Case:
    """A condenser with its options."""

    name: str
    options: Options | Callable[[], Options]

    def build(self) -> Condenser:
        """As a configuration builds it."""
        options = self.options() if callable(self.options) else self.options
        return build_condenser(CondenserUse(name=self.name, options=options))

    def __str__(self) -> str:
        return f"{self.name}-{'' if callable(self.options) else self.options}"


def cases() -> list[Case]:
    """Every condenser that is installed, or the one that the environment names."""
    installed = [point.name for point in plugins.installed("condensers")]
    names = [os.environ["CONDENSER"]] if "CONDENSER" in os.environ else installed
    return [Case(name, options) for name in names for options in OPTIONS.get(name, [{}])]


def rule_based() -> list[Case]:
    """One case of every condenser."""
    return list({case.name: case for case in reversed(cases())}.values())


# --- histories --------------------------------------------------------------------------------------------------------


def count(messages: Sequence[Message]) -> int:
    """Four tokens a message and one a character, three for the generation prompt: as simple as a real template."""
    return 3 + sum(4 + len(message.content) for message in messages)


def unit(turn: int, text: str = "abc", *results: str, ids: Sequence[str] = (), tool: str = "t") -> Unit:
    """A reply that called a tool once for every result, by the ids given or ``call_0``, ``call_1``, …"""
    calls = [*ids[: len(results)], *(f"call_{place}" for place in range(len(ids), len(results)))]
    made = Unit(
        turn=turn,
        reply=Message(
            role="assistant",
            content=text,
            tool_calls=tuple(ToolCall(id=call, name=tool, arguments="{}") for call in calls),
        ),
        results=tuple(
            Message(role="tool", content=result, tool_call_id=call, name=tool)
            for call, result in zip(calls, results, strict=True)
        ),
    )
    return replace(made, tokens=count(made.messages) - 3)


def answered(turn: int, text: str, observation: str) -> Unit:
    """A reply that the environment answered."""
    made = Unit(
        turn=turn,
        reply=Message(role="assistant", content=text),
        results=(Message(role="user", content=observation),),
    )
    return replace(made, tokens=count(made.messages) - 3)


PINNED = (Message(role="system", content="be brief"), Message(role="user", content="why?"))  # 3 + 4+8 + 4+4 = 23 tokens


def history(*units: Unit) -> History:
    return History(pinned=PINNED, units=units)


SPECIAL = [
    "",
    "<|im_end|>",
    "<|im_start|>system\n",
    "<think>x</think>",
    "漢字🙂",
    "[turn 0, tool result omitted: 9 tokens]",
]
LONG = "0123456789" * 5000  # an observation of 50,000 characters
TEXTS = st.text(max_size=12) | st.sampled_from(SPECIAL)
RESULTS = TEXTS | st.sampled_from([LONG, "x" * 80])


@st.composite
def histories(draw: st.DrawFn, *, most: int = 200, results: st.SearchStrategy[str] = RESULTS) -> History:
    """Up to ``most`` turns: empty replies, parallel calls, ids that come again, 50k observations, control tokens."""
    kinds = draw(
        st.lists(st.tuples(TEXTS, st.lists(results, max_size=3), st.booleans(), st.booleans()), min_size=1, max_size=8)
    )
    total = draw(st.integers(0, most))
    units = []
    for place in range(total):  # a few kinds of turns over and over: as varied, and quick to draw
        text, texts, same_ids, by_user = kinds[place % len(kinds)]
        if by_user and texts:
            units.append(answered(2 * place, text, texts[0]))
        else:
            units.append(unit(2 * place, text, *texts, ids=["same"] * len(texts) if same_ids else ()))
    question = draw(TEXTS)
    pinned = (Message(role="system", content=""), Message(role="user", content=question))
    return History(pinned=pinned, units=tuple(units))


# --- checks -----------------------------------------------------------------------------------------------------------


def length(unit: Unit) -> float:
    """A score for the condensers that rank: that of every history is the same, and differs between units."""
    return float(len(unit.reply.content) % 7)


async def brief(request: Request) -> WrittenSummary:
    """A policy that always writes the same summary."""
    return WrittenSummary(text="done: all <|im_end|>", finish=FinishReason.STOP)


def budget(tokens: int) -> Budget:
    """As the engine gives it: the context that is asked for a summary may be larger than what a summary leaves."""
    return Budget(tokens=tokens, prompt_tokens=tokens + 500, scorers={"policy": ScriptedScorer(length)}, write=brief)


def condense(condenser: Condenser, past: History, tokens: int, counted: Count = count) -> Condensed:
    """An answer within ``tokens`` of a whole prompt, called again as the engine does it if it is over them.

    The tokens of a new note are an estimate: a further call sees it as it was measured.
    """
    past = _counted(past, counted)
    pinned = counted(past.pinned)
    room, found = max(tokens - pinned, 0), None
    for _ in range(1 + REPEATS):
        answer = condenser.condense(past, budget(room))  # of a plain function its result, which the engine takes too
        before, found = found, asyncio.run(answer) if inspect.iscoroutine(answer) else answer
        if before is not None and before.note in found.units and found.note is None:
            found = replace(found, note=before.note)
        over = counted(flatten(past.pinned, found.units)) - tokens
        if over <= 0 or before == found:
            break
        if found.note in found.units:
            others = sum(unit.tokens for unit in found.units if unit is not found.note)
            past = replace(past, note=replace(found.note, tokens=tokens + over - pinned - others))
        room = max(room - over, 0)
    return found


def _counted(past: History, counted: Count) -> History:
    """The history with the tokens of its units."""
    if counted is count:
        return with_tokens(past, count)
    return with_tokens(replace(past, units=tuple(replace(unit, tokens=0) for unit in past.units)), counted)


def turns(condensed: Condensed) -> list[int]:
    return [kept.turn for kept in condensed.units]


def spans(past: History, found: Condensed, counted: Count = count) -> tuple[Span, ...]:
    """What became of the units, as the engine accounts for them."""
    past = _counted(past, counted)
    return condensation_spans(past if found.note is None else replace(past, note=found.note), found.units)


def statuses(past: History, found: Condensed, counted: Count = count) -> str:
    """One letter a unit: k kept, d dropped, r rewritten."""
    return "".join(span.status.value[0] * span.units for span in spans(past, found, counted))


def check_account(past: History, found: Condensed, counted: Count = count) -> None:
    """Units in order, none twice, none made up; a true account of every unit."""
    originals = {original.turn: original for original in past.units}
    assert set(turns(found)) <= set(originals), (
        f"condense() returned units of the turns {turns(found)}, and the history has {list(originals)}: return units "
        f"of history.units, and take the turn of a note from the last unit that it stands for"
    )
    assert turns(found) == sorted(set(turns(found))), (
        f"condense() returned units of the turns {turns(found)}: return each at most once, in the order of the history"
    )
    shown = {kept.turn: kept for kept in found.units}
    covered = found.note.turn if found.note is not None else -1

    def status(turn: int) -> SpanStatus:
        if turn <= covered or (turn in shown and shown[turn] != originals[turn]):
            return SpanStatus.REWRITTEN
        return SpanStatus.KEPT if turn in shown else SpanStatus.DROPPED

    tokens = {unit.turn: unit.tokens for unit in _counted(past, counted).units}
    runs = [list(run) for _, run in groupby(originals, key=status)]
    assert list(spans(past, found, counted)) == [
        Span(
            first=run[0], last=run[-1], units=len(run), status=status(run[0]), tokens=sum(tokens[turn] for turn in run)
        )
        for run in runs
    ]


def check_atomic(past: History, found: Condensed) -> None:
    """No result without its call and no call without its result: a shown unit has all its messages, in order.

    A note is the one unit whose reply is not the one that was given.
    """
    originals = {original.turn: original for original in past.units}
    for kept in found.units:
        original = originals[kept.turn]
        if kept.reply != original.reply:
            assert kept.is_note, (
                f"the unit of turn {kept.turn} has another reply, {kept.reply.text!r:.80} for "
                f"{original.reply.text!r:.80}: replies stay as they were; make a text that you insert with "
                f"condensegrpo.core.messages.note(history, dropped, text)"
            )
        else:
            ids, whole = _answered(kept), _answered(original)
            assert ids == whole, (
                f"the unit of turn {kept.turn} has results of the calls {ids}, and its reply made {whole}: keep or "
                f"drop a unit with all its results, and rewrite one with unit.with_results(…)"
            )
        assert set(_answered(kept)) <= {call.id for call in kept.reply.tool_calls}, (
            f"the unit of turn {kept.turn} has a result without its call"
        )
        assert kept.reply.role == "assistant", f"the reply of turn {kept.turn} has the role {kept.reply.role}"
    assert sum(kept.is_note and not originals[kept.turn].is_note for kept in found.units) <= 4


def _answered(unit: Unit) -> list[str]:
    """The calls that its results answer."""
    return [result.tool_call_id for result in unit.results if result.tool_call_id is not None]


def check_placeholders(past: History, found: Condensed, counted: Count = count) -> None:
    """Every placeholder that a condenser put in the place of a message says how many tokens that one had."""
    past = _counted(past, counted)
    originals = {original.turn: original for original in past.units}
    for kept in found.units:
        original = originals[kept.turn]
        if kept.is_note and not original.is_note:
            tokens = sum(unit.tokens for unit in past.units if unit.turn <= kept.turn)
            through = re.fullmatch(r"\[turns up to (\d+) omitted, .*: (\d+) tokens\]", kept.results[0].content)
            assert through is not None
            assert int(through[1]) == kept.turn
            assert 0 < int(through[2]) <= tokens, "less if they were masked before they were summarised"
            continue
        for shown, raw in zip(kept.results, original.results, strict=True):
            if shown != raw:
                kind = "observation" if raw.tool_call_id is None else "tool result"
                wanted = f"[turn {kept.turn}, {kind} omitted: {original.tokens_of(raw)} tokens]"
                anchors = shown.content[len(wanted) :] if PLACEHOLDER.fullmatch(shown.content) else ""
                assert shown == replace(raw, content=wanted + anchors), (
                    "a placeholder that does not count what it replaces"
                )


def check_budget(name: str, past: History, found: Condensed, tokens: int, counted: Count = count) -> None:
    """Within the budget, or the newest unit alone where not even that fits."""
    if name in NEVER_CUTS or not past.units:
        return
    has = counted(flatten(past.pinned, found.units))
    if has > tokens:
        assert len(found.units) <= 1, (
            f"{len(found.units)} units make a prompt of {has} tokens, and {tokens} are allowed: leave out units until "
            f"sum(unit.tokens for unit in units) <= budget.tokens"
        )
        newest_fits = counted(flatten(past.pinned, past.units[-1:])) <= tokens
        assert not (newest_fits and past.units[-1] in found.units)
