"""How an answer is read from a reply, and whether one is well formed. Text in ``<think>…</think>`` never counts."""

import re
from typing import Literal

from condensegrpo.episodes.toolformats import Malformed, Native, Tagged, parsed_arguments

AnswerStyle = Literal["single", "first_or_boxed", "last", "reply"]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = r"\boxed{"


def read_answer(text: str, style: AnswerStyle = "single") -> str | None:
    r"""The answer that a reply gives; ``None`` if it gives none or an empty one.

    ``single`` is what one pair of answer tags holds; several would be hedging and give none. ``first_or_boxed`` takes
    the first pair, else what the last ``\boxed{…}`` holds; ``last`` the last pair; ``reply`` the whole reply.

    >>> read_answer("so <answer> 72 </answer>"), read_answer("<answer>1</answer> or <answer>2</answer>")
    ('72', None)
    >>> read_answer(r"thus \boxed{\frac{1}{2}}", "first_or_boxed"), read_answer("<think>x</think> It is 5.", "reply")
    ('\\frac{1}{2}', 'It is 5.')
    """
    said = text.rpartition("</think>")[2].partition("<think>")[0]
    if style == "reply":
        return said.strip() or None
    closed = "".join(said.rpartition("</answer>")[:2])  # or every unclosed tag would be searched to the end
    answers = [answer.strip() for answer in _ANSWER.findall(closed)]
    if style == "single":
        return answers[0] if len(answers) == 1 and answers[0] and "<answer>" not in answers[0] else None
    if style == "first_or_boxed" and not answers:
        return _boxed(said)
    chosen = (answers[0] if style == "first_or_boxed" else answers[-1]) if answers else ""
    return chosen.rpartition("<answer>")[2].strip() or None


def is_call_or_answer(calls_as: Native | Tagged, reply: str, *, tool: str, argument: str) -> bool:
    """Whether a reply is well formed: one call of the tool with that one argument, a text, or one answer."""
    calls = calls_as.parse(reply)
    if not calls:  # a tagged call beside an answer is none, and such a reply is no form to teach
        return calls_as.opening not in reply.rpartition("</think>")[2] and read_answer(reply) is not None
    if len(calls) > 1 or isinstance(calls[0], Malformed) or "<answer>" in reply:
        return False
    arguments = parsed_arguments(calls[0].arguments)
    return calls[0].name == tool and set(arguments) == {argument} and isinstance(arguments[argument], str)


def _boxed(text: str) -> str | None:
    """What the last ``\\boxed{…}`` holds, braces inside it counted."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip() or None
    return None
