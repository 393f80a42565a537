"""How long condensers are at work while many episodes go on at once. Standard library only."""

import time


class Stopwatch:
    """The seconds during which at least one holder is inside: those of several at a time count once.

        a  ──████████──────         inside from 2 to 10
        b  ──────████████──         inside from 6 to 14
           ══ 12 seconds ══

    Waiting inside, such as for a batch that another episode joins, counts as work: where a condenser's wait overlaps
    with sampling, the result is an upper bound of the condenser's cost. Use it from one thread.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if not self._inside:
            self._since = time.monotonic()
        self._inside += 1

    def __exit__(self, *exception: object) -> None:
        self._inside -= 1
        if not self._inside:
            self.seconds += time.monotonic() - self._since
