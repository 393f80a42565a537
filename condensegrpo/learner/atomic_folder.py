"""Folders that appear complete or not at all: written under a temporary name, synced to the disk, renamed.

A process killed at any point leaves the old folder or the new one, and at worst a ``*.tmp-*`` next to it: the old one
itself if it was killed between two renames, see ``RunFolder.remove_leftovers``.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from condensegrpo.core.errors import CheckpointError
from condensegrpo.storage.files import DISK_FULL, REPLACED, TEMPORARY

# of a full disk in messages of safetensors, torch.save and copytree, which hide the error of the system
FULL_SIGNS = ("No space left", "File too large", "unexpected pos")


def temporary_name(folder: Path, token: int) -> Path:
    """The path that ``folder`` is written to before it is published: next to it, so that a rename suffices."""
    return folder.with_name(f"{folder.name}{TEMPORARY}{token}")


def remove_leftover(folder: Path) -> None:
    """Remove a folder left by an earlier process with the same id; process ids repeat in containers."""
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(
            f"removing {folder}, which an interrupted process left: {type(error).__name__}: {error}. Remove it by "
            f"hand, then resume."
        ) from error


@contextmanager
def published_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, published as ``folder`` when the block ends, and removed if it fails."""
    temporary = temporary_name(folder, os.getpid())
    remove_leftover(temporary)
    try:
        with write_errors(temporary):
            temporary.mkdir(parents=True)
            yield temporary
            publish(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def write_errors(temporary: Path) -> Iterator[None]:
    """Replace the errors of the file system, torch and safetensors while a folder is written that is then removed."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = getattr(error, "errno", None) in DISK_FULL or any(sign in str(error) for sign in FULL_SIGNS)
        faults = error.args[0] if isinstance(error, shutil.Error) else ()  # of copytree: source, target and why of each
        reason = f"{Path(faults[0][0]).name}: {faults[0][2]}" if faults else f"{type(error).__name__}: {error}"
        free = shutil.disk_usage(temporary.parent).free if temporary.parent.is_dir() else 0
        advice = (
            "The disk or quota is full: free some space (fewer train.keep_checkpoints helps) and resume."
            if full
            else "Make sure that the folder is writable and has space, then resume the run or repeat the command."
        )
        raise CheckpointError(
            f"writing {temporary}: {reason}; {free / 1e9:.2f} GB are free there. The unfinished "
            f"folder was removed; earlier checkpoints are untouched. {advice}"
        ) from error


def publish(temporary: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, replacing a folder of that name."""
    _let_others_read(temporary)
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    old = folder.with_name(f"{folder.name}{REPLACED}{os.getpid()}")
    remove_leftover(old)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _let_others_read(folder: Path) -> None:
    """Give weights the permissions that the umask leaves: safetensors writes them for their owner alone."""
    new = folder / TEMPORARY
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.unlink()
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
