"""Question-answering tasks: two splits without a common question, and the environment that poses a question."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from condensegrpo.core.messages import Message, Part
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.tasks.answers import AnswerStyle, read_answer
from condensegrpo.tasks.splits import SplitTask

FOLLOW_UPS = "follow_ups"  # column of what the user asks after the first answer


@dataclass(slots=True, kw_only=True)
class AnswerEnvironment:
    """One question. Replies that call tools do not come here.

    Any other reply ends the episode, with or without an answer, unless a follow-up question is left after an answer, or
    a reminder is set and the reply has no answer. The last answer is the episode's.
    """

    question: str | tuple[Part, ...]  # the first user message
    system: str  # the system message; empty for none
    answer_style: AnswerStyle = "single"  # how answers are read, see ``answers.read_answer``
    follow_ups: Sequence[str] = ()  # further user messages, each after the answer to the one before it
    reminder: str = ""  # what the user says to a reply without an answer; empty: the episode is over
    _followed_up: int = field(default=0, init=False)  # messages of ``follow_ups`` that were sent

    async def start(self) -> tuple[Message, ...]:
        """The system message, if there is one, and the question."""
        return pinned_messages(system=self.system, question=self.question)

    async def step(self, reply: Message) -> Step:
        """What the user says to a reply, or the end: its answer, or none, which is a format error."""
        answer = read_answer(reply.text, self.answer_style)
        if answer is None and self.reminder:
            return Step(observations=(Message(role="user", content=self.reminder),))
        if answer is not None and self._followed_up < len(self.follow_ups):
            self._followed_up += 1
            follow_up = Message(role="user", content=self.follow_ups[self._followed_up - 1])
            return Step(observations=(follow_up,), new_query=True)
        return Step(done=True, answer=answer)


def pinned_messages(*, system: str, question: str | tuple[Part, ...]) -> tuple[Message, ...]:
    """The pinned messages."""
    posed = Message(role="user", content=question)
    return (Message(role="system", content=system), posed) if system else (posed,)


class QuestionTask(SplitTask):
    """Questions of two splits, each asked by an ``AnswerEnvironment``. Subclasses read the splits."""

    system: str | None
    answer_style: AnswerStyle
    reminder: str = ""

    def environment(self, problem: Problem) -> Environment:
        """A fresh episode.

        Raises:
            ValueError: the problem's column ``follow_ups`` is no list of texts.
        """
        texts = problem.data.get(FOLLOW_UPS) or ()
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"reading problem {problem.id}: its {FOLLOW_UPS} are {texts!r:.80}, wanted a list of texts"
            )
        return AnswerEnvironment(
            question=self._question(problem),
            system=self.system or "",
            answer_style=self.answer_style,
            follow_ups=tuple(texts),
            reminder=self.reminder,
        )

    def _question(self, problem: Problem) -> str | tuple[Part, ...]:
        """What the first user message holds."""
        return problem.question
