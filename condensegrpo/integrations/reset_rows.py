"""Rows of a data set as problems: their columns are the arguments of an environment's ``reset``.

Their prompts are texts or chat messages, as data sets and tasks of other libraries hold them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem
from condensegrpo.storage.rows import Row, check_rows, read_rows
from condensegrpo.tasks.agent_chat import chat_message
from condensegrpo.tasks.agent_request import Field, RequestRefused
from condensegrpo.tasks.answers import SHARE, AnswerStyle, Splits, SplitTask, row_identity, split


def first_messages(given: object, where: str) -> tuple[Message, ...]:
    """The messages of a prompt, in which calls are texts; a text by itself is a message of the user."""
    if isinstance(given, str) or not given:
        return (Message(role="user", content=given if isinstance(given, str) else ""),)
    return tuple(map(_with_written_calls, Field(given, where).each(_row_message)))


def _row_message(given: Field) -> Message:
    """A message as data sets hold it: calls may be texts or lack an id, and a thought may stand beside the text."""
    fields = given.mapping()
    calls = [_row_call(made) for made in fields.get("tool_calls") or ()]
    role = "tool" if fields.get("role") == "function" else fields.get("role")
    read = {**fields, "role": role, "tool_calls": [made for made in calls if made is not None]}
    message, thought = chat_message(Field(read, given.place)), fields.get("reasoning_content")
    return replace(message, content=f"<think>{thought}</think>\n{message.text}") if thought else message


def _row_call(made: object) -> object:
    try:
        call = json.loads(made) if isinstance(made, str) else made
    except ValueError:
        return made  # refused with its place
    if not isinstance(call, dict):
        return call
    return {**{name: value for name, value in call.items() if name != "function" or value}, "id": call.get("id") or ""}


def _with_written_calls(message: Message) -> Message:
    calls = [
        f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'
        for call in message.tool_calls
    ]
    return replace(message, content="\n".join(part for part in (message.text, *calls) if part))


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
        """The problems of both splits, in the order of the files."""
        train = self._read(read_rows(data, split="train", limit=self.max_examples), "train", data)
        held = self.eval_data
        held_out = None if held is None else self._read(read_rows(held, split="test"), "test", held)
        return split(
            train,
            held_out,
            source=data,
            share=self.eval_share,
            identity=lambda problem: row_identity(problem.data),
        )

    def first_messages(self, row: Mapping[str, Any], observation: str = "") -> tuple[Message, ...]:
        """The first messages of an episode, at least one: the row's prompt, and after it what ``reset`` returned."""
        *first, last = first_messages(row.get(self.prompt), self.prompt)
        return (*first, replace(last, content=last.text + observation))

    def _read(self, rows: Sequence[Row], split: str, source: str) -> list[Problem]:
        check_rows(rows, [] if self.answer is None else [self.answer], source=source)
        for number, row in enumerate(rows, start=1):
            try:
                self.first_messages(row)
            except RequestRefused as error:
                raise DataError(
                    f"reading the dataset {source}: row {number} has the {self.prompt} {row[self.prompt]!r:.80}, "
                    f'wanted a text or chat messages, as in [{{"role": "user", "content": "…"}}]: {error}'
                ) from error
        return [
            Problem(
                id=f"{split}-{number}",
                question=self.first_messages(row)[-1].text,
                answer=None if self.answer is None or row[self.answer] is None else str(row[self.answer]),
                data=row,
            )
            for number, row in enumerate(rows)
        ]
