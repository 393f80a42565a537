"""The line between the engine and what others wrote: past it, an exception or a hang ends one episode only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from condensegrpo.errors import ContextOverflow
from condensegrpo.trajectory import Stop


class Ended(Exception):
    """The episode is over: no error, but the way out from wherever it fails. Never leaves ``run_episode``."""

    def __init__(self, stop: Stop, detail: str) -> None:
        super().__init__(detail)
        self.stop = stop
        self.detail = detail


@asynccontextmanager
async def boundary(who: str, stop: Stop, seconds: float | None = None) -> AsyncIterator[None]:
    """Run a plug-in's code: whatever it raises, and taking longer than ``seconds``, becomes ``Ended`` with its name.

    A cancellation passes through, and so does an ``Ended`` from a boundary further in. ``ContextOverflow`` keeps its
    meaning, whoever raises it.
    """
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except Ended:
        raise
    except ContextOverflow as error:
        raise Ended(Stop.CONTEXT_OVERFLOW, str(error)) from error
    except Exception as error:  # the boundary to plug-ins: a failed rollout is data, not a crash
        if isinstance(error, TimeoutError) and deadline.expired():
            raise Ended(stop, f"{who}: nothing came back within {seconds:g} seconds (rollout.turn_seconds)") from error
        raise Ended(stop, f"{who}: {type(error).__name__}: {error}") from error
