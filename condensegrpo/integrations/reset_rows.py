"""Rows of a data set as problems: their columns are the arguments of an environment's ``reset``.

Their prompts are texts or chat messages, as data sets and tasks of other libraries hold them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

from annotated_types import Ge, Gt, Lt
from pydantic import AliasChoices, AliasPath, BeforeValidator, Field, TypeAdapter, ValidationError

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message, Role, ToolCall
from condensegrpo.core.protocols.task import Problem
from condensegrpo.storage.rows import Row, check_rows, read_rows
from condensegrpo.tasks.answers import SHARE, AnswerStyle, Splits, SplitTask, row_identity, split

ROLES = {"developer": "system", "function": "tool", **{role: role for role in get_args(Role)}}
NAME = AliasChoices(AliasPath("function", "name"), "name")  # of a call: OpenAI, verifiers
ARGUMENTS = AliasChoices(AliasPath("function", "arguments"), "arguments")
PARSED = BeforeValidator(lambda call: json.loads(call) if isinstance(call, str) else call)  # a call as a text of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """A tool call."""

    id: str | None = None
    name: Annotated[str, Field(validation_alias=NAME)] = ""
    arguments: Annotated[str | dict[str, Any], Field(validation_alias=ARGUMENTS)] = ""

    @property
    def call(self) -> ToolCall:
        """The call as the trajectory has it."""
        given = self.arguments
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return ToolCall(id=self.id or "", name=self.name, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedPart:
    """A part of a message."""

    type: str
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMessage:
    """A chat message."""

    role: str
    content: str | tuple[LoggedPart, ...] | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[Annotated[LoggedCall | None, PARSED], ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None


Texts = str | tuple[LoggedMessage, ...]  # a text, or chat messages


def messages(logged: Texts, role: Role) -> tuple[Message, ...]:
    """The messages of a data set; a text by itself is a message of ``role``."""
    return (Message(role=role, content=logged),) if isinstance(logged, str) else tuple(map(_message, logged))


def _message(logged: LoggedMessage) -> Message:
    calls = tuple(call.call for call in logged.tool_calls or () if call is not None)
    role: Any = ROLES.get(logged.role, "user")
    thought = f"<think>{logged.reasoning_content}</think>" if logged.reasoning_content else ""
    content = "\n".join(map(_part, logged.content)) if isinstance(logged.content, tuple) else logged.content
    written = (f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>' for call in calls)
    return Message(
        role=role,
        content="\n".join(part for part in (thought, content, *written) if part),
        tool_calls=calls,
        tool_call_id=logged.tool_call_id,
        name=logged.name,
    )


def _part(part: LoggedPart) -> str:
    if part.type == "reasoning":
        return f"<think>{part.reasoning}</think>"
    return part.text if part.type == "text" else f"[{part.type}]"


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
        *first, last = messages(_PROMPT.validate_python(row.get(self.prompt) or ""), "user") or messages("", "user")
        return (*first, replace(last, content=last.text + observation))

    def _read(self, rows: Sequence[Row], split: str, source: str) -> list[Problem]:
        check_rows(rows, [] if self.answer is None else [self.answer], source=source)
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
                question=self.first_messages(row)[-1].text,
                answer=None if self.answer is None or row[self.answer] is None else str(row[self.answer]),
                data=row,
            )
            for number, row in enumerate(rows)
        ]
