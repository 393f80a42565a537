"""Folders of servers and calls on the host: made, removed, and found again after a crash. Standard library only."""

import fcntl
import os
import subprocess
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
    """Remove a file, or a folder of any depth and any permissions below it, that no other process changes."""
    with suppress(OSError):  # most calls leave an empty folder
        os.rmdir(path)
        return
    for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):  # shutil.rmtree recurses, and enters no locked folder
        done = subprocess.run([*command, "--", path], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            raise OSError(f"removing {path}: {done.stderr.decode(errors='replace').strip()}")
