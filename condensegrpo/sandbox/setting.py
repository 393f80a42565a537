"""What the server was told about its rung, and holds for every call. Standard library only."""

from dataclasses import dataclass
from enum import StrEnum


class Rung(StrEnum):
    """How code is kept apart, strongest first."""

    NAMESPACES = "namespaces"  # own users, processes, mounts, network; seccomp; limits
    LANDLOCK = "landlock"  # files by Landlock, the rest by seccomp; one process and its threads
    NONE = "none"  # limits and a clean-up, and nothing that hostile code could not leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A rung as it stands on this machine."""

    rung: Rung
    readable: tuple[str, ...]  # files and folders outside that code may read
    packages: tuple[str, ...]  # folders that are added to sys.path, among the readable ones
    folder: str  # ours outside: the root is built on it, or the calls' folders lie in it
    proc: int = -1  # file descriptor of /proc outside
    nobody: bool = False  # root gives itself up: that user can read Python
