"""The process of a command: its signals, and its standard streams.

Python handles the first Ctrl-C or SIGTERM, and the kernel ends the process at the second. A handler of Python runs when
the main thread next executes Python. That takes as long as the call it is in, and two signals that arrive meanwhile
count as one: under load, or while a reward holds the lock of the interpreter, a second Ctrl-C was lost. The default
action of the kernel needs no thread of this process.

The ranks of a launcher keep their handler of SIGTERM: SLURM sends it to every process of a step, and a torchrun among
them passes its own on to the ranks. A launcher ends a process that does not end in time with SIGKILL.

A standard stream may be closed, lack letters, or take nothing more: a full disk, a lost terminal.
"""

import ctypes
import os
import signal
import sys
from codecs import lookup
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING

from condensegrpo.core.process import run_clean_ups

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KERNEL_ENDS = sys.platform == "linux" and os.getpid() != 1  # for process 1 the default action is to do nothing
PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)
SWEEP = "CONDENSEGRPO_SWEEP"  # variable of the runs of a sweep: its process id
SHOW_CURSOR = b"\x1b[?25h"  # the progress display has hidden it
STREAMS = ("stdout", "stderr")


class StopRequest:
    """The first signal: finish the step and save. The second: exit immediately, as before the first step."""

    def __init__(
        self, doing: Callable[[], str] = lambda: "the step", announce: Callable[[str], bool] = lambda text: False
    ) -> None:
        """Handle both signals.

        Args:
            doing: the work that the run finishes before it saves.
            announce: called in the handler with a notice; returns whether it shows the notice.
        """
        self._doing, self._announce = doing, announce
        self._signal: int | None = None
        self._polled = False
        handle_first(self._handle)

    def requested(self) -> bool:
        """True once a signal has requested a stop."""
        self._polled = True
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code after a requested stop: 143 after SIGTERM, else 130, also if another rank got the signal."""
        return 128 + (self._signal or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number in _repeated():
            return
        if self._signal is not None or not self._polled:  # there is nothing to save yet
            exit_immediately(number, frame)
        self._signal = number
        for each in SIGNALS if KERNEL_ENDS else ():
            if each not in _repeated():
                signal.signal(each, signal.SIG_DFL)
        text = f"finishing {self._doing()}, then saving; press Ctrl-C again to quit now"
        if not self._announce(text):
            _write(f"\n{text}\n".encode())


def exit_immediately(number: int, frame: FrameType | None) -> None:
    """Undo unfinished work and exit; an ordinary exit would wait for the thread of a sampler."""
    _write(b"\ninterrupted\n")
    run_clean_ups()
    os._exit(128 + number)


def handle_first(handler: "signal._HANDLER") -> None:
    """Call ``handler`` at the first SIGINT or SIGTERM; the kernel ends the process at the next of the same kind.

    Process 1 of a container keeps the handler.
    """
    for number in SIGNALS:
        signal.signal(number, handler)
        if KERNEL_ENDS and number not in _repeated():
            libc = ctypes.CDLL(None)
            libc.signal.restype = libc.sysv_signal.restype = ctypes.c_void_p
            libc.signal.argtypes = libc.sysv_signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
            # System V's signal() resets the action when a signal arrives; what is set again is Python's own handler
            libc.sysv_signal(number, libc.signal(number, None))


def end_with_launcher() -> None:
    """Have the kernel end this process with the torchrun, deepspeed or sweep that launched it, however that ends."""
    if {"TORCHELASTIC_RUN_ID", "CROSS_RANK", SWEEP} & os.environ.keys() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = str(os.getppid())
        if os.environ.pop(SWEEP, parent) != parent:  # it ended before this; a process of this one has no sweep
            os._exit(1)


def _repeated() -> frozenset[int]:
    """Signals that this process may get more than once for one request to stop."""
    return frozenset({signal.SIGTERM} if {"RANK", "SLURM_STEP_ID"} & os.environ.keys() else ())


def _write(text: bytes) -> None:
    os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + text)


def open_streams() -> None:
    """Replace closed streams, and letters that a terminal lacks by question marks."""
    for name in STREAMS:
        if (stream := getattr(sys, name)) is None:  # the shell closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open as long as the process
        elif isinstance(stream, TextIOWrapper) and lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def refused_output() -> OSError | None:
    """The error of a standard output that takes nothing more, whose buffer is lost then; None if it works."""
    try:
        os.write(sys.stdout.fileno(), b"\n")  # nothing less than a byte is refused
    except OSError as error:
        _send_nowhere(sys.stdout.fileno())
        return error
    return None


@contextmanager
def outlived_streams(report: Callable[[str], object]) -> Iterator[None]:
    """Let a run outlive its streams: one that takes nothing more is sent nowhere, and that is reported.

    A pipe without a reader still ends the command.
    """
    before = {name: getattr(sys, name) for name in STREAMS}
    for name, stream in before.items():
        if isinstance(stream, TextIOWrapper):
            stream.flush()
            raw = _Outlived(stream.fileno(), name, report)
            setattr(sys, name, TextIOWrapper(BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True))
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)


class _Outlived(FileIO):
    """A descriptor that goes nowhere once a write to it has failed."""

    def __init__(self, descriptor: int, stream: str, report: Callable[[str], object]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._stream, self._report = stream, report

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            _send_nowhere(self.fileno())
            self._report(f"{self._stream} takes nothing more: {error.strerror}")
            return memoryview(data).nbytes


def _send_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
