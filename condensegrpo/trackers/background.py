"""The thread in which a tracker is called, so that a slow or failing one costs records and not the run.

training ──log──▶ queue ──▶ thread: start, log, log_table, close ──▶ tracker
         ◀─── messages: where the tracker's run is, the first failure ───┘
"""

from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue

from condensegrpo.core.credentials import redacted
from condensegrpo.core.defaults import overrides, with_defaults
from condensegrpo.core.failures import message_of
from condensegrpo.core.protocols.tracker import RunStart, StartedRun, Table, Tracker
from condensegrpo.core.threads import DaemonThread
from condensegrpo.core.wording import plural

Call = Callable[[], None]


class BackgroundTracker:
    """Calls a tracker in a thread of its own, in order. Its methods return at once and raise nothing."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        """Start the thread of a tracker, named as in the configuration."""
        self._name, self._tracker = name, with_defaults(tracker, Tracker)
        self._messages: SimpleQueue[str] = SimpleQueue()
        self._refused = False  # its run could not be opened: nothing else is tried
        self._failed = 0  # calls, counted in the tracker's thread
        self._total = 0  # calls, counted in the thread that trains
        self._thread = DaemonThread(f"tracker {name}")

    def start(self, run: RunStart, remember: Callable[[StartedRun], None]) -> None:
        """Open the tracker's run.

        Args:
            remember: keeps the identity; called in the tracker's thread.
        """

        def call() -> None:
            self._refused = True
            started = self._tracker.start(run)
            self._refused = False
            if started is not None:
                self._messages.put(f"tracker {self._name}: {redacted(started.location)}")
                remember(started)

        if overrides(self._tracker, Tracker.start):
            self._put(call)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        own = dict(metrics)  # the tracker may change it
        self._put(lambda: self._tracker.log(step, own))

    def log_table(self, step: int, name: str, make: Callable[[], Table]) -> None:
        """Record a table, which is made in the tracker's thread."""
        if overrides(self._tracker, Tracker.log_table):
            self._put(lambda: self._tracker.log_table(step, name, make()))

    def messages(self) -> list[str]:
        """What happened since the last call, for the log."""
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def end(self) -> None:
        """Close the tracker once everything that waits is recorded; ``wait`` waits for it."""
        self._thread.submit(partial(self._try, lambda: self._tracker.close()))
        self._thread.close()

    def wait(self, seconds: float) -> str:
        """Wait for the end at most so long; returns what was lost, or nothing."""
        unfinished = not self._thread.join(max(0.0, seconds))
        # of the calls that did not end, the one under way is a record too, and the closing that waits is none
        lost = self._failed + (self._thread.waiting if unfinished else 0)
        if not lost and not unfinished:
            return ""
        end = " and did not end in time" if unfinished else ""
        return f"tracker {self._name} lost {lost} of {plural(self._total, 'record')}{end}"

    def _put(self, call: Call) -> None:
        self._total += 1
        self._thread.submit(partial(self._record, call))

    def _record(self, call: Call) -> None:
        if self._refused:
            self._failed += 1
        else:
            self._try(call)

    def _try(self, call: Call) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # the boundary to a tracker
            self._failed += 1
            if self._failed == 1:
                reason = redacted(message_of(error)).removesuffix(".")
                self._messages.put(f"tracker {self._name}: {reason}. Training goes on without it")
