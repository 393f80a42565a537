"""A call in the sandbox: how it is isolated, its limits and its result. Standard library only."""

import math
from dataclasses import dataclass
from enum import StrEnum


class Isolation(StrEnum):
    """How code is confined, strongest first."""

    NAMESPACES = "namespaces"  # own users, processes, mounts and network; seccomp; resource limits
    LANDLOCK = "landlock"  # files by Landlock, space by a budget, the rest by seccomp; one process with threads
    NONE = "none"  # resource limits and clean-up only: hostile code runs with the rights of the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """An isolation backend as set up on this machine."""

    isolation: Isolation
    readable: tuple[str, ...]  # files and folders of the host that code may read
    packages: tuple[str, ...]  # folders added to sys.path, part of the readable ones
    folder: str  # on the host: the root is built on it, or the folders of the calls are created in it
    proc: int = -1  # file descriptor of the host's /proc
    as_nobody: bool = False  # started as root: calls run as the user nobody, who can read Python


MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The resources that one call may use. A call above a limit is killed, or its request for more is refused."""

    seconds: float = 10.0
    """Seconds of wall clock, and of CPU time in each process; above 0."""
    memory_mib: int = 512
    """MiB of address space of a process, and of resident memory of all processes of a call together; at least 64."""
    processes: int = 16
    """Processes and threads of a call, the first process included; under landlock threads only. At least 1."""
    disk_mib: int = 64
    """MiB in the folder of a call, under landlock MiB that it writes; a single file may take half of it. At least 1."""
    files: int = 2048
    """Files and folders in the folder of a call, under landlock those that it makes or renames; at least 1."""
    output_bytes: int = 65536
    """Bytes kept of stdout and of stderr each, half from the beginning and half from the end; at least 2."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(
                f"limiting a call in the sandbox: found seconds={self.seconds}, wanted a finite number above 0"
            )
        minimum = {"memory_mib": 64, "processes": 1, "disk_mib": 1, "files": 1, "output_bytes": 2}
        for name, value in minimum.items():
            if getattr(self, name) < value:
                raise ValueError(
                    f"limiting a call in the sandbox: found {name}={getattr(self, name)}, wanted at least {value}"
                )

    @property
    def memory_bytes(self) -> int:
        """``memory_mib`` in bytes."""
        return self.memory_mib * MIB

    @property
    def disk_bytes(self) -> int:
        """``disk_mib`` in bytes."""
        return self.disk_mib * MIB


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
