"""Draws the examples of docs/reference/condensers.md: python docs/scripts/condensers.py [NAME]"""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from condensegrpo.assembly.parts import build_condenser
from condensegrpo.attention.scripted import ScriptedScorer
from condensegrpo.config.schema import CondenserPlugin
from condensegrpo.core.account import account
from condensegrpo.core.messages import History, Message, ToolCall, Unit, flatten
from condensegrpo.core.protocols import Budget, Request, Written
from condensegrpo.core.trajectory import Finish

WIDTH = 62  # of the left column
SCORES = (0.9, 0.2, 0.1, 0.0)  # of the units, as the question and the last output might look at them
SUMMARY = "Facts: Mia 0.7312 (a), Ben 0.1184 (b). Done: Mia, Ben. Pending: Zoe. Failed: none. Next: Zoe."


def count(messages: Sequence[Message]) -> int:
    """Four tokens a message and one a word, three for the generation prompt: like a real template, and easy to add."""
    return 3 + sum(4 + len(message.text.split()) for message in messages)


def looked_up(turn: int, thought: str, call: str, words: str) -> Unit:
    """A thought with a call, and a page of words as its result."""
    return Unit(
        turn=turn,
        reply=Message(
            role="assistant",
            content=f"{thought} {call}",
            tool_calls=(ToolCall(id="call_0", name="search", arguments="{}"),),
        ),
        results=(Message(role="tool", content=words, tool_call_id="call_0", name="search"),),
    )


def page(found: str) -> str:
    """A search result of 40 words, of which two matter."""
    return " ".join([found, *["…"] * 38])


EXAMPLE = History(
    pinned=(Message(role="system", content="Be brief."), Message(role="user", content="Who has the highest rate?")),
    units=(
        looked_up(0, "First Mia.", "search(Mia)", page("Mia 0.7312")),
        looked_up(1, "Then Ben.", "search(Ben)", page("Ben 0.1184")),
        looked_up(2, "Now Zoe.", "search(Zoe)", page("nothing found")),
        looked_up(3, "Zoe by id.", "search(id=7)", page("Zoe 0.9001")),
    ),
)


async def policy(request: Request) -> Written:
    """What a policy might write."""
    return Written(text=SUMMARY, finish=Finish.STOP)


def drawn(name: str, options: dict[str, object], tokens: int) -> str:
    """The example before and after a condenser, each unit beside what is shown of it."""
    condenser = build_condenser(CondenserPlugin(name=name, options=options))
    scorer = ScriptedScorer(lambda unit: SCORES[unit.turn])
    budget = Budget(tokens=tokens, count=count, scorers={"policy": scorer}, write=policy, request_tokens=400)
    found = asyncio.run(condenser.condense(EXAMPLE, budget, ()))
    shown = {unit.turn: unit for unit in found.units}
    after = count(flatten(EXAMPLE.pinned, found.units))
    lines = [f"{f'{count(EXAMPLE.messages)} tokens':{WIDTH}}   {after} tokens, of {tokens} allowed"]
    lines += [f"{message.role:9} {message.text:{WIDTH - 10}}   {message.text}" for message in EXAMPLE.pinned]
    summarised = EXAMPLE if found.summary is None else EXAMPLE.with_summary(found.summary)
    spans = account(summarised, found.units, count)
    statuses = {turn: span.status.value for span in spans for turn in span.turns}
    for unit in EXAMPLE.units:
        lines += _unit(unit, shown.get(unit.turn), statuses[unit.turn])
    return "\n".join(line.rstrip() for line in (*lines, f"reason: {found.reason}" if found.reason else "reason: none"))


def _unit(unit: Unit, shown: Unit | None, status: str) -> list[str]:
    before = [_short(message) for message in unit.messages]
    after = [_short(message) for message in shown.messages] if shown else [f"({status})", ""]
    return [f"{left:{WIDTH}}   {right}" for left, right in zip(before, after, strict=True)]


def _short(message: Message) -> str:
    text = message.text.replace(" …" * 38, " … 38 words more").replace("\n", " ⏎ ")
    return f"{message.role:9} {text}"


def _with_template(name: str, options: dict[str, object], tokens: int) -> Callable[[], str]:
    def draw() -> str:
        with tempfile.TemporaryDirectory() as folder:
            template = Path(folder) / "ask.txt"
            template.write_text("Sum up.", encoding="utf-8")
            return drawn(name, {**options, "template": str(template)}, tokens)

    return draw


EXAMPLES: dict[str, Callable[[], str]] = {
    "last_k": lambda: drawn("last_k", {"keep_last": 2}, 300),
    "observation_mask": lambda: drawn("observation_mask", {"keep": 1}, 300),
    "attention": lambda: drawn("attention", {"lookback": 0}, 130),
    "summary": _with_template("summary", {"keep_last": 1, "max_tokens": 40}, 150),
    "pipeline": lambda: drawn(
        "pipeline",
        {
            "stages": [
                {"name": "observation_mask", "options": {"keep": 1, "drop_oldest": False}},
                {"name": "last_k", "options": {"keep_last": 9}},
            ]
        },
        110,
    ),
    "anchors": lambda: drawn("anchors", {}, 130),
}

if __name__ == "__main__":
    for one in sys.argv[1:] or EXAMPLES:
        print(f"```text\n{EXAMPLES[one]()}\n```\n")
