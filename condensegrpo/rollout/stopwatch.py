"""How long condensers are at work while many episodes go on at once. Standard library only."""

import time
from types import TracebackType


class Stopwatch:
    """The seconds during which at least one holder is inside: those of several at a time count once.

        a  ──████████──────         inside from 2 to 10
        b  ──────████████──         inside from 6 to 14
           ══ 12 seconds ══

    Whoever waits inside, such as for a batch that another episode joins, counts as at work: where a condenser's waiting
    overlaps with sampling it is an upper bound of what it costs. To be used from one thread.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0
        self._since = 0.0

    def __enter__(self) -> None:
        """One more is inside."""
        if not self._inside:
            self._since = time.monotonic()
        self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """One fewer is; its time counts whatever it raised."""
        self._inside -= 1
        if not self._inside:
            self.seconds += time.monotonic() - self._since
