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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any

from condensegrpo.core.errors import PluginError
from condensegrpo.core.failures import at_definition
from condensegrpo.core.messages import History, Message
from condensegrpo.core.plugins import load_object
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.episodes.toolcalls import as_text, tool_schema
from condensegrpo.integrations.episode_thread import EpisodeThread
from condensegrpo.integrations.reset_rows import ResetRows
from condensegrpo.tasks.answers import read_answer

NO_TOOLS = ("reset", "get_reward", "close")


@dataclass(kw_only=True, eq=False)
class EnvClass(ResetRows):
    """An environment class as TRL takes it. A row is a problem; its columns are the arguments of ``reset``."""

    factory: str | Callable[..., Any]  # path/to/file.py:Class, package.module:Class, or the class itself
    data: str  # training rows, see ``rows.read_rows``

    def __post_init__(self) -> None:
        self.make = load_object("environments", self.factory) if isinstance(self.factory, str) else self.factory
        if isinstance(self.make, type):  # of other factories, when an episode starts
            _tools_of(self.make)
        self._splits = self.read_splits(self.data)

    def environment(self, problem: Problem) -> "ClassEpisode":
        """A fresh episode."""
        return ClassEpisode(self, problem.data)


class ClassEpisode(Environment):
    """One episode: an object of the class, whose synchronous methods run in a thread of the episode."""

    def __init__(self, task: EnvClass, row: Mapping[str, Any]) -> None:
        """Nothing is made before ``start``."""
        self._task, self._row = task, row
        self._thread = EpisodeThread("the environment class")
        self._object: Any = None

    async def start(self) -> tuple[Message, ...]:
        """The row's prompt, with what ``reset`` returns at the end of its last message."""
        self._object = await self._thread.call(self._task.make)
        accepted = inspect.signature(self._object.reset).parameters  # of the columns, those that reset takes
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        row = {name: value for name, value in self._row.items() if takes_all or name in accepted}
        observation = await self._called("reset", **row)
        if not isinstance(observation, str | None):
            raise TypeError(f"reset() returned {observation!r:.80}, wanted text or None")
        return self._task.first_messages(self._row, observation or "")

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
        return Step(done=True, answer=read_answer(reply.text, self._task.answer_style), outcome=await self._outcome())

    async def close(self) -> None:
        """Close the object and let its thread end."""
        try:
            if hasattr(self._object, "close"):
                await self._called("close")
        finally:
            await self._thread.close()

    async def _use(self, name: str, arguments: Mapping[str, Any], history: History) -> ToolResult:
        text = as_text(await self._called(name, **arguments))
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


@cache
def _tools_of(kind: type) -> Mapping[str, Mapping[str, Any]]:
    """The schemas of a class's public methods by name."""
    if not callable(getattr(kind, "reset", None)):
        raise PluginError(f"setting up the environment class {kind.__name__}: it has no reset(){at_definition(kind)}.")
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: tool_schema(name, MethodType(method, kind))["function"]  # bound to anything: without self
        for name, method in methods
        if name not in NO_TOOLS and not name.startswith("_")
    }
