"""The built-in memory task: carry a value through operations that are shown once. Needs no download.

One episode with K = 2 operations (user messages on the left, replies on the right):

    start 3 keep a note   ─▶  <note> 3 </note>
    +2                    ─▶  <note> 5 </note>
    -1                    ─▶  <note> the value was 5 and then -1 so it is now 4 </note>
    done report           ─▶  <answer> 4 </answer>

Values count modulo 10. Under the condenser ``last_k(keep_last=1)`` a turn sees the question, its previous reply and the
newest observation only, so a value that is in no note is lost. The expert is imperfect on purpose (four in ten notes
omit the value, three are verbose): training can still learn to note the value always, and in one word.

With ``misread`` an operation is sometimes shown wrongly. After a note that ends with ``check`` the next one is shown
three times and always right: reliability costs context, so that the shortest note is not the surest. Half of the
expert's notes then have words behind the value that say nothing: they cost context and change no answer.

    +2                    ─▶  <note> 5 noted as it was said and kept in the note check </note>
    -1 -1 -1              ─▶  <note> 4 </note>
"""

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated

from annotated_types import Ge, Le

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.tasks.drawn import DrawnProblems, Tags, ends_with_request, is_eval_content

OPERATIONS = ("+1", "+2", "+3", "-1", "-2", "-3")
REPORT = "done report"
CHECK = "check"  # the last word of a note that asks for a checked operation
CHECKING = 0.5  # share of the expert's notes that do, where operations may be misread
FORGETFUL, VERBOSE, TERSE = 0.4, 0.3, 0.3  # shares of the expert's note styles
PADDED = 0.5  # share of the expert's notes that hold words which say nothing, where operations may be misread
FORGETFUL_NOTE = "noted the op"
PADDING = "noted as it was said and kept in the note"

_TAGS = Tags(re.compile(r"(</?(?:note|answer)>)"))
_ENUMERABLE = 10**5  # problems of one length are listed up to here, and drawn beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Task):
    """The quickstart's task: carry a value through operations that are each shown once.

    No option moves a problem between training and evaluation.
    """

    min_ops: Annotated[int, Ge(1)] = 3
    max_ops: Annotated[int, Ge(1)] = 6
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence, in which short problems recur
    eval_problems: Annotated[int, Ge(1)] = 256  # all different, balanced over the number of operations
    seed: int = 0  # of the order of the training problems
    misread: Annotated[float, Ge(0), Le(1)] = 0.0  # chance that an operation is shown wrongly, unless it is checked

    def __post_init__(self) -> None:
        if self.min_ops > self.max_ops:
            raise ValueError(f"min_ops={self.min_ops} and max_ops={self.max_ops}: wanted min_ops <= max_ops")

    def problems(self, split: Split) -> Sequence[Problem]:
        """Training problems are made when asked for; the evaluation problems are a list."""
        if split == "train":
            return DrawnProblems(size=self.train_problems, draw=self._training_problem)
        shares = [len(range(at, self.eval_problems, len(self._lengths))) for at in range(len(self._lengths))]
        by_length = [_held_out(length, share) for length, share in zip(self._lengths, shares, strict=True)]
        rows = (row for rows in itertools.zip_longest(*by_length) for row in rows if row is not None)
        return [_problem(f"eval-{number}", start, operations) for number, (start, operations) in enumerate(rows)]

    def environment(self, problem: Problem) -> "LedgerEnvironment":
        """A fresh episode."""
        operations = tuple(problem.data["ops"])
        rng = random.Random(f"ledger misread {_name(problem.data['start'], operations)}")
        wrong = (rng.choice([other for other in OPERATIONS if other != each]) for each in operations)
        shown = tuple(
            other if rng.random() < self.misread else each for each, other in zip(operations, wrong, strict=True)
        )
        return LedgerEnvironment(question=problem.question, operations=operations, unchecked=shown)

    def expert(self, problem: Problem) -> "LedgerExpert":
        """The expert of an episode."""
        return LedgerExpert(problem, misread=self.misread > 0)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a reply's value follows from its context; ``None`` for a well-formed note without a value.

        What follows is the value of the previous note, or the start value if that note holds none, changed by the
        operation of the newest observation: all that the context determines.
        """
        due = _due(context)
        words = _TAGS.words(reply)
        if due.report:
            return _answer(words) == str(due.value)
        note = _TAGS.inside(words, "note")
        if note is None:
            return False
        noted = _value(note)
        return None if noted is None else noted == due.value

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield from (
            f"{_question(value)} {_reply('note', str(value))} {_reply('answer', str(value))}" for value in range(10)
        )
        yield from (_verbose(0, operation, 0) for operation in OPERATIONS)
        yield from (_reply("note", FORGETFUL_NOTE), REPORT)
        yield from (CHECK, PADDING) if self.misread else ()

    def _training_problem(self, index: int) -> Problem:
        """Each length equally often on average."""
        rng = random.Random(f"ledger train {self.seed} {index}")
        length = rng.choice(self._lengths)
        while True:  # seven draws in eight are for training
            start, operations = _draw(rng, length)
            if not is_eval_content(_name(start, operations)):
                return _problem(f"train-{index}", start, operations)

    @property
    def _lengths(self) -> range:
        return range(self.min_ops, self.max_ops + 1)


@dataclass(slots=True, kw_only=True)
class LedgerEnvironment(Environment):
    """One episode: an operation for every note, then the answer is due. Reads words, whatever the whitespace."""

    question: str
    operations: tuple[str, ...]
    unchecked: tuple[str, ...]  # what is shown of them to a note that does not ask to check
    _shown: int = field(default=0, init=False)  # observations so far

    async def start(self) -> tuple[Message, ...]:
        """The question."""
        return (Message(role="user", content=self.question),)

    async def step(self, reply: Message) -> Step:
        """The next operation after one note; the end after the answer that was asked for, or after anything else."""
        words = _TAGS.words(reply.text)
        if self._shown > len(self.operations):
            return Step(done=True, answer=_answer(words))
        note = _TAGS.inside(words, "note")
        if note is None:
            return Step(done=True)
        checked = note[-1] == CHECK
        observation = (*(self.operations if checked else self.unchecked), REPORT)[self._shown]
        self._shown += 1
        if checked and observation != REPORT:
            observation = " ".join([observation] * 3)
        return Step(observations=(Message(role="user", content=observation),))


class LedgerExpert:
    """Notes what its context implies in a mixture of styles, some of which omit the value; then answers."""

    def __init__(self, problem: Problem, *, misread: bool) -> None:
        self._question, self._misread = Message(role="user", content=problem.question), misread
        self._rng = random.Random(f"ledger expert {problem.id}")

    def reply(self, context: Sequence[Message]) -> str:
        """A note; the answer when it is due."""
        due = _due(context)
        return _reply("answer", str(due.value)) if due.report else self._note(due)

    def write(self, request: Request) -> str:
        """A note of what is shown."""
        return self._note(_due([self._question, *(message for unit in request.units for message in unit.messages)]))

    def _note(self, due: "_Due") -> str:
        style = self._rng.random()
        if self._misread:
            words = [FORGETFUL_NOTE if style < FORGETFUL else str(due.value)]
            words += [PADDING] if self._rng.random() < PADDED else []
            words += [CHECK] if self._rng.random() < CHECKING else []
            return _reply("note", " ".join(words))
        if style < FORGETFUL:
            return _reply("note", FORGETFUL_NOTE)
        if style < FORGETFUL + TERSE:
            return _reply("note", str(due.value))
        return _verbose(due.before, due.operation, due.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """What the next reply must carry."""

    value: int
    operation: str | None  # that led to the value; None: none was shown
    before: int  # the value before it
    report: bool  # as the answer, not as a note


def _due(context: Sequence[Message]) -> _Due:
    """What follows from a context: the latest reply's value (else the start value) and the newest observation."""
    asked = next(message.text for message in context if message.role == "user")  # tools may be described before it
    start = next(int(word) for word in asked.split() if word.isdigit())
    replies = [message for message in context if message.role == "assistant"]
    noted = _value(_TAGS.words(replies[-1].text)) if replies else None
    before = start if noted is None else noted
    newest = context[-1].text.strip().partition("\n")[0]  # what follows is a meter, or the request of a condenser
    first = newest.partition(" ")[0]  # a checked operation is shown three times
    operation = first if first in OPERATIONS else None
    value = before if operation is None else _apply(before, operation)
    return _Due(
        value=value, operation=operation, before=before, report=newest == REPORT and not ends_with_request(context)
    )


def _verbose(before: int, operation: str | None, value: int) -> str:
    if operation is None:
        return _reply("note", f"the value is now {value}")
    return _reply("note", f"the value was {before} and then {operation} so it is now {value}")


def _reply(tag: str, text: str) -> str:
    return f"<{tag}> {text} </{tag}>"


def _question(start: int) -> str:
    return f"start {start} keep a note"


def _apply(value: int, operation: str) -> int:
    return (value + int(operation)) % 10


def _answer(words: Sequence[str]) -> str | None:
    content = _TAGS.inside(words, "answer")
    return content[0] if content is not None and len(content) == 1 and content[0] in "0123456789" else None


def _value(words: Sequence[str]) -> int | None:
    """The value that a note commits to: its last word that is a digit."""
    digits = [word for word in words if len(word) == 1 and word in "0123456789"]
    return int(digits[-1]) if digits else None


def _draw(rng: random.Random, length: int) -> tuple[int, tuple[str, ...]]:
    return rng.randrange(10), tuple(rng.choices(OPERATIONS, k=length))


@cache  # up to 100,000 hashes, and a run makes its task several times
def _held_out(length: int, count: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """``count`` different held-out problems of one length, always the same ones."""
    rng = random.Random(f"ledger eval {length}")
    if 10 * len(OPERATIONS) ** length <= _ENUMERABLE:
        rows = list(itertools.product(range(10), itertools.product(OPERATIONS, repeat=length)))
        rows = [row for row in rows if is_eval_content(_name(*row))]
        if len(rows) < count:
            raise ValueError(
                f"holding out {count} different problems of {length} operations: only {len(rows)} exist; "
                f"lower eval_problems or raise min_ops"
            )
        return tuple(rng.sample(rows, count))
    chosen: dict[tuple[int, tuple[str, ...]], None] = {}  # more than 10,000 exist
    while len(chosen) < count:
        row = _draw(rng, length)
        if is_eval_content(_name(*row)):
            chosen[row] = None
    return tuple(chosen)


def _name(start: int, operations: Sequence[str]) -> str:
    return f"{start}{''.join(operations)}"


def _problem(label: str, start: int, operations: Sequence[str]) -> Problem:
    value = start
    for operation in operations:
        value = _apply(value, operation)
    return Problem(
        id=f"{label}:{_name(start, operations)}",
        question=_question(start),
        answer=str(value),
        data={"start": start, "ops": list(operations)},
    )
