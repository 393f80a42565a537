"""BFCL's memory questions as a task: real text arrives one message a turn, and only notes of it are left at the end.

One episode with 2 messages (the user on the left, replies on the right); the question is pinned from the start:

    Which city do I live in?               ─▶  Notes: none
    I'm 35 years old, live in Seattle, …   ─▶  Notes: I'm 35 years old, live in Seattle
    My counter is only 38 square feet …    ─▶  Notes: I'm 35 years old, live in Seattle
    Answer the question.                   ─▶  Seattle

Under the condenser ``last_k(keep_last=1)`` a turn sees the question, its previous reply and the newest message only.
The messages of an episode are a few neighbours of the scenario, with the message that has the answer among them. A
question whose answer is in no single message is left out. ``reward.options.match=words`` checks an answer as the
benchmark does: it is right if it contains a listed one.

The data are of BFCL v4 (Apache-2.0), in the wheel of the package bfcl-eval, which need not be installed:

    BFCL_v4_memory.json                         a question a line: id, scenario, question
    possible_answer/BFCL_v4_memory.json         its answers, by id
    memory_prereq_conversation/memory_*.json    the user's messages of a scenario, a conversation a line
"""

import random
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.condenser import Request
from condensegrpo.core.errors import DataError, DataMissing
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem
from condensegrpo.integrations.bfcl import PACKAGE, bfcl_data, bfcl_rows
from condensegrpo.rewards.matches import contains_answer
from condensegrpo.studies.tasks.notes import NotesEnvironment
from condensegrpo.tasks.answers import SplitTask, read_answer, split

QUESTIONS = "BFCL_v4_memory.json"
SYSTEM = (
    "You will get messages of a user, one at a time. You see only your last reply: note what answers the question, and "
    "repeat your notes in every reply."
)
LAST_MESSAGE = "Answer the question in a few words."
NOTED, NOTHING = "Notes: ", "none"
EXCERPT = 12  # words around an answer in a note of the expert


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """A question about what a user said."""

    id: str
    scenario: str
    question: str
    answers: tuple[str, ...]  # spellings of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestions:
    """The questions, and the user's messages of each scenario, in order."""

    questions: tuple[MemoryQuestion, ...]
    messages: Mapping[str, tuple[str, ...]]

    def of(self, scenarios: Sequence[str]) -> "MemoryQuestions":
        """The questions of some scenarios."""
        if unknown := [name for name in scenarios if name not in self.messages]:
            raise DataError(f"choosing scenarios: found no {', '.join(unknown)}; there are {', '.join(self.messages)}")
        return MemoryQuestions(
            questions=tuple(each for each in self.questions if each.scenario in scenarios),
            messages={name: self.messages[name] for name in scenarios},
        )


def read_memory_questions(source: Path | None = None) -> MemoryQuestions:
    """The benchmark in a folder, in a wheel of bfcl-eval, or by default in the installed package."""
    folder = bfcl_data() if source is None else _folder(source)
    answers = {str(row["id"]): row for row in bfcl_rows(folder / "possible_answer" / QUESTIONS, "id", "ground_truth")}
    messages: dict[str, tuple[str, ...]] = defaultdict(tuple)
    files = (file for file in (folder / "memory_prereq_conversation").iterdir() if file.name.endswith(".json"))
    for file in sorted(files, key=lambda file: file.name):
        for row in bfcl_rows(file, "scenario", "question"):
            messages[row["scenario"]] += tuple(message["content"] for turn in row["question"] for message in turn)
    rows = bfcl_rows(folder / QUESTIONS, "id", "scenario", "question")
    for row in rows:
        if row["id"] not in answers or row["scenario"] not in messages:
            lacking = "answer" if row["id"] not in answers else f"conversation of the scenario {row['scenario']!r}"
            raise DataError(f"reading the memory questions in {folder}: {row['id']} has no {lacking}. Fetch {PACKAGE}")
    questions = tuple(
        MemoryQuestion(
            id=row["id"],
            scenario=row["scenario"],
            question=row["question"][0][-1]["content"],
            answers=tuple(map(str, answers[row["id"]]["ground_truth"])),
        )
        for row in rows
    )
    return MemoryQuestions(questions=questions, messages=dict(messages))


def _folder(source: Path) -> Path | zipfile.Path:
    """The folder of the data in a folder, or inside a wheel."""
    root = zipfile.Path(source) if zipfile.is_zipfile(source) else source
    for folder in (root, root / "bfcl_eval" / "data", root / "data"):
        if (folder / QUESTIONS).is_file():
            return folder
    raise DataMissing(
        f"reading BFCL's data: {source} has no {QUESTIONS}. Run `pip download --no-deps {PACKAGE}` and name the wheel "
        f"with --data"
    )


@dataclass(kw_only=True, eq=False)
class BfclMemory(SplitTask):
    """The task ``bfcl_memory``. No question is in both splits, but both ask about the same five conversations."""

    data: str | None = None  # a wheel of bfcl-eval, or the folder of its data; None: the installed package
    messages: Annotated[int, Ge(1)] = 4  # of the user, in an episode
    system: str = SYSTEM  # the system message
    exits: bool = False  # whether <answer>…</answer> ends an episode before all messages came
    eval_share: Annotated[float, Gt(0), Lt(1)] = 0.3  # of the questions, held out by their hash

    def __post_init__(self) -> None:
        read = read_memory_questions(None if self.data is None else Path(self.data))
        problems = (self._problem(each, read.messages[each.scenario]) for each in read.questions)
        usable = [problem for problem in problems if problem is not None]
        self._splits = split(usable, None, source=self.data or "bfcl_eval", share=self.eval_share)

    def environment(self, problem: Problem) -> NotesEnvironment:
        """A fresh episode."""
        pinned = (Message(role="system", content=self.system), Message(role="user", content=problem.question))
        said = (*problem.data["messages"], LAST_MESSAGE)
        return NotesEnvironment(pinned=pinned, messages=said, answer=_answer, exits=self.exits)

    def expert(self, problem: Problem) -> "BfclMemoryExpert":
        """The expert of an episode."""
        return BfclMemoryExpert(problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a note has the form of one, or an answer stands in the notes; ``None`` where nothing was noted."""
        if context[-1].text != LAST_MESSAGE:
            return reply.startswith(NOTED)
        notes = context[-2].text.removeprefix(NOTED)
        return None if notes == NOTHING else bool(reply.strip()) and contains_answer((reply,), notes)

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield f"{self.system} {LAST_MESSAGE} {NOTED}{NOTHING}"
        for problem in self.problems("train"):
            yield from (problem.question, str(problem.answer), *problem.data["messages"])

    def _problem(self, question: MemoryQuestion, said: Sequence[str]) -> Problem | None:
        """The question with some neighbouring messages; None if no message has its answer."""
        question_words = set(question.question.casefold().split())
        indices = [index for index, text in enumerate(said) if contains_answer(question.answers, text)]
        if not indices:
            return None
        index = max(indices, key=lambda index: len(question_words & set(said[index].casefold().split())))
        before = random.Random(question.id).randrange(self.messages)
        first = max(min(index - before, len(said) - self.messages), 0)
        return Problem(
            id=question.id,
            question=question.question,
            answer=next(answer for answer in question.answers if contains_answer((answer,), said[index])),
            data={
                "messages": list(said[first : first + self.messages]),
                "aliases": list(question.answers),
                "index": index - first,
                "scenario": question.scenario,
            },
        )


class BfclMemoryExpert:
    """Notes nothing until the message with the answer came, and then the words around it."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._replies = problem, 0

    def reply(self, context: Sequence[Message]) -> str:
        """The notes so far; after the last message the answer."""
        note = self._note
        self._replies += 1
        return str(self._problem.answer) if self._replies == len(self._problem.data["messages"]) + 2 else note

    def write(self, request: Request) -> str:
        """The notes so far."""
        return self._note

    @property
    def _note(self) -> str:
        index, said = self._problem.data["index"], self._problem.data["messages"]
        return f"{NOTED}{_excerpt(said[index], str(self._problem.answer)) if self._replies > index else NOTHING}"


def _excerpt(text: str, answer: str) -> str:
    """The words around an answer.

    an answer of 1 word at the 20th of 40 words, EXCERPT=12  ─▶  words 15 to 26
    """
    words = text.split()
    size = max(EXCERPT, len(answer.split()) + 1)
    starts = range(max(len(words) - size, 0) + 1)
    holding = [start for start in starts if contains_answer((answer,), " ".join(words[start : start + size]))]
    start = holding[len(holding) // 2] if holding else 0
    return " ".join(words[start : start + size])


def _answer(reply: str) -> str | None:
    return read_answer(reply) or reply.strip() or None
