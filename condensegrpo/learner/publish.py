"""Folders that appear whole or not at all: written aside, synced to the disk, renamed. Standard library, safetensors.

A process killed at any point leaves the old folder or the new one, and at worst a ``*.tmp-*`` beside it.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from condensegrpo.core.errors import CheckpointError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def aside(folder: Path, token: int) -> Path:
    """Where ``folder`` is written before it is published: beside it, so that the rename stays on one disk."""
    return folder.with_name(f"{folder.name}.tmp-{token}")


def is_leftover(path: Path) -> bool:
    """Whether a folder is what an interrupted write left behind."""
    return ".tmp-" in path.name


def clear(folder: Path) -> None:
    """Remove a folder that an earlier process of the same id left; process ids repeat in containers.

    Raises:
        CheckpointError: it cannot be removed.
    """
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(
            f"removing {folder}, which an interrupted process left: {type(error).__name__}: {error}. Remove it by "
            f"hand, then resume."
        ) from error


@contextmanager
def written_aside(temporary: Path) -> Iterator[Path]:
    """Make a folder to write into; if that fails, it goes.

    Several ranks may write into it together, so it is not emptied here: ``clear`` it first, on one rank only.

    Raises:
        CheckpointError: instead of whatever file system, torch and safetensors raise when they cannot write.
    """
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        yield temporary
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_cannot_write(temporary, error)) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish(temporary: Path, folder: Path) -> None:
    """Give a finished folder its name; one that has it already is replaced."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    old = folder.with_name(f"{folder.name}.tmp-old-{os.getpid()}")
    clear(old)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = aside(path, os.getpid())
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(temporary: Path, error: Exception) -> str:
    full = isinstance(error, OSError) and error.errno in FULL
    free = shutil.disk_usage(temporary.parent).free if temporary.parent.is_dir() else 0
    cure = (
        "The disk or quota is full: free some space (fewer train.keep_checkpoints helps) and resume."
        if full
        else "See that the folder can be written and has room, then resume."
    )
    return (
        f"writing {temporary}: {type(error).__name__}: {error}; {free / 1e9:.2f} GB are free there. What was written "
        f"is removed and earlier checkpoints are untouched. {cure}"
    )
