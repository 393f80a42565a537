"""What the processes of a call use right now, read from /proc. Standard library only."""

import os
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Use(NamedTuple):
    """All processes below one, that one included."""

    tasks: int  # processes and threads
    memory: int  # resident bytes; pages that two processes share count twice
    pids: tuple[int, ...]


def use(pid: int, proc: int) -> Use:
    """What a process and its descendants use; ``proc`` is a file descriptor of /proc. One that is gone uses nothing."""
    tasks = memory = 0
    pids = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            threads = _list(f"{one}/task", proc)
            memory += int(_read(f"{one}/statm", proc).split()[1]) * _PAGE
            for thread in threads:
                waiting += map(int, _read(f"{one}/task/{thread}/children", proc).split())
        except (OSError, IndexError):
            continue  # it ended meanwhile
        tasks += len(threads)
        pids.append(one)
    return Use(tasks, memory, tuple(pids))


def size(folder: str, *, files: int) -> tuple[int, int]:
    """Bytes on disk and entries below a folder; counting ends soon after ``files`` entries."""
    total = entries = 0
    waiting = [folder]
    while waiting and entries <= files:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    entries += 1
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue  # it was removed meanwhile, or its name is too long for a path
    return total, entries


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
