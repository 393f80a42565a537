"""The boundary between the engine and plug-ins: an exception, an exit or a hang in a plug-in ends one episode only."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Self, TypeVar, get_args

from condensegrpo.core.errors import ContextOverflow, SamplerError
from condensegrpo.core.failures import Failure, failure_of
from condensegrpo.core.messages import Message, Role
from condensegrpo.core.plugin_task import result_of_task
from condensegrpo.core.trajectory import Stop

T = TypeVar("T")


class Ended(Exception):
    """Ends the episode with a stop reason; raised anywhere inside ``run_episode`` and caught there."""

    def __init__(self, stop: Stop, detail: str, failure: Failure | None = None) -> None:
        super().__init__(detail)
        self.stop = stop
        self.detail = detail
        self.failure = failure  # None: no plug-in failed

    @classmethod
    def by(cls, failure: Failure, stop: Stop) -> Self:
        """The end of an episode whose plug-in failed."""
        return cls(stop, str(failure), failure)


async def guarded(
    work: Callable[[], Coroutine[object, object, T]],
    *,
    who: str,
    stop: Stop,
    turn_seconds: float,
    seconds: float | None = None,
    plugin: object = None,
) -> T:
    """Run a plug-in's code: an exception or a timeout becomes ``Ended`` with the plug-in's name and the line.

    A cancellation of the episode cancels the work and propagates. ``ContextOverflow``, ``SamplerError`` and ``Ended``
    keep their meaning. A ``KeyboardInterrupt`` that the work raises is its failure: Python raises the one of Ctrl-C in
    the main thread, where no plug-in runs.

    Args:
        turn_seconds: for which the code may block the event loop, see ``result_of_task``.
        seconds: for all of the work; None: its steps have limits of their own.
        plugin: what is called, see ``failure_of``.
    """
    outcome = await result_of_task(
        translated(work, who=who, stop=stop, plugin=plugin),
        name=who,
        step_seconds=turn_seconds,
        seconds=seconds,
        setting="rollout.limits.turn_seconds",
    )
    if isinstance(outcome, Failure):
        raise Ended.by(outcome, stop)
    return outcome


async def translated(
    work: Callable[[], Coroutine[object, object, T]], *, who: str, stop: Stop, plugin: object = None
) -> T:
    """Run a step of the engine in the caller's task: an exception becomes ``Ended`` with the name and the line.

    Plug-ins that the step calls are ``guarded`` by themselves.

    Args:
        plugin: whose code it is, see ``failure_of``.
    """
    try:
        return await work()
    except (Ended, asyncio.CancelledError, GeneratorExit):
        raise
    except ContextOverflow as error:
        raise Ended(Stop.CONTEXT_OVERFLOW, str(error)) from error
    except SamplerError as error:  # of a sampler that the plug-in called
        raise Ended.by(failure_of(who, error), Stop.SAMPLER_ERROR) from error
    except BaseException as error:  # the boundary to plug-ins; sys.exit() and a panic of Rust code are no Exception
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C
        raise Ended.by(failure_of(who, error, plugin=plugin), stop) from error


async def asynchronous(returned: Awaitable[T], place: str) -> T:
    """The result of a plug-in's coroutine.

    Raises:
        TypeError: its function is not ``async def``.
    """
    if not inspect.isawaitable(returned):
        raise TypeError(f"{place} is not asynchronous, it returned {_short(returned)}: define it with async def")
    return await returned


def checked_messages(value: object, place: str) -> tuple[Message, ...]:
    """The messages that a plug-in returned.

    Raises:
        TypeError: it returned something else.
    """
    if not isinstance(value, Sequence):
        raise TypeError(
            f"{place} returned {_short(value)}, wanted a tuple of messages, as in "
            f'return (Message(role="user", content=problem.question),)'
        )
    for message in value:
        if not isinstance(message, Message) or not isinstance(message.content, str | tuple):
            raise TypeError(
                f"{place} returned {_short(message)} among its messages, wanted a Message whose content is text"
            )
        if message.role not in get_args(Role):
            raise TypeError(
                f"{place} returned a message of role {message.role!r}, known roles: {', '.join(get_args(Role))}"
            )
    return tuple(value)


def _short(value: object) -> str:
    return f"{value!r:.80}"
