"""Reads the rows of a dataset: a local JSONL or Parquet file, a folder of them, or a Hub id.

Every error names the file and the line, what was found and what to do.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from condensegrpo.core.errors import DataError, DataMissing
from condensegrpo.storage.files import placeholder_in
from condensegrpo.storage.hub import hub_fault

Row = dict[str, Any]

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".json")
_PARQUET = (".parquet",)


def read_rows(source: str, *, split: str, limit: int | None = None) -> list[Row]:
    """The rows of a source, in order.

    Args:
        source: a file (``.jsonl``, ``.jsonl.gz``, ``.parquet``), a folder of them or of a dataset that was saved to
            disk, or a Hub id: ``owner/name`` or ``owner/name:configuration``. What looks like a path is never asked of
            the Hub.
        split: of several of a dataset; of a folder, the files whose names begin with it. A single file is one split.
        limit: rows to give, from the first; None: all.
    """
    path = Path(os.path.expanduser(source))  # that of Path fails for a user who is not known
    if path.is_file():
        rows = read_file(path)
    elif any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):  # of ``save_to_disk``
        rows = _from_disk(path, split)
    elif path.is_dir():
        rows = [row for file in _files_of(path, split) for row in read_file(file)]
    elif source.startswith((".", "/", "~")) or "\\" in source or source.count("/") > 1 or _kind(path):
        raise DataMissing(
            f"reading the dataset {source}: there is no such file or folder (looked for {path.resolve()}). "
            f"Correct the path; a Hub dataset is written owner/name"
        )
    else:
        rows = _from_hub(source, split)
    if not rows:
        raise DataError(f"reading the dataset {source}: it is empty, wanted at least one row")
    return rows[:limit]


def check_rows(
    rows: Sequence[Row],
    columns: Sequence[str],
    *,
    source: str,
    texts: Sequence[str] = (),
    unique: str | None = None,
) -> None:
    """Raise DataError for the first row that does not fit.

    Args:
        columns: every row has them.
        texts: of the columns, those with a text in every row, and not only white space.
        unique: the column whose values differ; None: none.
    """
    for at, row in enumerate(rows):
        for column in columns:
            if column not in row:
                raise DataError(
                    f"reading the dataset {source}: row {at + 1} has no column {column!r}. It has: "
                    f"{', '.join(map(repr, row)) or 'none'}. Map the columns in task.options"
                )
    for column, (at, row) in product(texts, enumerate(rows)):
        if not isinstance(row[column], str) or not row[column].strip():
            raise DataError(
                f"reading the dataset {source}: row {at + 1} has the {column} {row[column]!r:.80}, wanted a text. "
                f"Correct the row or remove it"
            )
    if unique is None:
        return
    first: dict[str, int] = {}
    for at, row in enumerate(rows):
        if (before := first.setdefault(value := str(row[unique]), at)) != at:
            raise DataError(
                f"reading the dataset {source}: rows {before + 1} and {at + 1} have the same {unique} {value!r}. "
                f"An id names one problem: remove one of them or map another column as the id"
            )


def _kind(path: Path) -> str:
    name = path.name.lower()
    if name.endswith(_JSONL):
        return "jsonl"
    return "parquet" if name.endswith(_PARQUET) else ""


def _files_of(folder: Path, split: str) -> list[Path]:
    known = sorted(file for file in folder.iterdir() if file.is_file() and _kind(file))
    files = [file for file in known if file.name.startswith(split)]
    if not files:
        raise DataError(
            f"reading the {split} rows of the folder {folder}: no JSONL or Parquet file in it has a name that begins "
            f"with {split!r}. Found: {', '.join(file.name for file in known) or 'none'}. Give the file itself"
        )
    return files


def read_file(path: Path) -> list[Row]:
    """The rows of one JSONL or Parquet file."""
    try:
        instead = placeholder_in(path)
        if instead is not None:
            raise DataError(f"reading {path}: {instead}")
        if _kind(path) == "parquet":
            return [*map(_with_nulls, _read_parquet(path))]
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"reading {path}: {error}. Is the file whole and readable?") from error
    return [*map(_with_nulls, _parse_lines(path, data))]


def _with_nulls(value: Any) -> Any:  # noqa: ANN401  any value of JSON
    """A row in which NaN is null: pandas has it for a missing value, and writes it into JSON too."""
    if isinstance(value, dict):
        return {name: _with_nulls(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_with_nulls, value)]
    return value if value == value else None


def _parse_lines(path: Path, data: bytes) -> Iterator[Row]:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"reading {path}, line {number}: byte {error.start + 1} of it is not UTF-8. Convert the file to "
                f"UTF-8 or, if it is not text, to Parquet or JSONL"
            ) from error
        except json.JSONDecodeError as error:
            # a complete last line ends in a line break
            fault = "the last line is cut off" if number == len(lines) else "it is not JSON"
            raise DataError(
                f"reading {path}, line {number}: {fault} ({error.msg} at character {error.pos + 1}). "
                f"Wanted one JSON object a line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"reading {path}, line {number}: found a {type(row).__name__}, wanted one JSON object a line"
            )
        yield row


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow  # here: a run on JSONL need not wait for it
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"reading {path}: it is not a whole Parquet file: {error}") from error
    return rows


def _from_disk(folder: Path, split: str) -> list[Row]:
    """The rows of what ``save_to_disk`` of the package datasets wrote: of several splits this one, or all of one."""
    import datasets  # here: as for the Hub

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # files of Arrow and JSON that are missing or damaged fail in their own ways
        fault = f"{type(error).__name__}: {error}"
        raise DataError(f"reading the dataset {folder}: {fault}. Is the folder whole and readable?") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(
                f"reading the dataset {folder}: it has no split {split!r}. Give the folder of one: "
                f"{', '.join(str(folder / name) for name in saved)}"
            )
        saved = saved[split]
    return [*map(_with_nulls, saved.to_list())]


def _from_hub(source: str, split: str) -> list[Row]:
    fault = hub_fault()
    import datasets  # here: it takes a second that a run on local files need not wait for

    datasets.config.HF_HUB_OFFLINE = fault is not None
    name, _, configuration = source.partition(":")
    try:
        rows: list[Row] = [*map(_with_nulls, datasets.load_dataset(name, configuration or None, split=split).to_list())]
    except Exception as error:  # the boundary to the Hub: network, access, names and formats all fail in their own ways
        doing = f"loading the split {split!r} of {name!r} from the Hugging Face Hub"
        local = "set task.data and task.eval_data to local JSONL or Parquet files"
        if fault is None:
            raise DataError(
                f"{doing}: {type(error).__name__}: {error}. Correct its name; if local files were meant, {local}"
            ) from error
        raise DataMissing(
            f"{doing}: {fault}, and the data set is not in {datasets.config.HF_DATASETS_CACHE}. Load it once with "
            f"network, or {local}"
        ) from error
    return rows
