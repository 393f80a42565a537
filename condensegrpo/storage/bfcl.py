"""Finds and reads the files of BFCL v4 (Apache-2.0), which are in the package bfcl-eval, installed or as a wheel."""

import json
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from condensegrpo.core.errors import DataError, DataMissing

PACKAGE = "bfcl-eval==2026.3.23"
FOLDERS = (".", "bfcl_eval/data", "data")  # where the files may be, below what the user names
BfclFolder = Path | zipfile.Path


def bfcl_folder(file: str, source: Path | None = None) -> BfclFolder:
    """The folder that has a file of the benchmark: of the installed package, a folder, or inside a wheel."""
    roots: list[BfclFolder] = []
    if source is None:
        spec = find_spec("bfcl_eval")
        roots = [Path(path) for path in (spec.submodule_search_locations or ())] if spec is not None else []
    elif source.is_dir():
        roots = [source]
    elif zipfile.is_zipfile(source):
        roots = [zipfile.Path(source)]
    for candidate in (root / inside if inside != "." else root for root in roots for inside in FOLDERS):
        if (candidate / file).is_file():
            return candidate
    lacking = (
        f"the package bfcl_eval is not installed. Run `pip install --no-deps {PACKAGE}`"
        if source is None
        else f"{source} has no {file}. Run `pip download --no-deps {PACKAGE}` and name the wheel with --data"
    )
    raise DataMissing(f"reading BFCL's data: {lacking}")


def bfcl_rows(file: BfclFolder, *columns: str) -> list[dict[str, Any]]:
    """The rows of a file, each with these columns."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"reading BFCL's data in {file}: {error}. Fetch {PACKAGE} again") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not all(row.get(column) for column in columns):
            raise DataError(f"reading {file}: row {number} lacks one of {', '.join(columns)}. Fetch {PACKAGE} again")
    return rows
