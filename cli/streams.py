"""Standard streams that were closed, that lack letters, or that take nothing more: a full disk, a lost terminal."""

import os
import sys
from codecs import lookup
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STREAMS = ("stdout", "stderr")


def open_streams() -> None:
    """Have both streams, and letters that a terminal lacks become question marks."""
    for name in STREAMS:
        if (stream := getattr(sys, name)) is None:  # the shell closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open as long as the process
        elif isinstance(stream, TextIOWrapper) and lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def refused_output() -> OSError | None:
    """Why the standard output takes nothing more, if that is so; what its buffer holds is lost then."""
    try:
        os.write(sys.stdout.fileno(), b"\n")  # nothing less than a byte is refused
    except OSError as error:
        _send_nowhere(sys.stdout.fileno())
        return error
    return None


@contextmanager
def outlived_streams(report: Callable[[str], object]) -> Iterator[None]:
    """A stream that takes nothing more is sent nowhere, which is reported, and the run goes on.

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
