"""The line between the engine and what others wrote: past it, an exception, an exit or a hang ends one episode only."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, get_args

from condensegrpo.core.errors import ContextOverflow, SamplerError
from condensegrpo.core.messages import Message, Role
from condensegrpo.core.trajectory import Stop

T = TypeVar("T")


class Ended(Exception):
    """The episode is over: no error, but the way out from wherever it fails. Never leaves ``run_episode``."""

    def __init__(self, stop: Stop, detail: str) -> None:
        super().__init__(detail)
        self.stop = stop
        self.detail = detail


async def guarded(
    work: Callable[[], Coroutine[Any, Any, T]], *, who: str, stop: Stop, seconds: float | None = None
) -> T:
    """Run a plug-in's code: whatever it raises, and taking longer than ``seconds``, becomes ``Ended`` with its name.

    The work has a task of its own: if it catches the cancellation at its time limit it is left behind and not waited
    for, and if it raises ``CancelledError`` or cancels its task, that ends the work and nobody else. A cancellation of
    the episode cancels the work and passes through. ``ContextOverflow`` and ``SamplerError`` keep their meaning,
    whoever raises them, and so does an ``Ended`` from further in.
    """
    task = asyncio.create_task(_translated(work, who, stop))
    task.add_done_callback(_heard)
    try:
        await asyncio.wait({task}, timeout=seconds)  # not wait_for: that would wait for whoever ignores a cancellation
        if not task.done():
            raise Ended(stop, f"{who}: nothing came back within {seconds:g} seconds (rollout.limits.turn_seconds)")
        if task.cancelled():
            raise Ended(stop, f"{who}: CancelledError: it cancelled itself")
        return task.result()
    finally:
        task.cancel()


def checked_messages(found: object, place: str) -> tuple[Message, ...]:
    """The messages that a plug-in gave.

    Raises:
        TypeError: it gave something else.
    """
    if not isinstance(found, Sequence):
        raise TypeError(f"{place} gave {_short(found)}, wanted a tuple of messages")
    for message in found:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise TypeError(
                f"{place} gave {_short(message)} among its messages, wanted a Message whose content is text"
            )
        if message.role not in get_args(Role):
            raise TypeError(f"{place} gave a message of role {message.role!r}, known are {', '.join(get_args(Role))}")
    return tuple(found)


async def _translated(work: Callable[[], Coroutine[Any, Any, T]], who: str, stop: Stop) -> T:
    """Run the work. Inside the task, since asyncio passes a ``SystemExit`` that leaves one on to the whole process."""
    try:
        return await work()
    except (Ended, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except ContextOverflow as error:
        raise Ended(Stop.CONTEXT_OVERFLOW, str(error)) from error
    except SamplerError as error:  # of a sampler that a plug-in was lent
        raise Ended(Stop.SAMPLER_ERROR, f"{who}: {type(error).__name__}: {error}") from error
    except BaseException as error:  # the boundary to plug-ins; sys.exit() and a panic of Rust code are no Exception
        raise Ended(stop, f"{who}: {type(error).__name__}: {error}") from error


def _heard(task: asyncio.Task[Any]) -> None:
    """Take the exception of work that was left behind: asyncio would log it as lost."""
    if not task.cancelled():
        task.exception()


def _short(value: object) -> str:
    return f"{value!r:.80}"
