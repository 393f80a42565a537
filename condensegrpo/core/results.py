"""The text of a tool result or observation as it was returned, without what the engine put around it."""

import re

from condensegrpo.core.messages import Message

RECALLED = "[recalled from turn "  # how a result begins that shows an omitted observation once more
_TAGS = re.compile(r"\s*<(result|output)>(.*)</\1>\s*", re.DOTALL)
_METER = re.compile(r"\n\[turn \d+(?:: \d+ of \d+ context tokens used, \d+ left)?\]\Z")


def recalled_turn(message: Message) -> int | None:
    """The turn whose observation a result shows once more; None: of no other turn."""
    found = re.match(re.escape(RECALLED) + r"(\d+)\]", bare(message))
    return int(found[1]) if found else None


def meter_line(turn: int, tokens: tuple[int, int] | None = None) -> str:
    """What a meter appends to the observation of a turn; ``tokens``: used, and in all.

    [turn 5]      [turn 5: 812 of 2048 context tokens used, 1236 left]
    """
    if tokens is None:
        return f"\n[turn {turn}]"
    used, most = tokens
    return f"\n[turn {turn}: {used} of {most} context tokens used, {max(most - used, 0)} left]"


def without_meter(text: str) -> str:
    """The text of an observation without the line of a meter."""
    return _METER.sub("", text) if text.endswith("]") else text


def bare(message: Message) -> str:
    """The words of a tool result without the tags of a built-in tool format and without the line of a meter."""
    text = without_meter(message.words)
    tagged = _TAGS.fullmatch(text)
    return tagged[2] if tagged else text


def is_error(message: Message) -> bool:
    """Whether a tool result is an error text, also after the few words that a tool format of others may begin with."""
    return "Error:" in bare(message)[:60]
