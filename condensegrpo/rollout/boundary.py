"""The boundary between the engine and plug-ins: an exception, an exit or a hang in a plug-in ends one episode only."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar, get_args

from condensegrpo.core.errors import ContextOverflow, SamplerError
from condensegrpo.core.messages import Message, Role
from condensegrpo.core.trajectory import Stop

T = TypeVar("T")


class Ended(Exception):
    """Ends the episode with a stop reason; raised anywhere inside ``run_episode`` and caught there."""

    def __init__(self, stop: Stop, detail: str) -> None:
        super().__init__(detail)
        self.stop = stop
        self.detail = detail


async def guarded(
    work: Callable[[], Coroutine[object, object, T]], *, who: str, stop: Stop, seconds: float | None = None
) -> T:
    """Run a plug-in's code: an exception or a timeout becomes ``Ended`` with the plug-in's name.

    The work runs in a task of its own: if it ignores its cancellation it is abandoned, and if it raises
    ``CancelledError`` or cancels its task, only the work ends. A cancellation of the episode cancels the work and
    propagates. ``ContextOverflow``, ``SamplerError`` and ``Ended`` keep their meaning.
    """
    task = asyncio.create_task(_translated(work, who, stop))
    task.add_done_callback(_retrieve)
    try:
        await asyncio.wait({task}, timeout=seconds)  # not wait_for: that waits for a task that ignores its cancellation
        if not task.done():
            raise Ended(stop, f"{who}: no result within {seconds:g} seconds (rollout.limits.turn_seconds)")
        if task.cancelled():
            raise Ended(stop, f"{who}: CancelledError: it cancelled itself")
        return task.result()
    finally:
        task.cancel()


def checked_messages(value: object, place: str) -> tuple[Message, ...]:
    """The messages that a plug-in returned.

    Raises:
        TypeError: it returned something else.
    """
    if not isinstance(value, Sequence):
        raise TypeError(f"{place} returned {_short(value)}, wanted a tuple of messages")
    for message in value:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise TypeError(
                f"{place} returned {_short(message)} among its messages, wanted a Message whose content is text"
            )
        if message.role not in get_args(Role):
            raise TypeError(
                f"{place} returned a message of role {message.role!r}, known roles: {', '.join(get_args(Role))}"
            )
    return tuple(value)


async def _translated(work: Callable[[], Coroutine[object, object, T]], who: str, stop: Stop) -> T:
    """Run the work. Inside the task, since asyncio passes a ``SystemExit`` that leaves one on to the whole process."""
    try:
        return await work()
    except (Ended, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except ContextOverflow as error:
        raise Ended(Stop.CONTEXT_OVERFLOW, str(error)) from error
    except SamplerError as error:  # of a sampler that the plug-in called
        raise Ended(Stop.SAMPLER_ERROR, f"{who}: {type(error).__name__}: {error}") from error
    except BaseException as error:  # the boundary to plug-ins; sys.exit() and a panic of Rust code are no Exception
        raise Ended(stop, f"{who}: {type(error).__name__}: {error}") from error


def _retrieve(task: asyncio.Task[object]) -> None:
    """Retrieve the exception of abandoned work, which asyncio would log as never retrieved."""
    if not task.cancelled():
        task.exception()


def _short(value: object) -> str:
    return f"{value!r:.80}"
