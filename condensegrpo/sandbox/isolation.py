"""The isolation backends, and the one that a server uses for every call. Standard library only."""

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
