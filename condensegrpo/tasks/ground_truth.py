"""Ground truth from a file of its own: by the problem's id, for questions that come without answers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from condensegrpo.core.errors import DataError
from condensegrpo.core.protocols import Problem
from condensegrpo.storage.rows import read_file, require_columns, require_unique
from condensegrpo.tasks.splits import Splits


def with_answers(source: str, splits: Splits) -> Splits:
    """The problems with their answers from a file; a list of answers gives the aliases, as in the task ``jsonl``.

    Args:
        source: one JSON object of id → answer, or JSON lines with ``id`` and ``answer``.

    Raises:
        DataError: the file is missing or damaged, an id occurs twice, or a problem has no answer in it.
    """
    truths = _read_truths(source)
    missing = [problem.id for problem in (*splits.train, *splits.held_out) if problem.id not in truths]
    if missing:
        raise DataError(
            f"reading the ground truth {source}: it has no answer for {len(missing)} problems, the first is "
            f"{missing[0]!r}. Its ids are like {next(iter(truths))!r}; map the column of ids in task.options.id"
        )
    train, held_out = (
        tuple(answered(problem, truths[problem.id]) for problem in problems)
        for problems in (splits.train, splits.held_out)
    )
    return replace(splits, train=train, held_out=held_out)


def _read_truths(source: str) -> Mapping[str, object]:
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(f"reading the ground truth {source}: there is no such file (looked for {path.resolve()})")
    by_id = _by_id(path)
    if by_id is not None:
        return by_id
    rows = read_file(path)
    require_columns(rows, ("id", "answer"), source=source)
    require_unique(rows, "id", source=source)
    if not rows:
        raise DataError(f"reading the ground truth {source}: it is empty, wanted at least one answer")
    return {str(row["id"]): row["answer"] for row in rows}


def _by_id(path: Path) -> dict[str, object] | None:
    """The file as one JSON object of id → answer; None if it is something else, such as JSON lines."""
    if path.suffix != ".json":
        return None
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None  # JSON lines under this name are read as such, and faults are reported there
    return value if isinstance(value, dict) and value else None


def answered(problem: Problem, truth: object) -> Problem:
    """The problem with its ground truth; the first of a list is the answer and all are its aliases."""
    aliases = [str(alias) for alias in truth] if isinstance(truth, list) else None
    first = next(iter(aliases), None) if aliases is not None else truth
    data = problem.data if aliases is None else {**problem.data, "aliases": aliases}
    return replace(problem, answer=None if first is None else str(first), data=data)
