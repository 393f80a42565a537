"""Questions about pictures: the task ``jsonl`` with a column of pictures, as paths, base64 or data URIs.

{"question": "What does the chart say?", "pictures": "charts/7.png", "answer": "12"}
{"question": "Is <image> left of <image>?", "pictures": ["a.jpg", "data:image/png;base64,iVBOR…"], "answer": "no"}
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from condensegrpo.core.errors import DataError, DataMissing
from condensegrpo.core.messages import Part, TextPart
from condensegrpo.core.protocols.task import Problem
from condensegrpo.storage.rows import Row, check_rows
from condensegrpo.tasks.answers import row_identity
from condensegrpo.tasks.jsonl import Jsonl
from condensegrpo.vision.image_files import from_base64, part_of_file

MARK = "<image>"


@dataclass(kw_only=True, eq=False)
class VisionJsonl(Jsonl):
    """Questions about pictures, as ``jsonl``: those of a row come before its question, or where it has ``<image>``."""

    pictures: str = "pictures"  # column of one picture or a list: paths beside the data file, base64, data URIs

    def _read(self, rows: Sequence[Row], split: str, source: str, answer: str | None) -> tuple[Problem, ...]:
        check_rows(rows, (self.pictures,), source=source)
        folder = Path(source).expanduser()
        folder = folder if folder.is_dir() else folder.parent
        problems = []
        for number, problem in enumerate(super()._read(rows, split, source, answer), start=1):
            value = problem.data[self.pictures]
            given = value if isinstance(value, list) else [value]
            marks = problem.question.count(MARK)
            if not given or marks not in (0, len(given)):
                raise DataError(
                    f"reading the dataset {source}: row {number} has {len(given)} pictures and {marks} times {MARK} in "
                    f"its question. Wanted at least one picture, and no mark or one for each"
                )
            located = [_located(picture, folder, f"reading the dataset {source}: row {number}") for picture in given]
            problems.append(replace(problem, data={**problem.data, self.pictures: located}))
        return tuple(problems)

    def _identity(self, problem: Problem) -> str:
        """The row, with what its pictures show in place of their names."""
        doing = f"reading the pictures of problem {problem.id}"
        digests = [hashlib.sha256(_bytes(value, doing)).hexdigest() for value in problem.data[self.pictures]]
        return row_identity({**problem.data, self.pictures: digests})

    def _question(self, problem: Problem) -> tuple[Part, ...]:
        """The question with its pictures where it has marks, or before it."""
        doing = f"reading the pictures of problem {problem.id}"
        shown = [
            part_of_file(_bytes(value, doing), f"{doing}: {value}" if isinstance(value, Path) else f"{doing}:")
            for value in problem.data[self.pictures]
        ]
        if MARK not in problem.question:
            return (*shown, TextPart(text=f"\n{problem.question}"))
        first, *others = problem.question.split(MARK)
        parts: list[Part] = [TextPart(text=first)] if first else []
        for part, text in zip(shown, others, strict=True):
            parts += [part, TextPart(text=text)] if text else [part]
        return tuple(parts)


def _located(value: object, folder: Path, doing: str) -> bytes | Path:
    """The bytes of a picture that a row holds, or the file that it names."""
    if isinstance(value, Mapping):  # as the library datasets gives pictures
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise DataError(f"{doing} has the picture {value!r:.80}, wanted a path, base64 or a data URI")
    if value.startswith("data:"):
        return from_base64(value, doing)
    file = folder / Path(value).expanduser() if len(value) < 4096 else folder
    if os.path.isfile(file):  # that of Path raises where a part of the path is too long for a name, as in base64
        return file
    if len(value) > 64 and "." not in value:
        return from_base64(value, doing)
    raise DataMissing(f"{doing} names the picture {value!r:.80}: there is no such file (looked for {file})")


def _bytes(value: bytes | Path, doing: str) -> bytes:
    try:
        return value.read_bytes() if isinstance(value, Path) else value
    except OSError as error:
        raise DataError(f"{doing}: {error.filename}: {error.strerror}") from error
