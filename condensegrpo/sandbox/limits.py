"""What one call in the sandbox may use. Standard library only: the sandbox's server reads it too."""

import math
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one call may use; past any of them it is ended, or the request for more is refused."""

    seconds: float = 10.0  # wall clock, and as much CPU time in every process
    memory: int = 512 * MIB  # bytes of address space of a process, and of resident memory of all together
    processes: int = 16  # processes and threads together, the first included
    disk: int = 64 * MIB  # bytes in the call's folder
    file: int = 32 * MIB  # bytes of one file
    files: int = 2048  # files and folders in the call's folder
    output: int = 64 * 1024  # bytes kept of stdout, and of stderr; more is read and thrown away

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"a call in the sandbox gets seconds={self.seconds}: wanted a finite number above 0")
        least = {"memory": 64 * MIB, "processes": 1, "disk": 1, "file": 1, "files": 1, "output": 2}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"a call in the sandbox gets {name}={getattr(self, name)}: wanted {value} or more")
