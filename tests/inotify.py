"""What is written below a folder, as the kernel reports it: `from inotify import Writes`. Linux only."""

import ctypes
import os
import select
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_CREATE, _MODIFY, _MOVED_TO, _IS_DIR = 0x100, 0x2, 0x80, 0x40000000
_HEADER = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_libc = ctypes.CDLL(None, use_errno=True)


class Writes:
    """Watches a folder and every folder that appears below it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watched: dict[int, Path] = {}
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")

    def __enter__(self) -> "Writes":
        list(self._watch(self._folder))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)

    def read(self, seconds: float) -> list[str]:
        """The paths, relative to the folder, that were created or written; empty if none was within these seconds."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return []
        return [path.relative_to(self._folder).as_posix() for path in self._events(os.read(self._descriptor, 65536))]

    def _events(self, data: bytes) -> Iterator[Path]:
        while data:
            watch, mask, _, length = _HEADER.unpack_from(data)
            name = data[_HEADER.size : _HEADER.size + length].rstrip(b"\0").decode()
            data = data[_HEADER.size + length :]
            path = self._watched.get(watch, self._folder) / name
            yield path
            if mask & _IS_DIR and path.is_dir():
                yield from self._watch(path)

    def _watch(self, folder: Path) -> Iterator[Path]:
        """Watch a folder; yields what is below it already."""
        watch = _libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _CREATE | _MODIFY | _MOVED_TO)
        if watch < 0:
            return  # it was renamed or removed meanwhile
        self._watched[watch] = folder
        for path in folder.iterdir() if folder.is_dir() else ():
            yield path
            if path.is_dir():
                yield from self._watch(path)
