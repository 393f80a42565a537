"""The result of a call. Standard library only."""

from dataclasses import dataclass
from enum import StrEnum


class CallOutcome(StrEnum):
    """How a call ended. It does not say whether the code is right: the code itself chooses how it exits."""

    FINISHED = "finished"  # exit status 0
    FAILED = "failed"  # an uncaught exception, or another exit status
    KILLED = "killed"  # by a signal that the code caused, such as a segmentation fault
    TIMEOUT = "timeout"  # the wall clock or CPU limit
    MEMORY = "memory"  # all its processes together used more than the limit
    PROCESSES = "processes"  # more processes and threads than the limit
    DISK = "disk"  # more bytes or files in its folder than the limit
    CANCELLED = "cancelled"  # by the caller
    LOST = "lost"  # the sandbox itself failed; ``CallResult.detail`` says how


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The result of one call."""

    outcome: CallOutcome
    stdout: str = ""  # first and last part, with a mark between them if shortened; control characters written as \x1b
    stderr: str = ""  # likewise
    status: int | None = None  # exit status; None if it was killed
    signal: int | None = None  # the signal that killed it; None if it exited
    seconds: float = 0.0  # wall clock
    cpu_seconds: float = 0.0  # of all its processes that were waited for
    detail: str = ""  # explains the outcome where the name is not enough
    records: tuple[str, ...] = ()  # lines written by the judge; empty for other calls
