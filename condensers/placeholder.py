"""Placeholders: they replace an omitted text and state its length."""

import re
from dataclasses import replace

from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols.condenser import Count

VERBATIM, VERBATIM_LENGTH = " verbatim: ", 400  # what ``anchors`` puts behind a placeholder, and most characters of it
PLACEHOLDER = re.compile(
    r"\[turn [0-9]+, [a-z ]+ omitted: [0-9]+ tokens\]" + rf"(?:{VERBATIM}[^\n]{{1,{VERBATIM_LENGTH}}})?"
)


def masked(history: History, unit: Unit, message: Message, count: Count) -> Message:
    """A message that answered a reply, with a placeholder for its text: its role, name and call stay.

        tool: 0.7312, 0.1184, …   ─▶   tool: [turn 3, tool result omitted: 812 tokens]

    The tokens are those that the message adds to pinned messages and reply, its share of the template included. A
    message that is no longer than its placeholder is returned unchanged, and so is that of a summary.
    """
    if unit.is_summary or PLACEHOLDER.fullmatch(message.text):
        return message
    before = (*history.pinned, unit.reply)
    reply = count(before)
    tokens = count((*before, message)) - reply
    kind = "observation" if message.tool_call_id is None else "tool result"
    mask = replace(message, content=f"[turn {unit.turn}, {kind} omitted: {tokens} tokens]")
    return mask if count((*before, mask)) - reply < tokens else message
