"""Decisions of the policy: calls of a condenser's tools, read from the raw units. Every view is recomputed from them.

turn 2   fold: branch("look up Mia")          ─▶  Decision(2, "branch", {"description": "look up Mia"})
turn 3   fold: branch("look up Ben")  Error   ─▶  none: the tool refused it
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from condensegrpo.core.messages import History, Unit, is_error
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.core.wording import plural, ranges


class Decision(NamedTuple):
    """A call that the tool of a condenser accepted."""

    turn: int
    name: str
    arguments: Mapping[str, object]


def decisions(units: Sequence[Unit], *names: str) -> Iterator[Decision]:
    """The accepted calls of some tools, in the order in which the policy made them."""
    for unit in units:
        for call in unit.reply.tool_calls:
            if call.name in names:
                result = next((message for message in unit.results if message.tool_call_id == call.id), None)
                if result is not None and not is_error(result):
                    arguments = json.loads(call.arguments)
                    if isinstance(arguments, str):  # an object in a string
                        arguments = json.loads(arguments)
                    yield Decision(unit.turn, call.name, arguments)


def decision_tool(
    name: str,
    description: str,
    parameters: Mapping[str, Mapping[str, object]],
    accept: Callable[[Mapping[str, object], History], ToolResult | str],
    *,
    optional: Sequence[str] = (),
) -> EnvironmentTool:
    """The tool of a condenser.

    Args:
        parameters: JSON schema of every argument.
        accept: the answer to a call, from its arguments and the history before the reply; a ``ValueError`` refuses it,
            and is what the policy reads.
        optional: parameters that a call may leave out.
    """

    async def call(arguments: Mapping[str, object], history: History) -> ToolResult | str:
        try:
            return accept(arguments, history)
        except ValueError as refusal:
            return f"Error: {name}: {refusal}"

    required = [parameter for parameter in parameters if parameter not in optional]
    schema = {"type": "object", "properties": dict(parameters), "required": required}
    return EnvironmentTool(name=name, description=description, parameters=schema, call=call)


def text_argument(arguments: Mapping[str, object], name: str) -> str:
    """An argument that is a text and not blank, without white space around it."""
    value = arguments.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r:.40}, wanted a text that is not blank")
    return value.strip()


def reason_of(verb: str, made: Sequence[tuple[Sequence[int], str]]) -> str:
    """The reason of a view: the turns of the newest decision and its call; of earlier decisions how many turns.

    folded turns 7–8 by the policy's return in turn 9, and 2 turns before
    """
    if not made:
        return ""
    *before, (turns, call) = made
    earlier = sum(len(others) for others, _ in before)
    rest = f", and {plural(earlier, 'turn')} before" if earlier else ""
    return f"{verb} {named_turns(turns)} by the policy's {call}{rest}"


def named_turns(turns: Collection[int]) -> str:
    """Turns in a sentence: turn 2; turns 2–4, 7."""
    return f"{'turn' if len(turns) == 1 else 'turns'} {ranges(turns)}"
