"""Question-answering tasks: how an answer is read from a reply, the environment that poses a question, and the splits.

The splits keep training and evaluation apart: no question is in both.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Literal, Self

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message, Part
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split, Task
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


FOLLOW_UPS = "follow_ups"  # column of what the user asks after the first answer


@dataclass(slots=True, kw_only=True)
class AnswerEnvironment(Environment):
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


SHARE = 0.1  # of the questions, held out where there is no evaluation data


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Problems for training and for evaluation."""

    train: tuple[Problem, ...]  # at least one
    held_out: tuple[Problem, ...]
    left_out: int  # training problems left out because the evaluation data has them
    alike: int = 0  # training problems with a question of the evaluation, but other columns

    def mapped(self, change: Callable[[Problem], Problem]) -> Self:
        """The splits with every problem changed."""
        return replace(self, train=tuple(map(change, self.train)), held_out=tuple(map(change, self.held_out)))


class SplitTask(Task):
    """A task with the problems of two splits. Subclasses make the splits."""

    _splits: Splits

    @property
    def left_out(self) -> int:
        """Training problems that are left out because the evaluation data has them."""
        return self._splits.left_out

    @property
    def alike(self) -> int:
        """Training problems with a question of the evaluation, but other columns."""
        return self._splits.alike

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, in the order of the data."""
        return self._splits.train if split == "train" else self._splits.held_out


def split(
    train: Sequence[Problem],
    held_out: Sequence[Problem] | None,
    *,
    source: str,
    share: float = SHARE,
    identity: Callable[[Problem], str] = lambda problem: problem.question,
) -> Splits:
    """The training problems that are not held out, and the evaluation problems.

    Args:
        identity: what makes two problems of one question the same, such as ``row_identity``; it may take long.
        held_out: the evaluation problems; None: those of ``train`` whose hash falls into ``share``.
        source: where the training problems are from, for the error.
    """
    if held_out is None:
        held = [is_held_out(identity(problem), share=share) for problem in train]
        chosen = [*compress(train, held)]
    else:
        chosen, asked = [*held_out], {fold(problem.question) for problem in train}
        known = {fold(identity(problem)) for problem in chosen if fold(problem.question) in asked}
        asked = {fold(problem.question) for problem in chosen}
        held = [fold(problem.question) in asked and fold(identity(problem)) in known for problem in train]
    kept = [problem for problem, out in zip(train, held, strict=True) if not out]
    if not kept:
        raise DataError(
            f"splitting {source}: all {len(train)} questions are held out for evaluation, none is left to train on. "
            f"Give other eval_data{' or lower eval_share' if held_out is None else ''}"
        )
    asked = {fold(problem.question) for problem in chosen}
    return Splits(
        train=tuple(kept),
        held_out=tuple(chosen),
        left_out=0 if held_out is None else len(train) - len(kept),
        alike=sum(fold(problem.question) in asked for problem in kept),
    )


def row_identity(row: Mapping[str, Any]) -> str:
    """All columns of a row: rows that differ in one of them, beyond case and white space, are two problems."""
    return json.dumps(
        {name: fold(value) if isinstance(value, str) else value for name, value in row.items() if value is not None},
        sort_keys=True,
        default=str,
    )


def fold(question: str) -> str:
    """A question without the differences that do not make it another one: case and whitespace."""
    return " ".join(question.casefold().split())


def is_held_out(question: str, *, share: float) -> bool:
    """Whether a question belongs to the evaluation; depends on the question alone.

    Args:
        share: of all questions, in [0, 1].
    """
    digest = hashlib.blake2b(fold(question).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class QuestionTask(SplitTask):
    """Questions of two splits, each asked by an ``AnswerEnvironment``. Subclasses read the splits."""

    system: str | None
    answer_style: AnswerStyle
    reminder: str = ""

    def environment(self, problem: Problem) -> Environment:
        """A fresh episode."""
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
