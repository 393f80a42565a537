"""The tool ``read_file``: text files of one folder, and nothing outside of it."""

import os
import stat
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from condensegrpo.core.process import temporary_folder

MAX_BYTES = 64_000  # of a file that are read


@dataclass(eq=False, kw_only=True)
class ReadFile:
    """Reads a text file of a folder. Links that lead out of the folder are not followed."""

    folder: str | None = None  # must not contain ground truth; None: a new empty folder, removed at exit
    max_bytes: Annotated[int, Ge(1)] = MAX_BYTES  # read from a file; longer files are cut, with a note

    def __post_init__(self) -> None:
        folder: str | Path | None = self.folder
        if folder is None:
            made = ExitStack()
            folder = made.enter_context(temporary_folder("files"))
            weakref.finalize(self, made.close)
        self._folder = Path(folder).expanduser().resolve()
        if not self._folder.is_dir():
            raise ValueError(f"folder={folder!r}: there is no such folder (looked for {self._folder})")

    def __call__(self, path: str) -> str:
        """Reads a text file and returns what it holds.

        Args:
            path: The file, relative to the working folder, such as "notes/plan.txt".

        Returns:
            The text of the file.
        """
        if "\0" in path:
            raise ValueError("a path holds no NUL character")
        file = (self._folder / path).resolve()
        if not file.is_relative_to(self._folder):
            raise ValueError(f"{path!r} is outside of the working folder")
        if not file.is_file():
            known = ", ".join(sorted(entry.name for entry in self._folder.iterdir())[:20])
            raise ValueError(f"there is no file {path!r}; the working folder holds: {known or 'nothing'}")
        # resolved above; do not follow a link or wait for a pipe that was created since
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise ValueError(f"{file.name!r} is no regular file")
            data = opened.read(self.max_bytes + 1)
        text = data[: self.max_bytes].decode("utf-8", "replace")
        return text if len(data) <= self.max_bytes else f"{text}\n[… only the first {self.max_bytes} bytes are shown …]"
