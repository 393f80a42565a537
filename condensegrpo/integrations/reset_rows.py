"""Rows of a data set as problems: their columns are the arguments of an environment's ``reset``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt
from pydantic import TypeAdapter, ValidationError

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem
from condensegrpo.integrations.chat import Texts, messages
from condensegrpo.storage.rows import Row, read_rows, require_columns
from condensegrpo.tasks.answers import AnswerStyle
from condensegrpo.tasks.splits import SHARE, Splits, SplitTask, split

_PROMPT: TypeAdapter[Texts] = TypeAdapter(Texts)


@dataclass(kw_only=True, eq=False)
class ResetRows(SplitTask):
    """The options of a task that reads such rows. Without ``eval_data`` a share is held out by the hash of the row."""

    eval_data: str | None = None  # held-out rows
    prompt: str = "prompt"  # column of a text or of chat messages; without it an episode begins with what reset returns
    answer: str | None = None  # column of the ground truth, for rewards that compare; None: none
    answer_style: AnswerStyle = "reply"  # how an answer is read from the last reply, see ``answers.read_answer``
    eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE  # of the rows, held out if there is no ``eval_data``
    max_examples: Annotated[int, Ge(1)] | None = None  # training rows to read, from the first

    def read_splits(self, data: str) -> Splits:
        """The problems of both splits, in the order of the files.

        Raises:
            DataError: as ``rows.read_rows``; a column is missing, or a prompt is neither text nor chat messages.
        """
        train = self._read(read_rows(data, split="train", limit=self.max_examples), "train", data)
        held_out = None
        if self.eval_data is not None:
            held_out = self._read(read_rows(self.eval_data, split="test"), "test", self.eval_data)
        return split(train, held_out, source=data, share=self.eval_share).mapped(self._posed)

    def first_messages(self, row: Mapping[str, Any], observation: str = "") -> tuple[Message, ...]:
        """The first messages of an episode, at least one: the row's prompt, and after it what ``reset`` returned."""
        *first, last = messages(_PROMPT.validate_python(row.get(self.prompt) or ""), "user") or messages("", "user")
        return (*first, replace(last, content=last.text + observation))

    def _read(self, rows: Sequence[Row], split: str, source: str) -> list[Problem]:
        """The rows as problems, whose identity is all of their columns: many may have one prompt."""
        require_columns(rows, [] if self.answer is None else [self.answer], source=source)
        for number, row in enumerate(rows, start=1):
            try:
                self.first_messages(row)
            except ValidationError as error:
                raise DataError(
                    f"reading the dataset {source}: row {number} has the {self.prompt} {row[self.prompt]!r:.80}, "
                    f'wanted a text or chat messages, as in [{{"role": "user", "content": "…"}}]'
                ) from error
        return [
            Problem(
                id=f"{split}-{number}",
                question=json.dumps(row, sort_keys=True, default=str),
                answer=None if self.answer is None or row[self.answer] is None else str(row[self.answer]),
                data=row,
            )
            for number, row in enumerate(rows)
        ]

    def _posed(self, problem: Problem) -> Problem:
        return replace(problem, question=self.first_messages(problem.data)[-1].text)
