"""The tool results of a turn as the policy saw them, for rewards that read them."""

import re
from collections.abc import Iterable, Iterator

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Turn

_TAGS = re.compile(r"\s*<(result|output)>(.*)</\1>\s*", re.DOTALL)
_FAULT = re.compile(r"Error:|Traceback|timed out|did not finish within|the code was ended")


def results_of(turn: Turn) -> tuple[str, ...]:
    """The texts of a turn's tool results in order, errors and what answered malformed calls included, without tags."""
    return tuple(map(_bare, _answering(turn.observations)))


def valid_calls(turn: Turn) -> int:
    """Calls of a turn that could be read and were answered."""
    return sum(message.name is not None for message in _answering(turn.observations))


def good_calls(turn: Turn) -> int:
    """Those of them whose result is not blank and holds none of ``Error:``, ``Traceback`` or a time-out.

    "24"  ─▶  1      ""  ─▶  0      "Error: python: …"  ─▶  0      "no exception"  ─▶  1
    """
    texts = (_bare(message) for message in _answering(turn.observations) if message.name is not None)
    return sum(bool(text.strip()) and not _FAULT.search(text) for text in texts)


def _answering(observations: Iterable[Message]) -> Iterator[Message]:
    return (message for message in observations if message.tool_call_id is not None)


def _bare(message: Message) -> str:
    tagged = _TAGS.fullmatch(message.text)
    return tagged[2] if tagged else message.text
