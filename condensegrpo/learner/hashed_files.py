"""The files that one rank writes into a folder: hashed on their way to the disk, and synced."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

import torch

from condensegrpo.learner.atomic_folder import sync

Bytes = bytes | memoryview


class Digest(NamedTuple):
    """What identifies the content of a file."""

    size: int  # bytes
    sha256: str  # hexadecimal


class InMemory:
    """The file that ``torch.save`` would write, in main memory: later changes of its tensors do not change it."""

    def __init__(self, value: object) -> None:
        """Serialise the value now."""
        self.chunks: list[bytes] = []  # not one buffer, which would be copied whenever it grows
        torch.save(value, cast("IO[bytes]", self))

    def write(self, data: Bytes) -> int:
        """Append to the file."""
        self.chunks.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""


class _Hashing:
    """A file that is hashed while it is written. It has no descriptor: torch would write to that directly."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.sha = file, 0, hashlib.sha256()

    def write(self, data: Bytes) -> int:
        self.sha.update(data)
        self.size += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Left to the file's end."""


class HashedFiles:
    """The files of a folder that this rank wrote, with their digests by path in it."""

    def __init__(self, folder: Path) -> None:
        """Write into an existing folder, which others may write into as well."""
        self.folder = folder
        self.digests: dict[str, Digest] = {}

    def save(self, name: str, value: object) -> None:
        """Write a file as ``torch.save`` does."""
        with self._opened(name) as file:
            if isinstance(value, InMemory):
                for chunk in value.chunks:
                    file.write(chunk)
            else:
                torch.save(value, cast("IO[bytes]", file))

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        with self._opened(name) as file:
            file.write(text.encode())

    def adopt(self, folder: Path) -> None:
        """Move all files from a folder of this rank alone, read once for their digests just after they were written."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            self.digests[name] = Digest(path.stat().st_size, sha256_of(path))
            sync(path)
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            path.rename(self.folder / name)

    @contextmanager
    def _opened(self, name: str) -> Iterator[_Hashing]:
        with (self.folder / name).open("wb") as file:
            hashing = _Hashing(file)
            yield hashing
        sync(self.folder / name)
        self.digests[name] = Digest(hashing.size, hashing.sha.hexdigest())


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
