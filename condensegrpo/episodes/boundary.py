"""The boundary between the engine and plug-ins: an exception or a late call of a plug-in ends one episode only."""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from condensegrpo.core.defaults import overrides, with_defaults
from condensegrpo.core.errors import ContextOverflow, SamplerError
from condensegrpo.core.failures import PluginFailure, failure_of, is_cancellation, location_of
from condensegrpo.core.messages import Message, checked_messages
from condensegrpo.core.protocols.environment import Environment
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.threads import late, to_thread
from condensegrpo.core.trajectory import StopReason


class EndEpisode(Exception):
    """The end of an episode; raised anywhere inside ``run_episode`` and caught there."""

    def __init__(
        self,
        stop: StopReason,
        detail: str = "",
        failure: PluginFailure | None = None,
        *,
        answer: str | None = None,
        outcome: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.stop, self.detail, self.answer, self.outcome = stop, detail, answer, outcome
        self.failure = failure  # None: no plug-in failed

    @classmethod
    def by(cls, failure: PluginFailure, stop: StopReason) -> Self:
        """The end of an episode whose plug-in failed."""
        return cls(stop, str(failure), failure)


class Boundary:
    """A block in which an exception of a plug-in becomes ``EndEpisode`` with the name of the plug-in and the line.

        async with Boundary("the environment", seconds=5):      # of code that awaits: within a time limit
            step = await environment.step(reply)

    A cancellation of the episode passes through. ``ContextOverflow``, ``SamplerError`` and ``EndEpisode`` keep their
    meaning. A ``KeyboardInterrupt`` in another than the main thread is none of Ctrl-C.
    """

    __slots__ = ("_limit", "plugin", "seconds", "setting", "source", "stop")

    def __init__(
        self,
        source: str,
        *,
        stop: StopReason = StopReason.ENVIRONMENT_ERROR,
        plugin: object = None,
        seconds: float | None = None,
        setting: str = "rollout.limits.turn_seconds",
    ) -> None:
        """Name the plug-in.

        Args:
            source: names it in failures: ``the environment``.
            plugin: whose code it is, see ``failure_of``.
            seconds: time limit of an asynchronous block; None: there is none.
            setting: the configuration key of the limit.
        """
        self.source, self.stop, self.plugin, self.seconds, self.setting = source, stop, plugin, seconds, setting

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, EndEpisode | GeneratorExit) or is_cancellation(error):
            return
        if isinstance(error, ContextOverflow):
            raise EndEpisode(StopReason.CONTEXT_OVERFLOW, str(error)) from error
        if isinstance(error, SamplerError):  # of a sampler that the plug-in called
            raise EndEpisode.by(failure_of(self.source, error), StopReason.SAMPLER_ERROR) from error
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            return  # Ctrl-C; not ``is_ctrl_c``: asyncio.run has installed a handler of its own
        # the boundary to plug-ins; sys.exit() and a panic of Rust code are no Exception
        raise EndEpisode.by(failure_of(self.source, error, plugin=self.plugin), self.stop) from error

    async def __aenter__(self) -> None:
        self._limit = asyncio.timeout(self.seconds)
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            frames = reversed(list(traceback.walk_tb(error.__traceback__ if error is not None else None)))
            location = location_of(frames) or str(timeout.__cause__)  # see ``to_thread``
            raise EndEpisode.by(late(self.source, self.seconds or 0, self.setting, location), self.stop) from None
        self.__exit__(kind, error, trace)


async def call_method(method: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401  whatever it returns
    """The result of a method of a plug-in; one that is not asynchronous is called in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    returned = await to_thread(partial(method, *arguments))
    return await returned if isinstance(returned, Awaitable) else returned


async def first_messages(environment: object, problem: Problem) -> tuple[Message, ...]:
    """The first messages of an episode, of an environment as ``Task.environment`` returned it."""
    if not all(callable(getattr(environment, method, None)) for method in ("start", "step")):
        raise TypeError(
            f"environment() returned {environment!r:.80}, wanted an object with start() and step(), as in "
            f"return AnswerEnvironment(question=problem.question)"
        )
    begins = with_defaults(environment, Environment)
    if not overrides(begins, Environment.start):
        return (Message(role="user", content=problem.question),)
    messages = checked_messages(await call_method(begins.start), "start()")
    if not messages:
        raise TypeError("start() returned no message, wanted at least the question")
    return messages


def checked_tools(value: object) -> tuple[EnvironmentTool, ...]:
    """The tools that an environment offers."""
    if not isinstance(value, Sequence) or not all(isinstance(tool, EnvironmentTool) for tool in value):
        raise TypeError(f"tools() returned {value!r:.80}, wanted a sequence of EnvironmentTool")
    return tuple(value)
