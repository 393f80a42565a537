"""Folders of servers and calls on the host: made, removed, and found again after a crash. Standard library only."""

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "condensegrpo-code-"  # not that of versions without a lock, whose folders may be in use


def make() -> tuple[str, int]:
    """A new folder, and a file descriptor with a lock on it: a process with the descriptor uses the folder."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        with suppress(FileNotFoundError):  # taken for a leftover before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks: nothing in it is taken for a leftover either
                fcntl.flock(lock, fcntl.LOCK_SH)
            if Path(folder).exists():
                return folder, lock
            os.close(lock)


def remove_leftovers() -> None:
    """Remove this user's folders and files that no process holds a lock on: all their processes were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, or another user's
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(str(path))
            finally:
                os.close(lock)


def remove(path: str) -> None:
    """Remove a file, or a folder of any depth and any permissions below it, that no other process changes.

    Folders are moved up before they are entered: two file descriptors suffice, and no path grows too long.
    """
    if not os.path.isdir(path) or os.path.islink(path):
        os.unlink(path)
        return
    top, moved = _open(path), 0
    unused = os.urandom(8).hex()  # the beginning of names that no code could know
    try:
        while folders := _without_files(top):
            for name in folders:
                inner = _open(name, top)
                for deeper in _without_files(inner):
                    os.chmod(deeper, 0o700, dir_fd=inner)  # only then it can be moved
                    moved += 1
                    os.rename(deeper, f"{unused}{moved}", src_dir_fd=inner, dst_dir_fd=top)
                os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _open(name: str, inside: int | None = None) -> int:
    os.chmod(name, 0o700, dir_fd=inside)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)


def _without_files(folder: int) -> list[str]:
    """Remove the files of a folder; the names of the folders in it."""
    with os.scandir(folder) as content:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in content]
    for name, is_folder in entries:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in entries if is_folder]
