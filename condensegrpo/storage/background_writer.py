"""Writing files beside a rollout, so that a slow disk delays no turn."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self


class BackgroundWriter:
    """Calls functions that write, in a thread, one after another in the order in which they come.

        with BackgroundWriter() as writer:
            writer.submit(partial(write_trajectory, file, scored))     # returns at once
        # everything is written, also if the block was interrupted

    After one that raises, no other is called: the next ``submit``, or the end of the block, raises what it raised.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()
        if kind is None:
            self._check()

    def submit(self, write: Callable[[], object]) -> None:
        """Call a function later, in its turn."""
        self._check()
        self._thread.submit(self._call, write)

    def _call(self, write: Callable[[], object]) -> None:
        try:
            if self._error is None:
                write()
        except Exception as error:  # passed on to the thread that submits
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
