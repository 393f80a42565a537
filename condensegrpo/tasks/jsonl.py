"""Any questions and answers: a JSONL or Parquet file or a Hub dataset whose columns are mapped in the options."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.errors import DataError, DataMissing
from condensegrpo.core.protocols.task import Problem
from condensegrpo.storage.rows import Row, check_rows, read_file, read_rows
from condensegrpo.tasks.answers import SHARE, AnswerStyle, QuestionTask, Splits, SplitTask, row_identity, split

SYSTEM = "Answer the question. Think first, then end with <answer>your answer</answer>."


@dataclass(kw_only=True, eq=False)
class QuestionRows(SplitTask):
    """Questions and answers in the columns of rows.

    Without ``eval_data`` a share of the rows is held out by their hash; with it, training rows that are in the
    evaluation data too are left out (``left_out`` counts them).
    """

    data: str  # training rows, see ``rows.read_rows``
    eval_data: str | None = None  # held-out rows
    question: str = "question"  # column of the question
    answer: str | None = "answer"  # column of the ground truth; None: none. The first of a list, and all are aliases
    id: str | None = None  # column of the problem's id; by default the row's number
    eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE  # of the questions, held out if there is no ``eval_data``

    def __post_init__(self) -> None:
        self._splits = self._read_splits(self.answer, limit=None)

    def _read_splits(self, answer: str | None, *, limit: int | None) -> Splits:
        """The problems of both splits, with their answers from a column, of at most ``limit`` training rows."""
        train = self._read(read_rows(self.data, split="train", limit=limit), "train", self.data, answer)
        held = self.eval_data
        held_out = None if held is None else self._read(read_rows(held, split="test"), "test", held, answer)
        return split(train, held_out, source=self.data, share=self.eval_share, identity=self._identity)

    def _identity(self, problem: Problem) -> str:
        """What makes two problems the same."""
        return row_identity(problem.data)

    def _read(self, rows: Sequence[Row], split: str, source: str, answer: str | None) -> tuple[Problem, ...]:
        columns = [name for name in (self.question, answer, self.id) if name is not None]
        check_rows(rows, columns, source=source, texts=[self.question], unique=self.id)
        return tuple(
            _answered(
                Problem(
                    id=f"{split}-{number}" if self.id is None else str(row[self.id]),
                    question=str(row[self.question]),
                    answer=None,
                    data=row,
                ),
                None if answer is None else row[answer],
                f"reading the dataset {source}: row {number + 1} has the {answer}",
            )
            for number, row in enumerate(rows)
        )


@dataclass(kw_only=True, eq=False)
class Jsonl(QuestionRows, QuestionTask):
    """Questions and answers of your own, in a file or data set. One reply answers, after the tool calls it needs.

    Without ``eval_data`` a share of the rows is held out by their hash; with it, training rows that are in the
    evaluation data too are left out (``left_out`` counts them).
    """

    system: str = SYSTEM  # the system message; empty for none
    answer_style: AnswerStyle = "single"  # how an answer is read from a reply, see ``answers.read_answer``
    reminder: str = ""  # what the user says to a reply without an answer; empty: the episode is over
    ground_truth_file: str | None = None  # answers by id, in place of the column, one JSON object or JSON lines
    max_examples: Annotated[int, Ge(1)] | None = None  # training rows to read, from the first

    def __post_init__(self) -> None:
        answer = None if self.ground_truth_file else self.answer
        self._splits = self._read_splits(answer, limit=self.max_examples)
        if self.ground_truth_file is not None:
            self._splits = _with_answers(self.ground_truth_file, self._splits)

    def corpus(self) -> Iterable[str]:
        """The system message, and the questions and answers of the training rows."""
        yield self.system
        for problem in self.problems("train"):
            answers = problem.data.get("aliases", [problem.answer])
            yield from (problem.question, *(f"<answer>{answer}</answer>" for answer in answers if answer is not None))


def _with_answers(source: str, splits: Splits) -> Splits:
    """The problems with their answers from a file; a list of answers gives the aliases, as in the task ``jsonl``.

    Args:
        source: one JSON object of id → answer, or JSON lines with ``id`` and ``answer``.
    """
    truths = _read_truths(source)
    held_out = {problem.id for problem in splits.held_out}
    if both := next((problem.id for problem in splits.train if problem.id in held_out), None):
        raise DataError(
            f"reading the ground truth {source}: the id {both!r} names a training and a held-out problem, and answers "
            f"are by id. Give each problem an id of its own"
        )
    missing = [problem.id for problem in (*splits.train, *splits.held_out) if problem.id not in truths]
    if missing:
        raise DataError(
            f"reading the ground truth {source}: it has no answer for {len(missing)} problems, the first is "
            f"{missing[0]!r}. Its ids are like {next(iter(truths))!r}; map the column of ids in task.options.id"
        )
    doing = f"reading the ground truth {source}: it has the answer"
    return splits.mapped(lambda problem: _answered(problem, truths[problem.id], doing))


def _read_truths(source: str) -> Mapping[str, object]:
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataMissing(f"reading the ground truth {source}: there is no such file (looked for {path.resolve()})")
    if path.suffix == ".json":
        with suppress(ValueError, RecursionError):  # JSON lines under this name are read below, which reports faults
            by_id = json.loads(path.read_bytes())
            if isinstance(by_id, dict) and by_id:
                return by_id
    rows = read_file(path)
    check_rows(rows, ("id", "answer"), source=source, unique="id")
    if not rows:
        raise DataError(f"reading the ground truth {source}: it is empty, wanted at least one answer")
    return {str(row["id"]): row["answer"] for row in rows}


def _answered(problem: Problem, truth: object, doing: str) -> Problem:
    """The problem with its ground truth; the first of a list is the answer and all are its aliases.

    Args:
        doing: the beginning of the error for a truth that is no text or number.
    """
    answers = truth if isinstance(truth, list) else [truth]
    if any(isinstance(answer, dict | list | bytes) for answer in answers):
        raise DataError(
            f"{doing} {truth!r:.80}, wanted a text, a number or a list of them. Map another column in "
            f"task.options.answer, or null and a reward that needs no ground truth"
        )
    known = [
        str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)  # integers with a gap
        for answer in answers
        if answer is not None
    ]
    data = {**problem.data, "aliases": known} if isinstance(truth, list) else problem.data
    return replace(problem, answer=next(iter(known), None), data=data)
