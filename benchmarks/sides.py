"""Processes that load once and then run on request: those that are compared take turns.

    parent ─ (given,) ─▶ side: runs once ─▶ result ─▶ parent            None ends it

All sides live at the same time, so that whatever disturbs the machine disturbs all, and each has memory of its own.
"""

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal

Run = Callable[[Any], Any]
ENDING = 10.0  # seconds that a process has for its end


class Side:
    """The parent's end of a process that runs one side."""

    def __init__(self, start: Callable[[], Run], method: Literal["fork", "spawn"] = "spawn") -> None:
        """``start`` loads the side, at its first run. A fork is there at once; CUDA does not survive one."""
        context = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, start), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, given: object = None) -> Any:  # noqa: ANN401  what the side's function returns
        """One run.

        Raises:
            RuntimeError: it failed, or the process ended.
        """
        self._pipe.send((given,))
        try:
            received = self._pipe.recv()
        except EOFError as error:
            self._process.join()
            raise RuntimeError(
                f"running a side of the benchmark: its process ended with exit code {self._process.exitcode}. What it "
                f"printed says why; -9 is a lack of memory: leave that side out, or compute less at a time."
            ) from error
        if isinstance(received, Exception):
            raise RuntimeError(f"a side of the benchmark failed: {received}") from received
        return received

    def close(self) -> None:
        """End the process, also one that has ended or is still computing."""
        with suppress(OSError):  # it has ended
            self._pipe.send(None)  # a closed pipe would not do: sides forked later hold its end as well
        self._process.join(ENDING)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, start: Callable[[], Run]) -> None:
    run: Run | None = None
    with suppress(EOFError):  # the parent is gone
        while (message := pipe.recv()) is not None:
            try:
                run = run or start()
                pipe.send(run(*message))
            except Exception as error:  # the boundary to the other process
                pipe.send(error)
