"""The task ``env_class``: a class of the style that TRL's ``environment_factory`` takes.

    class Shelf:
        def reset(self, **row) -> str | None: …    begins an episode; a text is appended to the last user message
        def open_box(self, box: str) -> str: …     public methods with type hints and a docstring are the tools
        def get_reward(self) -> float: …           optional: the outcome, which the reward ``environment`` pays
        def close(self) -> None: …                 optional: no tool either

Methods are synchronous or asynchronous. The episode ends with the first reply that calls no tool, or with the call
after which the attribute ``done`` of an object with ``get_reward`` is true.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MethodType
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt
from pydantic import TypeAdapter, ValidationError

from condensegrpo.core.errors import DataError, PluginError
from condensegrpo.core.failures import at_definition
from condensegrpo.core.messages import History, Message
from condensegrpo.core.plugins import load_object
from condensegrpo.core.protocols import EnvironmentTool, Problem, Split, Step, ToolResult
from condensegrpo.episodes.toolcalls import tool_schema
from condensegrpo.integrations.chat import Texts, messages
from condensegrpo.integrations.episode_thread import EpisodeThread
from condensegrpo.storage.rows import Row, read_rows, require_columns
from condensegrpo.tasks.answers import AnswerStyle, read_answer
from condensegrpo.tasks.splits import SHARE, split

NO_TOOLS = ("reset", "get_reward", "close")
_PROMPT: TypeAdapter[Texts] = TypeAdapter(Texts)


@dataclass(kw_only=True, eq=False)
class EnvClass:
    """The task ``env_class``. A row is a problem, and its columns are the arguments of ``reset``.

    Without ``eval_data`` a share of the rows is held out by their hash.

    Raises:
        DataError: what ``rows.read_rows`` raises, a prompt that is neither text nor chat messages, a missing column.
        PluginError: the class cannot be imported, has no ``reset``, or a method lacks type hints or a docstring.
    """

    factory: str | Callable[..., Any]  # path/to/file.py:Class, package.module:Class, or the class itself
    data: str  # training rows, see ``rows.read_rows``
    eval_data: str | None = None  # held-out rows
    prompt: str = "prompt"  # column of a text or of chat messages; without it an episode begins with what reset returns
    answer: str | None = None  # column of the ground truth, for rewards that compare; None: none
    answer_style: AnswerStyle = "reply"  # how an answer is read from the last reply, see ``answers.read_answer``
    eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE  # of the rows, held out if there is no ``eval_data``
    max_examples: Annotated[int, Ge(1)] | None = None  # training rows to read, from the first

    def __post_init__(self) -> None:
        self._make = load_object("environments", self.factory) if isinstance(self.factory, str) else self.factory
        if isinstance(self._make, type):  # of other factories, when an episode starts
            _tools_of(self._make)
        train = self._read(read_rows(self.data, split="train", limit=self.max_examples), "train", self.data)
        held_out = None
        if self.eval_data is not None:
            held_out = self._read(read_rows(self.eval_data, split="test"), "test", self.eval_data)
        splits = split(train, held_out, source=self.data, share=self.eval_share)
        self.dropped = splits.dropped  # training rows that are left out because the evaluation data has them too
        self._problems: Mapping[Split, Sequence[Problem]] = {
            "train": [self._posed(problem) for problem in splits.train],
            "eval": [self._posed(problem) for problem in splits.held_out],
        }

    def problems(self, split: Split) -> Sequence[Problem]:
        """The rows of a split, in the order of the file."""
        return self._problems[split]

    def environment(self, problem: Problem) -> "ClassEpisode":
        """A fresh episode."""
        return ClassEpisode(self._make, problem.data, self._prompt(problem.data), self.answer_style)

    def _read(self, rows: Sequence[Row], split: str, source: str) -> list[Problem]:
        """The rows as problems that are told apart by all of their columns: many may have one prompt."""
        require_columns(rows, [] if self.answer is None else [self.answer], source=source)
        for number, row in enumerate(rows, start=1):
            try:
                self._prompt(row)
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
        return replace(problem, question=self._prompt(problem.data)[-1].text)

    def _prompt(self, row: Mapping[str, Any]) -> tuple[Message, ...]:
        """The first messages of an episode, without what ``reset`` returns; at least one."""
        return messages(_PROMPT.validate_python(row.get(self.prompt) or ""), "user") or messages("", "user")


class ClassEpisode:
    """One episode: an object of the class, whose synchronous methods run in a thread of the episode."""

    def __init__(
        self,
        make: Callable[[], Any],
        row: Mapping[str, Any],
        prompt: Sequence[Message],
        answer_style: AnswerStyle,
    ) -> None:
        """Nothing is made before ``start``."""
        self._make, self._row, self._prompt, self._answer_style = make, row, prompt, answer_style
        self._thread = EpisodeThread("the environment class")
        self._object: Any = None

    async def start(self) -> tuple[Message, ...]:
        """The row's prompt, with what ``reset`` returns at the end of its last message."""
        self._object = await self._thread.call(self._make)
        observation = await self._called("reset", **_accepted(self._object.reset, self._row))
        if not isinstance(observation, str | None):
            raise TypeError(f"reset() returned {observation!r:.80}, wanted text or None")
        *first, last = self._prompt
        return (*first, replace(last, content=last.text + (observation or "")))

    def tools(self) -> Sequence[EnvironmentTool]:
        """The public methods."""
        return [
            EnvironmentTool(
                name=name,
                description=function["description"],
                parameters=function["parameters"],
                call=partial(self._use, name),
            )
            for name, function in _tools_of(self._object.__class__).items()
        ]

    async def step(self, reply: Message) -> Step:
        """The end: the answer, and the outcome if the class has one."""
        return Step(done=True, answer=read_answer(reply.text, self._answer_style), outcome=await self._outcome())

    async def close(self) -> None:
        """Close the object and let its thread end."""
        try:
            if hasattr(self._object, "close"):
                await self._called("close")
        finally:
            self._thread.close()

    async def _use(self, name: str, arguments: Mapping[str, Any], history: History) -> ToolResult:
        text = str(await self._called(name, **arguments))
        if not getattr(self._object, "done", False):
            return ToolResult(text=text)
        outcome = await self._outcome()
        return ToolResult(text=text, done=outcome is not None, outcome=outcome)

    async def _outcome(self) -> float | None:
        return float(await self._called("get_reward")) if hasattr(self._object, "get_reward") else None

    async def _called(self, method: str, **arguments: object) -> Any:  # noqa: ANN401  whatever the method returns
        function = getattr(self._object, method)
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await self._thread.call(function, **arguments)


def _accepted(reset: Callable[..., object], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of a row that ``reset`` has parameters for; all of them if it takes any."""
    parameters = inspect.signature(reset).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in row.items() if takes_all or name in parameters}


@cache
def _tools_of(kind: type) -> Mapping[str, Mapping[str, Any]]:
    """The schemas of a class's public methods by name.

    Raises:
        PluginError: a method lacks type hints or a docstring, or there is no ``reset``.
    """
    if not callable(getattr(kind, "reset", None)):
        raise PluginError(f"setting up the environment class {kind.__name__}: it has no reset(){at_definition(kind)}.")
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: tool_schema(name, MethodType(method, kind))["function"]  # bound to anything: without self
        for name, method in methods
        if name not in NO_TOOLS and not name.startswith("_")
    }
