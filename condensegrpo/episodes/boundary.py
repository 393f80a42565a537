"""The boundary between the engine and plug-ins: an exception or a late call of a plug-in ends one episode only.

What a task or an environment returns is checked here: a wrong type would otherwise fail later, when a file is written.
"""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, SupportsFloat, get_args

from condensegrpo.core.defaults import overrides, with_defaults
from condensegrpo.core.errors import ContextOverflow, SamplerError
from condensegrpo.core.failures import PluginFailure, failure_of, is_cancellation, location_of
from condensegrpo.core.messages import Message, Role
from condensegrpo.core.protocols.environment import Environment, RewrittenHistory, Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.core.threads import late, to_thread
from condensegrpo.core.trajectory import MAX_REWARD, StopReason

ROLES: tuple[str, ...] = get_args(Role)


class EndEpisode(Exception):
    """How an episode ends; raised anywhere inside ``run_episode`` and caught there."""

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

    __slots__ = ("_limit", "plugin", "seconds", "setting", "stop", "who")

    def __init__(
        self,
        who: str,
        *,
        stop: StopReason = StopReason.ENVIRONMENT_ERROR,
        plugin: object = None,
        seconds: float | None = None,
        setting: str = "rollout.limits.turn_seconds",
    ) -> None:
        """Name the plug-in.

        Args:
            plugin: whose code it is, see ``failure_of``.
            seconds: time limit of an asynchronous block; None: there is none.
            setting: the configuration key of the limit.
        """
        self.who, self.stop, self.plugin, self.seconds, self.setting = who, stop, plugin, seconds, setting

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, EndEpisode | GeneratorExit) or is_cancellation(error):
            return
        if isinstance(error, ContextOverflow):
            raise EndEpisode(StopReason.CONTEXT_OVERFLOW, str(error)) from error
        if isinstance(error, SamplerError):  # of a sampler that the plug-in called
            raise EndEpisode.by(failure_of(self.who, error), StopReason.SAMPLER_ERROR) from error
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            return  # Ctrl-C
        # the boundary to plug-ins; sys.exit() and a panic of Rust code are no Exception
        raise EndEpisode.by(failure_of(self.who, error, plugin=self.plugin), self.stop) from error

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
            raise EndEpisode.by(late(self.who, self.seconds or 0, self.setting, location), self.stop) from None
        self.__exit__(kind, error, trace)


async def called(method: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401  whatever it returns
    """What a method of a plug-in returns. One that is not asynchronous is called in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    returned = await to_thread(partial(method, *arguments))
    return await returned if isinstance(returned, Awaitable) else returned


def checked_messages(value: object, call: str) -> tuple[Message, ...]:
    """The messages that a plug-in returned."""
    if not isinstance(value, tuple | list | Sequence) or isinstance(value, str):
        raise TypeError(
            f"{call} returned {_short(value)}, wanted a tuple of messages, as in "
            f'return (Message(role="user", content=problem.question),)'
        )
    for message in value:
        if not isinstance(message, Message) or not isinstance(message.content, str | tuple):
            raise TypeError(
                f"{call} returned {_short(message)} among its messages, wanted a Message whose content is text"
            )
        if message.role not in ROLES:
            raise TypeError(f"{call} returned a message of role {message.role!r}, known roles: {', '.join(ROLES)}")
    return tuple(value)


async def first_messages(environment: object, problem: Problem) -> tuple[Message, ...]:
    """How an episode begins, in an environment as ``Task.environment`` returned it."""
    if isinstance(environment, type):
        name = environment.__name__
        raise TypeError(f"environment() returned the class {name}, wanted an object: {name}(…)")
    if not all(callable(getattr(environment, method, None)) for method in ("start", "step")):
        raise TypeError(
            f"environment() returned {_short(environment)}, wanted an object with start() and step(), as in "
            f"return AnswerEnvironment(question=problem.question)"
        )
    begins = with_defaults(environment, Environment)
    if not overrides(begins, Environment.start):
        return (Message(role="user", content=problem.question),)
    messages = checked_messages(await called(begins.start), "start()")
    if not messages:
        raise TypeError("start() returned no message, wanted at least the question")
    return messages


def checked_tools(value: object) -> tuple[EnvironmentTool, ...]:
    """The tools that an environment offers."""
    if not isinstance(value, Sequence) or not all(isinstance(tool, EnvironmentTool) for tool in value):
        raise TypeError(f"tools() returned {_short(value)}, wanted a sequence of EnvironmentTool")
    return tuple(value)


def checked_step(value: object) -> Step:
    """The response of an environment to a reply, with plain tuples and floats."""
    if not isinstance(value, Step):
        raise TypeError(f'step() returned {_short(value)}, wanted a Step, as in return Step(done=True, answer="4")')
    if not isinstance(value.rewritten, RewrittenHistory | None):
        raise TypeError(f"step() returned rewritten={_short(value.rewritten)}, wanted a RewrittenHistory or None")
    answer, outcome = checked_end(value.answer, value.outcome, "step()")
    check_done(value, "step()")
    return Step(
        observations=checked_messages(value.observations, "step()"),
        done=value.done,
        answer=answer,
        outcome=outcome,
        turn_rewards=checked_rewards(value.turn_rewards, "step()"),
        new_query=value.new_query,
        rewritten=value.rewritten,
    )


def check_done(value: Step | ToolResult, call: str) -> None:
    """Raise ValueError for an answer or an outcome that does not end the episode: it would be lost."""
    if not value.done and (value.answer is not None or value.outcome is not None):
        end = f"the outcome {value.outcome}" if value.answer is None else f"the answer {_short(value.answer)}"
        raise ValueError(f"{call} returned {end} without done=True, and only the end of an episode has one")


def checked_rewards(rewards: Mapping[str, float], call: str) -> Mapping[str, float]:
    """Turn rewards as plain floats; TypeError or ValueError if they are none."""
    if not isinstance(rewards, Mapping) or not all(isinstance(value, SupportsFloat) for value in rewards.values()):
        raise TypeError(f'{call} returned turn_rewards={_short(rewards)}, wanted numbers by name, as in {{"hit": 1.0}}')
    plain = {str(name): float(value) for name, value in rewards.items()}
    if not all(abs(value) <= MAX_REWARD for value in plain.values()):  # NaN included
        raise ValueError(
            f"{call} returned the turn rewards {plain}, wanted finite numbers of magnitude {MAX_REWARD:g} at most"
        )
    return plain


def checked_end(answer: str | None, outcome: float | None, call: str) -> tuple[str | None, float | None]:
    """Answer and outcome of an episode; TypeError or ValueError if they are none."""
    if not isinstance(answer, str | None):
        raise TypeError(f"{call} returned the answer {_short(answer)}, wanted text or None")
    if outcome is None:
        return answer, None
    if not isinstance(outcome, SupportsFloat) or not abs(float(outcome)) <= MAX_REWARD:
        raise ValueError(
            f"{call} returned the outcome {_short(outcome)}, wanted a finite number of magnitude {MAX_REWARD:g} at "
            f"most, or None"
        )
    return answer, float(outcome)


def _short(value: object) -> str:
    return f"{value!r:.80}"
