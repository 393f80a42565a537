"""Any questions and answers: a JSONL or Parquet file or a Hub dataset whose columns are mapped in the options."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.protocols import Problem
from condensegrpo.storage.rows import Row, read_rows, require_columns, require_unique
from condensegrpo.tasks.answers import AnswerStyle
from condensegrpo.tasks.ground_truth import with_answers
from condensegrpo.tasks.question_task import QuestionTask
from condensegrpo.tasks.splits import SHARE, split

SYSTEM = "Answer the question. Think first, then end with <answer>your answer</answer>."


class Jsonl(QuestionTask):
    """The task ``jsonl``. One reply answers the question, after as many tool calls as the rollout allows.

    Without ``eval_data`` a share of the questions is held out by their hash; with it, training questions that are in
    the evaluation data too are left out (``dropped`` counts them).
    """

    def __init__(
        self,
        *,
        data: str,
        eval_data: str | None = None,
        question: str = "question",
        answer: str | None = "answer",
        id: str | None = None,  # noqa: A002  the option's name in the configuration
        system: str = SYSTEM,
        answer_style: AnswerStyle = "single",
        reminder: str = "",
        ground_truth_file: str | None = None,
        eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE,
        max_examples: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        """Read the data.

        Args:
            data: training rows, see ``rows.read_rows``.
            eval_data: held-out rows.
            question: column of the question.
            answer: column of the ground truth; of a list the first is the answer and all are aliases. None: none.
            id: column of the problem's id; by default the row's number.
            system: the system message; empty for none.
            answer_style: how an answer is read from a reply, see ``answers.read_answer``.
            reminder: what the user says to a reply without an answer; empty: the episode is over.
            ground_truth_file: the ground truth by id, in place of the column, see ``ground_truth.with_answers``.
            eval_share: of the questions, held out if there is no ``eval_data``.
            max_examples: training rows to read, from the first.

        Raises:
            DataError: what ``rows.read_rows`` raises, a missing column, an id that occurs twice, or no problem left.
        """
        columns = _Columns(question=question, answer=None if ground_truth_file else answer, id=id)
        train = _problems(read_rows(data, split="train", limit=max_examples), columns, split="train", source=data)
        held_out = None
        if eval_data is not None:
            held_out = _problems(read_rows(eval_data, split="test"), columns, split="test", source=eval_data)
        splits = split(train, held_out, source=data, share=eval_share)
        if ground_truth_file is not None:
            splits = with_answers(ground_truth_file, splits)
        super().__init__(splits, system=system, answer_style=answer_style, reminder=reminder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Where the parts of a problem stand in a row."""

    question: str
    answer: str | None
    id: str | None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.question, self.answer, self.id) if name is not None]


def _problems(rows: Sequence[Row], columns: _Columns, *, split: str, source: str) -> tuple[Problem, ...]:
    require_columns(rows, columns.names, source=source)
    if columns.id is not None:
        require_unique(rows, columns.id, source=source)
    return tuple(_problem(row, columns, number=f"{split}-{at}") for at, row in enumerate(rows))


def _problem(row: Row, columns: _Columns, *, number: str) -> Problem:
    answer = None if columns.answer is None else row[columns.answer]
    aliases = [str(alias) for alias in answer] if isinstance(answer, list) else None
    truth = next(iter(aliases), None) if aliases is not None else answer
    return Problem(
        id=number if columns.id is None else str(row[columns.id]),
        question=str(row[columns.question]),
        answer=None if truth is None else str(truth),
        data=row if aliases is None else {**row, "aliases": aliases},
    )
