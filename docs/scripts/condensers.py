"""Draws the examples of docs/reference/condensers.md: python docs/scripts/condensers.py [NAME]"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from condensegrpo.assembly.build import build_condenser
from condensegrpo.config.use import CondenserUse
from condensegrpo.core.condenser import Budget, Request, WrittenSummary, condensation_spans, with_tokens
from condensegrpo.core.messages import History, Message, ToolCall, Unit, flatten
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason

WIDTH = 62  # of the left column
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


def page(result: str) -> str:
    """A search result of 40 words, of which two matter."""
    return " ".join([result, *["…"] * 38])


EXAMPLE = History(
    pinned=(Message(role="system", content="Be brief."), Message(role="user", content="Who has the highest rate?")),
    units=(
        looked_up(0, "First Mia.", "search(Mia)", page("Mia 0.7312")),
        looked_up(1, "Then Ben.", "search(Ben)", page("Ben 0.1184")),
        looked_up(2, "Now Zoe.", "search(Zoe)", page("nothing found")),
        looked_up(3, "Zoe by id.", "search(id=7)", page("Zoe 0.9001")),
    ),
)


MIA, BEN, ZOE, BY_ID = EXAMPLE.units


def decided(name: str, *made: tuple[str, Mapping[str, object]] | Unit) -> History:
    """The example with calls of a condenser's tools, answered as an episode answers them."""
    condenser = build_condenser(CondenserUse(name=name))
    tools: dict[str, EnvironmentTool] = {tool.name: tool for tool in condenser.tools()}
    history = History(pinned=EXAMPLE.pinned)
    for each in made:
        turn = len(history.units)
        history = history.add(
            replace(each, turn=turn) if isinstance(each, Unit) else _called(tools[each[0]], each[1], history)
        )
    return history


def _called(tool: EnvironmentTool, arguments: Mapping[str, object], history: History) -> Unit:
    answer = asyncio.run(_answer(tool, arguments, replace(history, shown=history.units[:-1])))
    words = ", ".join(str(value) for value in arguments.values())
    call = ToolCall(id="call_0", name=tool.name, arguments=json.dumps(arguments))
    reply = Message(role="assistant", content=f"{tool.name}({words})", tool_calls=(call,))
    result = Message(role="tool", content=answer, tool_call_id="call_0", name=tool.name)
    return Unit(turn=len(history.units), reply=reply, results=(result,))


async def _answer(tool: EnvironmentTool, arguments: Mapping[str, object], history: History) -> str:
    return str(await tool.call(arguments, history))


async def policy(request: Request) -> WrittenSummary:
    """What a policy might write."""
    return WrittenSummary(text=SUMMARY, finish=FinishReason.STOP)


def drawn(name: str, options: dict[str, object], tokens: int, history: History = EXAMPLE) -> str:
    """The example before and after a condenser, each unit beside what is shown of it."""
    condenser = build_condenser(CondenserUse(name=name, options=options))
    history = with_tokens(history, count)
    budget = Budget(tokens=tokens - count(history.pinned), prompt_tokens=400, write=policy)
    condensed = asyncio.run(condenser.condense(history, budget))
    shown = {unit.turn: unit for unit in condensed.units}
    after = count(flatten(EXAMPLE.pinned, condensed.units))
    lines = [f"{f'{count(history.messages)} tokens':{WIDTH}}   {after} tokens, of {tokens} allowed"]
    lines += [f"{message.role:9} {message.text:{WIDTH - 10}}   {message.text}" for message in EXAMPLE.pinned]
    spans = condensation_spans(replace(history, note=condensed.note), condensed.units)
    statuses = {turn: span.status.value for span in spans for turn in span.turns}
    for unit in history.units:
        lines += _unit(unit, shown.get(unit.turn), statuses[unit.turn])
    return "\n".join(line.rstrip() for line in (*lines, f"reason: {condensed.reason or 'none'}"))


def _unit(unit: Unit, shown: Unit | None, status: str) -> list[str]:
    before = [_short(message) for message in unit.messages]
    after = [_short(message) for message in shown.messages] if shown else [f"({status})"]
    return [f"{left:{WIDTH}}   {right}" for left, right in zip_longest(before, after, fillvalue="")]


def _short(message: Message) -> str:
    text = message.text.replace(" …" * 38, " … 38 words more").replace("\n", " ⏎ ")
    return f"{message.role:9} {text}"


def _summary() -> str:
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "ask.txt"
        template.write_text("Sum up.", encoding="utf-8")
        return drawn("summary", {"keep_last": 1, "max_tokens": 40, "template": str(template)}, 150)


EXAMPLES: dict[str, Callable[[], str]] = {
    "observation_mask": lambda: drawn("observation_mask", {"keep": 1}, 300),
    "summary": _summary,
    "anchors": lambda: drawn("anchors", {"share": 0.5}, 130),
    "fold": lambda: drawn(
        "fold",
        {},
        300,
        decided(
            "fold",
            MIA,
            ("branch", {"description": "Zoe's rate"}),
            *(ZOE, BY_ID),
            ("return", {"message": "Zoe 0.9001"}),
        ),
    ),
    "memory": lambda: drawn(
        "memory", {}, 160, decided("memory", MIA, ("memory_write", {"name": "Mia", "text": "0.7312"}), BEN, ZOE, BY_ID)
    ),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or EXAMPLES:
        print(f"```text\n{EXAMPLES[name]()}\n```\n")
