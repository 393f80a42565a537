"""The boundary between the engine and plug-ins: an exception, an exit or a hang in a plug-in ends one episode only.

What a task or an environment returns is checked here: a wrong type would otherwise fail later, when a file is written.
"""

import asyncio
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Self, SupportsFloat, TypeVar, get_args

from condensegrpo.core.errors import ContextOverflow, SamplerError
from condensegrpo.core.failures import PluginFailure, failure_of
from condensegrpo.core.messages import Message, Role
from condensegrpo.core.plugin_task import result_of_task
from condensegrpo.core.protocols.environment import Environment, RewrittenHistory, Step
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.core.signatures import signature_faults
from condensegrpo.core.trajectory import MAX_REWARD, StopReason

T = TypeVar("T")


class EndEpisode(Exception):
    """Ends the episode with a stop reason; raised anywhere inside ``run_episode`` and caught there."""

    def __init__(self, stop: StopReason, detail: str, failure: PluginFailure | None = None) -> None:
        super().__init__(detail)
        self.stop = stop
        self.detail = detail
        self.failure = failure  # None: no plug-in failed

    @classmethod
    def by(cls, failure: PluginFailure, stop: StopReason) -> Self:
        """The end of an episode whose plug-in failed."""
        return cls(stop, str(failure), failure)


async def call_plugin(
    work: Callable[[], Coroutine[object, object, T]],
    *,
    who: str,
    stop: StopReason = StopReason.ENVIRONMENT_ERROR,
    turn_seconds: float,
    seconds: float | None = None,
    plugin: object = None,
) -> T:
    """Run a plug-in's code: an exception or a timeout becomes ``EndEpisode`` with the plug-in's name and the line.

    A cancellation of the episode cancels the work and propagates. ``ContextOverflow``, ``SamplerError`` and
    ``EndEpisode`` keep their meaning. A ``KeyboardInterrupt`` that the work raises is its failure: Python raises the
    one of Ctrl-C in the main thread, where no plug-in runs.

    Args:
        turn_seconds: for which the code may block the event loop, see ``result_of_task``.
        seconds: for all of the work; None: its steps have limits of their own.
        plugin: what is called, see ``failure_of``.
    """

    async def translated() -> T:
        with Boundary(who, stop=stop, plugin=plugin):
            return await work()

    outcome = await result_of_task(
        translated(),
        name=who,
        step_seconds=turn_seconds,
        seconds=seconds,
        setting="rollout.limits.turn_seconds",
    )
    if isinstance(outcome, PluginFailure):
        raise EndEpisode.by(outcome, stop)
    return outcome


@dataclass(slots=True)
class Boundary:
    """A block with a step of the engine, in which an exception becomes ``EndEpisode`` with the name and the line.

    Plug-ins that the step calls run in their own ``call_plugin``.
    """

    who: str
    _: KW_ONLY
    stop: StopReason = StopReason.ENVIRONMENT_ERROR
    plugin: object = None  # whose code it is, see ``failure_of``

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End it."""
        if error is None or isinstance(error, EndEpisode | asyncio.CancelledError | GeneratorExit):
            return
        if isinstance(error, ContextOverflow):
            raise EndEpisode(StopReason.CONTEXT_OVERFLOW, str(error)) from error
        if isinstance(error, SamplerError):  # of a sampler that the plug-in called
            raise EndEpisode.by(failure_of(self.who, error), StopReason.SAMPLER_ERROR) from error
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            return  # Ctrl-C
        # the boundary to plug-ins; sys.exit() and a panic of Rust code are no Exception
        raise EndEpisode.by(failure_of(self.who, error, plugin=self.plugin), self.stop) from error


async def asynchronous(returned: Awaitable[T], call: str) -> T:
    """The result of a plug-in's coroutine, from a call such as ``step()``."""
    if not inspect.isawaitable(returned):
        raise TypeError(f"{call} is not asynchronous, it returned {_short(returned)}: define it with async def")
    return await returned


def checked_messages(value: object, call: str) -> tuple[Message, ...]:
    """The messages that a plug-in returned."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(
            f"{call} returned {_short(value)}, wanted a tuple of messages, as in "
            f'return (Message(role="user", content=problem.question),)'
        )
    for message in value:
        if not isinstance(message, Message) or not isinstance(message.content, str | tuple):
            raise TypeError(
                f"{call} returned {_short(message)} among its messages, wanted a Message whose content is text"
            )
        if message.role not in get_args(Role):
            raise TypeError(
                f"{call} returned a message of role {message.role!r}, known roles: {', '.join(get_args(Role))}"
            )
    return tuple(value)


async def first_messages(environment: Environment) -> tuple[Message, ...]:
    """How an episode begins."""
    check_environment(environment)
    messages = checked_messages(await asynchronous(environment.start(), "start()"), "start()")
    if not messages:
        raise TypeError("start() returned no message, wanted at least the question")
    return messages


def check_environment(value: object) -> None:
    """Check what a task returned for an environment; signatures once for a class whose methods they are."""
    if isinstance(value, type):
        raise TypeError(f"environment() returned the class {value.__name__}, wanted an object: {value.__name__}(…)")
    if not all(callable(getattr(value, method, None)) for method in ("start", "step")):
        raise TypeError(
            f"environment() returned {_short(value)}, wanted an object with start() and step(), as in "
            f"return AnswerEnvironment(question=problem.question)"
        )
    of_instance = getattr(value, "__dict__", {})
    of_class = all(hasattr(type(value), method) and method not in of_instance for method in ("start", "step"))
    if of_class and type(value) in _CHECKED:
        return
    if faults := [*signature_faults(value, Environment)]:
        raise TypeError(f"environment() returned a {type(value).__name__}, whose {faults[0]}")
    if of_class:
        _CHECKED.add(type(value))


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


_CHECKED = weakref.WeakSet[type]()  # classes of environments


def _short(value: object) -> str:
    return f"{value!r:.80}"
