"""Any questions and answers: a JSONL or Parquet file or a Hub dataset whose columns are mapped in the options."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.protocols import Problem
from condensegrpo.storage.rows import Row, read_rows, require_columns, require_unique
from condensegrpo.tasks.answer_environment import QuestionTask
from condensegrpo.tasks.answers import AnswerStyle
from condensegrpo.tasks.ground_truth import answered, with_answers
from condensegrpo.tasks.splits import SHARE, split

SYSTEM = "Answer the question. Think first, then end with <answer>your answer</answer>."


@dataclass(kw_only=True, eq=False)
class Jsonl(QuestionTask):
    """The task ``jsonl``. One reply answers the question, after as many tool calls as the rollout allows.

    Without ``eval_data`` a share of the questions is held out by their hash; with it, training questions that are in
    the evaluation data too are left out (``dropped`` counts them).

    Raises:
        DataError: what ``rows.read_rows`` raises, a missing column, an id that occurs twice, or no problem left.
    """

    data: str  # training rows, see ``rows.read_rows``
    eval_data: str | None = None  # held-out rows
    question: str = "question"  # column of the question
    answer: str | None = "answer"  # column of the ground truth; None: none. The first of a list, and all are aliases
    id: str | None = None  # column of the problem's id; by default the row's number
    system: str = SYSTEM  # the system message; empty for none
    answer_style: AnswerStyle = "single"  # how an answer is read from a reply, see ``answers.read_answer``
    reminder: str = ""  # what the user says to a reply without an answer; empty: the episode is over
    ground_truth_file: str | None = None  # answers by id, in place of the column, see ``ground_truth.with_answers``
    eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE  # of the questions, held out if there is no ``eval_data``
    max_examples: Annotated[int, Ge(1)] | None = None  # training rows to read, from the first

    def __post_init__(self) -> None:
        train = self._read(read_rows(self.data, split="train", limit=self.max_examples), "train", self.data)
        held_out = None
        if self.eval_data is not None:
            held_out = self._read(read_rows(self.eval_data, split="test"), "test", self.eval_data)
        self._splits = split(train, held_out, source=self.data, share=self.eval_share)
        if self.ground_truth_file is not None:
            self._splits = with_answers(self.ground_truth_file, self._splits)

    def _read(self, rows: Sequence[Row], split: str, source: str) -> tuple[Problem, ...]:
        answer = None if self.ground_truth_file else self.answer
        require_columns(rows, [name for name in (self.question, answer, self.id) if name is not None], source=source)
        if self.id is not None:
            require_unique(rows, self.id, source=source)
        return tuple(
            answered(
                Problem(
                    id=f"{split}-{number}" if self.id is None else str(row[self.id]),
                    question=str(row[self.question]),
                    answer=None,
                    data=row,
                ),
                None if answer is None else row[answer],
            )
            for number, row in enumerate(rows)
        )
