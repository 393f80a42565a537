"""The environment of question-answering tasks: think, call tools if there are any, answer between tags."""

import re
from dataclasses import dataclass

from condensegrpo.messages import Message
from condensegrpo.protocols import Step

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnvironment:
    """One question. Replies that call tools do not come here; any other ends the episode, with or without an answer."""

    question: str
    system: str  # empty: no system message

    async def start(self) -> tuple[Message, ...]:
        """The system message, if there is one, and the question."""
        return head(system=self.system, question=self.question)

    async def step(self, reply: Message) -> Step:
        """The end: the reply's answer, or none, which is a format error."""
        return Step(done=True, answer=read_answer(reply.content))


def head(*, system: str, question: str) -> tuple[Message, ...]:
    """What stands before every turn."""
    asked = Message(role="user", content=question)
    return (Message(role="system", content=system), asked) if system else (asked,)


def read_answer(text: str) -> str | None:
    """The answer that a reply gives; ``None`` if it gives none, an empty one, or several (which would be hedging).

    What stands in ``<think>…</think>`` does not count.

    >>> read_answer("so <answer> 72 </answer>"), read_answer("<answer>1</answer> or <answer>2</answer>")
    ('72', None)
    """
    said = text.rpartition("</think>")[2].partition("<think>")[0]
    found = [answer.strip() for answer in _ANSWER.findall(said)]
    return found[0] if len(found) == 1 and found[0] and "<answer>" not in found[0] else None
