"""The environment of question-answering tasks: think, call tools if there are any, answer."""

from collections import deque
from collections.abc import Sequence

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols import Problem, Step
from condensegrpo.tasks.answers import AnswerStyle, read_answer

FOLLOW_UPS = "follow_ups"  # column of what the user asks after the first answer


class AnswerEnvironment:
    """One question. Replies that call tools do not come here.

    Any other reply ends the episode, with or without an answer; unless the user has more to ask, which an answer calls
    forth, or there is a reminder, which a reply without an answer gets back. The last answer is the episode's.
    """

    def __init__(
        self,
        *,
        question: str,
        system: str,
        answer_style: AnswerStyle = "single",
        follow_ups: Sequence[str] = (),
        reminder: str = "",
    ) -> None:
        """Pose a question.

        Args:
            question: the first user message.
            system: the system message; empty for none.
            answer_style: how answers are read, see ``answers.read_answer``.
            follow_ups: further user messages, each after the answer to the one before it.
            reminder: what the user says to a reply without an answer; empty: the episode is over.
        """
        self._question = question
        self._system = system
        self._answer_style: AnswerStyle = answer_style
        self._follow_ups = deque(follow_ups)
        self._reminder = reminder

    async def start(self) -> tuple[Message, ...]:
        """The system message, if there is one, and the question."""
        return head(system=self._system, question=self._question)

    async def step(self, reply: Message) -> Step:
        """What the user says to a reply, or the end: its answer, or none, which is a format error."""
        answer = read_answer(reply.content, self._answer_style)
        if answer is None and self._reminder:
            return Step(observations=(Message(role="user", content=self._reminder),))
        if answer is not None and self._follow_ups:
            return Step(observations=(Message(role="user", content=self._follow_ups.popleft()),))
        return Step(done=True, answer=answer)


def head(*, system: str, question: str) -> tuple[Message, ...]:
    """The pinned messages."""
    asked = Message(role="user", content=question)
    return (Message(role="system", content=system), asked) if system else (asked,)


def follow_ups_of(problem: Problem) -> tuple[str, ...]:
    """The further questions of a problem, from its column ``follow_ups``.

    Raises:
        ValueError: the column is no list of texts.
    """
    texts = problem.data.get(FOLLOW_UPS) or ()
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"reading problem {problem.id}: its {FOLLOW_UPS} are {texts!r:.80}, wanted a list of texts")
    return tuple(texts)
