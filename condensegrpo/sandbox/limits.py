"""The limits of one call in the sandbox. Standard library only: the sandbox's processes read it too."""

import math
from dataclasses import dataclass

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
