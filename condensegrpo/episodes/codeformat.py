"""The format ``code``: a call is Python in tags or a fence, for models that write code and know no tool template.

    <code>print(48 / 2)</code>    <python>print(48 / 2)</python>    ```python⏎print(48 / 2)⏎```    ─▶  python(code=…)
    user: <output>24.0</output>

An answer ends the episode: code in a reply that holds ``<answer>…</answer>`` outside of its code is not run.
"""

import json
import re
from collections.abc import Mapping, Sequence

from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.episodes.toolformats import Malformed, parsed_calls

TOOL = "python"  # the one tool that this format calls

_FENCE = "```"
_OPENING = r"<code>|<python>|^[ \t]*```(?:python|py)[ \t\r]*$"
_FENCED = re.compile(r"\s*```(?:python|py)?[ \t\r]*\n(.*?)\s*```\s*", re.DOTALL)  # a fence inside of tags
_CLOSED_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)


class Code:
    """Calls of the tool ``python`` as ``<code>…</code>``, ``<python>…</python>`` or fenced Python."""

    opening: str = "<code>"
    only_tool: str = TOOL
    stop_strings: tuple[str, ...] = ("</code>", "</python>", "</answer>")

    def parse(self, text: str) -> tuple[ToolCall | Malformed, ...]:
        """All pieces of code of a reply in order; none if the reply gives an answer."""
        return parsed_calls(text, _OPENING, _read, none_beside_answer=True)

    def result(self, call_id: str, name: str, text: str) -> Message:
        """A user message with the output in ``<output>`` tags."""
        return Message(role="user", content=f"<output>{text}</output>", tool_call_id=call_id, name=name or None)

    def instructions(self, schemas: Sequence[Mapping[str, object]]) -> str:
        """How to have code run; nothing without tools."""
        if not schemas:
            return ""
        return (
            "You can run Python. Write <code>…</code> and stop there; what the code prints follows in "
            "<output>…</output>. Nothing is kept between two pieces of code, so print what you need."
        )


def _read(text: str, start: int, opening: str, call_id: str) -> tuple[ToolCall | Malformed, int]:
    """The code that begins at ``start``, and where to read on."""
    fenced = opening.lstrip().startswith(_FENCE)
    closing = _FENCE if fenced else f"</{opening[1:]}"
    end = _CLOSED_FENCE.search(text, start) if fenced else re.compile(re.escape(closing)).search(text, start)
    if end is None:
        return Malformed(reason=f"{closing} is missing after a piece of code; write {_shown(opening)}"), len(text)
    code = text[start : end.start()]
    inner = _FENCED.fullmatch(code)
    code = inner[1] if inner else code
    if not code.strip():
        return Malformed(reason=f"a piece of code is empty; write {_shown(opening)}"), end.end()
    return ToolCall(id=call_id, name=TOOL, arguments=json.dumps({"code": code.strip("\r\n")})), end.end()


def _shown(opening: str) -> str:
    return "```python … ```" if opening.lstrip().startswith(_FENCE) else f"{opening} … </{opening[1:]}"
