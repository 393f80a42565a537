"""Files that stay readable whatever interrupts the writer: whole lines appended, whole files replaced.

A process killed while it appends leaves at most a cut-off last line: readers skip it, and the next append removes it.
Standard library only.
"""

import errno
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from condensegrpo.core.errors import DataError, RunError

TEMPORARY = ".tmp-"  # in the name of what is being written, or was when a process was killed
REPLACED = f"{TEMPORARY}old-"  # in the name of a folder that stands aside while another takes its place
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HEAD = 64  # bytes that tell
BLOCK = 1 << 16  # bytes that are read at a time


def user_cache() -> Path:
    """The folder of this package in the user's cache, or among temporary files without a home; it may not exist."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # a container's user
        cache = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return cache / "condensegrpo"


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Let torch keep what it compiles in the user's cache; /tmp, its default, may be empty at the next start.

    Call it before ``torch._dynamo`` is imported, which sets the default. It stays where no such folder can be made.
    """
    with suppress(RunError):
        folder = user_cache() / "inductor"
        make_folder(folder)
        if os.access(folder, os.W_OK):
            environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def append_line(path: Path, line: str) -> None:
    """Append one line and hand it to the system at once.

    A cut-off line before it is removed, and so is this line if it cannot be written whole.
    """
    with writing(path), open_here(path, "ab+", buffering=0) as file:
        end = _end_of_last_line(file.fileno())
        if end < os.fstat(file.fileno()).st_size:
            file.truncate(end)
        try:
            _write_all(file.fileno(), f"{line}\n".encode())
        except OSError:
            with suppress(OSError):  # not every file can be truncated; report the first error
                file.truncate(end)
            raise


def open_here(path: Path, mode: str, **options: Any) -> IO[Any]:  # noqa: ANN401  of ``open``
    """Open a file of a run folder as ``open`` does; OSError if it is a symbolic link, which may lead anywhere."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, opener=opener, **options)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless it exists."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file so that readers, also after a crash, see either the old content or the new."""
    # machines that share the folder may have processes of one number
    temporary = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    with writing(path):
        try:
            with temporary.open("wb", buffering=0) as file:
                _write_all(file.fileno(), content.encode() if isinstance(content, str) else content)
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise


def read_lines(path: Path) -> list[Any]:
    """The JSON values of the lines of a file, without a last line that is cut off."""
    try:
        *complete, tail = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"reading {path}: {error.strerror}.") from error
    values = []
    for number, line in enumerate(complete, 1):
        try:
            values.append(json.loads(line))
        except ValueError as error:  # also bytes that are not text
            raise DataError(f"reading {path}, line {number}: not a line of JSON ({error}). Remove the line.") from error
    with suppress(ValueError):
        values.append(json.loads(tail))
    return values


def read_object(path: Path, kind: type = object) -> dict[str, Any]:
    """The JSON object in a file, with values of one kind; empty if there is no file."""
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"reading {path}: it is damaged ({error}). Remove it: the next start writes it.") from error
    if not isinstance(found, dict) or not all(isinstance(value, kind) for value in found.values()):
        raise DataError(f"reading {path}: it is damaged ({found!r:.60}). Remove it: the next start writes it.")
    return found


@contextmanager
def shared_lock(path: Path) -> Iterator[None]:
    """Show other processes that this one uses an existing file; see ``is_locked``. Raises ``OSError``: no such file.

    A program that replaces this process keeps the lock. On a file system without locks nothing shows it.
    """
    with path.open("rb") as file:
        os.set_inheritable(file.fileno(), True)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_locked(path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Whether a process holds a lock of a file that excludes one of this kind: any lock, or with LOCK_SH its own."""
    exclusive = kind == fcntl.LOCK_EX and os.access(path, os.W_OK)
    try:
        with path.open("rb+" if exclusive else "rb") as file:  # NFS takes no LOCK_EX of a file that is open for reading
            fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        pass
    return False


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes a file or folder: an error of the system becomes a ``RunError`` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise RunError(
                f"writing {path}: {error.strerror}. Free some space (or raise the quota), then go on with "
                f"`condensegrpo train --resume RUN`; what was written before is whole."
            ) from error
        if error.errno == errno.ELOOP:
            raise RunError(
                f"writing {error.filename}: it is a symbolic link, which is not followed. Remove it."
            ) from error
        raise RunError(f"writing {path}: {error.strerror}. Check the folder and its permissions.") from error


def _end_of_last_line(descriptor: int) -> int:
    """Where the last complete line of a file ends, in bytes."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - BLOCK)
        if newline := os.pread(descriptor, end - start, start).rfind(b"\n") + 1:
            return start + newline
        end = start
    return 0


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; the system may take fewer at a time when the disk is nearly full."""
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]


def placeholder_in(path: Path) -> str | None:
    """What a file holds instead of data, and what to do, as the end of a sentence; None: nothing of that kind.

    b"version https://git-lfs.github.com/spec/v1"  ─▶  "it is a Git LFS pointer, not the data. Fetch it with: …"
    """
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the data. Fetch it with: git lfs pull"
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "it is a web page, not data. The download went wrong: fetch the raw file"
    return None
