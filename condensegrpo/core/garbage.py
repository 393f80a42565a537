"""How often Python looks for garbage. Standard library only."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

THRESHOLDS = (20_000, 50, 100)  # objects more than were freed, then collections of the younger objects


class _Blocks:
    """The blocks that are running, in any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running = 0
        self._usual = gc.get_threshold()

    def begin(self) -> None:
        """The first sets the thresholds."""
        with self._lock:
            self._running += 1
            if self._running == 1:
                self._usual = gc.get_threshold()
                if self._usual[0]:  # 0: it never looks
                    gc.set_threshold(*map(max, THRESHOLDS, self._usual))

    def end(self) -> None:
        """The last sets them back."""
        with self._lock:
            self._running -= 1
            if not self._running:
                gc.set_threshold(*self._usual)


_BLOCKS = _Blocks()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for garbage less often in a block whose objects mostly stay, such as the turns of many trajectories.

    Python looks at all objects again whenever they are a quarter more: with 2,000 trajectories a third of the time of
    a rollout. A collector that is disabled, or set to be rarer still, stays so.
    """
    _BLOCKS.begin()
    try:
        yield
    finally:
        _BLOCKS.end()
