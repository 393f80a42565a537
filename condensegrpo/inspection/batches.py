"""The trajectory files of a run or folder: the batch of a step, an evaluation, or one file by itself."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.core.wording import ranges
from condensegrpo.storage.run_folder import RunFolder, evaluation_file
from condensegrpo.storage.trajectories import PART, Credit, Provenance, read_credit


def choose(path: Path, number: int | None, evaluation: str | None = None) -> Path:
    """The file of a step of a run folder (the last one by default), of an evaluation, or the file itself.

    Args:
        path: a run folder, a folder of evaluations, or a file.
        evaluation: the name of one; None: of a run folder the training batch, if there is any, else held-out or the
            first evaluation.
    """
    if path.is_dir():
        files = tuple(_evaluations(path))
        has_steps = (path / "config.yaml").is_file() and (number is not None or bool(RunFolder(path).steps()))
        if evaluation is not None or (files and not has_steps):
            return _evaluation_of(path, files, number, evaluation)
        steps = RunFolder.open(path).steps()
        if not steps:
            raise RunError(
                f"reading {path}: there are no trajectories yet. Wait for the first step, or inspect another run."
            )
        if number is not None and number not in steps:
            raise RunError(f"reading {path}: step {number} has no trajectories. There are steps {ranges(steps)}.")
        return RunFolder(path).trajectories(steps[-1] if number is None else number)
    if number is not None or evaluation is not None:
        raise ConfigError(f"reading {path}: --step and --evaluation go with a folder; a file is one step.")
    if not path.exists():
        raise RunError(f"reading {path}: there is no such run folder or trajectory file.")
    return path


def trajectory_files(path: Path) -> tuple[Path, ...]:
    """All files of a run or folder: of the steps in order, then of the evaluations; a file by itself."""
    if not path.is_dir():
        return (path,) if path.exists() else ()
    run = RunFolder(path)
    return (*(run.trajectories(step) for step in run.steps()), *_evaluations(path))


def run_of(file: Path) -> Path | None:
    """The run folder that a file lies in, by its path."""
    inside = _folder_of(file)
    if inside.name == "trajectories":
        return inside.parent
    return inside.parent.parent if inside.parent.name == "evaluations" else None


def is_training(file: Path) -> bool:
    """Whether a file holds a training batch of a run, by its path."""
    return _folder_of(file).name == "trajectories"


def _folder_of(file: Path) -> Path:
    """The folder of a file as it is named if that is one of a run, or else where links lead."""
    named, real = Path(os.path.abspath(file)).parent, file.resolve().parent
    return named if named.name == "trajectories" or named.parent.name == "evaluations" else real


def credit_file(file: Path) -> Path | None:
    """Where the credit of a training batch is, or will be."""
    run = run_of(file) if is_training(file) else None
    return RunFolder(run).credit_folder / file.name if run is not None else None


def credit_of(file: Path) -> dict[str, Credit] | None:
    """The credit of a training batch by trajectory; None: there is no credit file, as after an evaluation."""
    credit = credit_file(file)
    return read_credit(credit) if credit is not None and credit.is_file() else None


def tokenizer_files(file: Path, known: Provenance | None) -> Iterator[Path]:
    """Candidates for the tokenizer of the trajectories of a file."""
    yield file.parent / "tokenizer.json"
    if (folder := run_of(file)) is not None:
        run = RunFolder(folder)
        yield run.path / "tokenizer.json"
        yield from sorted(run.checkpoints.glob("*/model/tokenizer.json"), reverse=True)
        yield from sorted(run.path.glob("origin/*/tokenizer.json"))
    if known is not None:
        yield Path(known.model) / "tokenizer.json"


def step_of(trajectory: str | None, group: str | None) -> int | None:
    """The step that the id of a trajectory or a group begins with (6/12/3, 6/12), if any."""
    match = re.fullmatch(r"(\d+)/\d+/\d+", trajectory or "") or re.fullmatch(r"(\d+)/\d+", group or "")
    return int(match[1]) if match else None


def _evaluations(folder: Path) -> Iterator[Path]:
    """The files of evaluations: in a run's folder, in its ``evaluations``, or in one that ``eval --save`` made."""
    saved = () if (folder / "config.yaml").is_file() else ("step_*/*.parquet", "*.parquet")
    for pattern in ("evaluations/step_*/*.parquet", *saved):
        yield from files_in(folder, pattern)


def files_in(folder: Path, pattern: str = "*.parquet") -> list[Path]:
    """The files of a folder without those that hold a part of another."""
    return sorted(file for file in folder.glob(pattern) if PART not in file.name and not file.name.startswith("."))


def _evaluation_of(folder: Path, files: tuple[Path, ...], number: int | None, name: str | None) -> Path:
    """The evaluation of a name (held-out, or else the first) at a step (by default the last)."""
    steps = {file: re.fullmatch(r"step_(\d+)", file.parent.name) for file in files}
    at_step = [file for file, step in steps.items() if number is None or (step and int(step[1]) == number)]
    named = [file for file in at_step if name is None or file.name == evaluation_file(name)]
    if not named:
        names = ", ".join(dict.fromkeys(file.stem for file in at_step or files)) or "none"
        taken = ranges({int(step[1]) for step in steps.values() if step})
        described = f"evaluation {name}" if name else "evaluation"
        raise RunError(
            f"reading {folder}: there is no {described}{'' if number is None else f' after step {number}'}. There are: "
            f"{names}{f'; after steps {taken}' if taken else ''}."
        )
    last = [file for file in named if file.parent == named[-1].parent]
    return next((file for file in last if file.name == evaluation_file("held-out")), last[0])
