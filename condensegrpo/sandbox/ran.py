"""What came of a call. Standard library only."""

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a call ended. It says nothing of whether the code is right: the code itself chooses how it exits."""

    FINISHED = "finished"  # exit status 0
    FAILED = "failed"  # an exception that nobody caught, or another exit status
    KILLED = "killed"  # by a signal of its own making, such as a segmentation fault
    TIMEOUT = "timeout"  # the wall clock or the CPU limit
    MEMORY = "memory"  # all its processes together held more than the limit
    PROCESSES = "processes"  # more processes and threads than the limit
    DISK = "disk"  # more bytes or files in its folder than the limit
    CANCELLED = "cancelled"  # whoever asked is not interested any more
    LOST = "lost"  # the sandbox itself failed; ``Ran.detail`` says how


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One call that ended."""

    outcome: Outcome
    stdout: str = ""  # head and tail, a mark between them where some was left out; control characters written \x1b
    stderr: str = ""  # likewise
    status: int | None = None  # exit status; None where it was killed
    signal: int | None = None  # that ended it; None where it exited
    seconds: float = 0.0  # wall clock
    cpu_seconds: float = 0.0  # of all its processes that were waited for
    detail: str = ""  # of an outcome that needs words
    records: tuple[str, ...] = ()  # what the judge of a grading wrote, line by line; else ()
