"""The current resource usage of the processes of a call, read from /proc. Standard library only."""

import os
from contextlib import suppress
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """The usage of all descendants of a process."""

    tasks: int  # processes and threads
    memory: int  # resident bytes; pages shared by two processes count twice
    pids: tuple[int, ...]


def of_descendants(pid: int, proc: int) -> Usage:
    """The usage of all descendants of a process with one thread. ``proc`` is a file descriptor of /proc."""
    tasks = memory = 0
    pids = []
    waiting = [*map(int, _read(f"{pid}/task/{pid}/children", proc).split())]
    while waiting:
        current = waiting.pop()
        try:
            threads = _list(f"{current}/task", proc)
        except OSError:
            continue  # it has ended
        resident = 0  # every thread shows the pages of its process, except for one that has ended
        for thread in threads:
            with suppress(OSError, IndexError):  # this thread has ended, the others count
                waiting += map(int, _read(f"{current}/task/{thread}/children", proc).split())
                resident = max(resident, int(_read(f"{current}/task/{thread}/statm", proc).split()[1]))
        memory += resident * _PAGE
        tasks += len(threads)
        pids.append(current)
    return Usage(tasks, memory, tuple(pids))


def folder_exceeds(folder: str, *, disk_bytes: int, files: int) -> bool:
    """Whether a folder holds more bytes or entries than allowed, or more than can be counted."""
    total = entries = 0
    try:
        for _, folders, names, descriptor in os.fwalk(folder, onerror=_refuse):
            for name in (*folders, *names):
                with suppress(FileNotFoundError):  # removed meanwhile
                    total += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
                entries += 1
            if total > disk_bytes or entries > files:
                return True
    except FileNotFoundError:
        pass  # the code removed its own folder
    except (OSError, RecursionError):  # unreadable, or very deep
        return True
    return False


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _read(path: str, proc: int) -> str:
    file = os.open(path, os.O_RDONLY, dir_fd=proc)
    try:
        return os.read(file, 1 << 16).decode("ascii", "replace")
    finally:
        os.close(file)


def _list(path: str, proc: int) -> list[str]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        return os.listdir(folder)
    finally:
        os.close(folder)
