"""The results of ``condensegrpo eval`` in a run folder, beside their trajectories.

evaluations/step_000060/eval-1.parquet  the trajectories
evaluations/step_000060/eval-1.json     the figures, when, and with which command
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from condensegrpo.core.errors import CondenseError, DataError, RunError
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.process import cleaned_up_at_exit
from condensegrpo.storage.files import write_atomically, writing
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import parts_of, read_figures

Correct = Mapping[str, list[float]]  # problem → the correctness of its samples
Destination = Path | RunFolder | None  # a new folder, a run, or nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvaluation:
    """An evaluation of the policy of a run, made after the training."""

    name: str
    step: int  # optimiser steps that the policy had taken
    made: str  # local time
    command: str
    problems: int
    samples: int  # trajectories a problem
    metrics: Mapping[str, float]  # as in metrics.jsonl, without a prefix: success, success_low, context_tokens, …


def destination_of(save: Path | None, run: Path | None, step: int | None) -> Destination:
    """Where an evaluation is kept: in ``save``, which is created, or in the run, if the policy's steps are known."""
    if save is not None:
        try:
            save.mkdir(parents=True)
        except OSError as error:
            raise RunError(f"creating {save} for the trajectories: {error.strerror}. Give another folder.") from error
        return save
    if run is None or step is None:
        return None
    if not os.access(run, os.W_OK):
        raise RunError(
            f"storing the evaluation in {run}: the folder cannot be written. Check its permissions, or write "
            f"elsewhere with --save FOLDER (in Python: save=…)."
        )
    return RunFolder(run)


@contextmanager
def kept_if_begun(save: Path | None) -> Iterator[None]:
    """Remove a new folder again where the evaluation fails before it has trajectories: a next one may have its name."""

    def remove() -> None:
        if save is not None and not any(save.glob("*.parquet")):
            shutil.rmtree(save, ignore_errors=True)

    try:
        with cleaned_up_at_exit(remove):
            yield
    except BaseException:
        remove()
        raise


@contextmanager
def new_name(run: RunFolder, step: int) -> Iterator[str]:
    """Reserve ``eval-1``, or the first number that is free in the run; an evaluation that fails frees it again."""
    with writing(run.evaluation_folder):
        run.evaluation(step, "eval-1").parent.mkdir(parents=True, exist_ok=True)
        files = (run.evaluation(step, f"eval-{number}").with_suffix(".json") for number in count(1))
        file = next(each for each in files if _reserved(each, run.evaluation_folder))

    def release() -> None:
        if not file.stat().st_size:  # else it is stored
            for part in parts_of(file.with_suffix(".parquet")):
                part.unlink()
            file.unlink()

    with cleaned_up_at_exit(release):
        try:
            yield file.stem
        except CondenseError:  # its trajectories say why
            file.unlink()
            raise
        finally:
            if file.exists():
                release()


def _reserved(file: Path, evaluations: Path) -> bool:
    """Create a file; False: an evaluation has its name already, after this step or another."""
    if any(evaluations.glob(f"step_*/{file.stem}.*")):
        return False
    with suppress(FileExistsError):
        file.touch(exist_ok=False)
        return True
    return False


def store_evaluation(run: RunFolder, step: int, result: Evaluation, command: str) -> Path:
    """Write the figures of an evaluation beside its trajectories and return the file."""
    stored = StoredEvaluation(
        name=result.name,
        step=step,
        made=datetime.now().astimezone().isoformat(" ", "seconds"),
        command=command,
        problems=result.problems,
        samples=result.samples,
        metrics=result.figures(),
    )
    path = run.evaluation(step, result.name).with_suffix(".json")
    write_atomically(path, json.dumps(asdict(stored), indent=2) + "\n")
    return path


def stored_evaluations(run: RunFolder) -> tuple[StoredEvaluation, ...]:
    """The evaluations that ``condensegrpo eval`` stored in a run, by step and number."""
    found = []
    for path in run.evaluation_folder.glob("step_*/*.json"):
        if path.stat().st_size:
            try:
                found.append(StoredEvaluation(**json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError) as error:
                raise DataError(f"reading {path}: {error}. Remove the file, or evaluate again.") from error
    return tuple(sorted(found, key=lambda stored: (stored.step, stored.made, len(stored.name), stored.name)))


def correctness(run: RunFolder, step: int, name: str) -> Correct:
    """The correctness of the samples of an evaluation, by problem; nothing if it has no trajectories.

    A problem is its id with its question: tasks that make problems from a seed use an id again.
    """
    by_problem: dict[str, list[float]] = {}
    for part in parts_of(run.evaluation(step, name)):
        for row in read_figures(part, ("problem_id", "question", "correct")).to_pylist():
            by_problem.setdefault(f"{row['problem_id']} {row['question']}", []).append(row["correct"])
    return by_problem
