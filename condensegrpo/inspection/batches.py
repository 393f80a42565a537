"""The trajectory files of a run or folder: the batch of a step, an evaluation, or one file by itself."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.core.errors import CondenseError, ConfigError, RunError
from condensegrpo.core.wording import ranges
from condensegrpo.storage.run_folder import RunFolder, evaluation_file
from condensegrpo.storage.trajectories import PART, Credit, Provenance, read_credit

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryBatch:
    """The trajectories of one file and its parts."""

    file: Path
    run: Path | None  # the run folder that the file lies in
    number: int | None  # the step, if the file lies in a run folder or says it
    provenance: Provenance | None  # None: it was not given
    is_evaluation: bool  # whether they were sampled to evaluate, so that nothing is learned from them
    trajectories: int  # how many
    success: float  # the mean of ``correct``
    largest: int  # context tokens of any trajectory
    signal: float | None  # share of the groups of which a member has an advantage; None: no credit was given (yet)

    @property
    def no_signal_share(self) -> float | None:
        """Share of the groups of which no member has an advantage; None: no credit was given (yet)."""
        return None if self.signal is None else 1 - self.signal

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of the other evaluations of the same policy."""
        if self.provenance is None or self.provenance.evaluation is None:
            return ()
        return tuple(other.stem for other in files_in(self.file.parent) if other != self.file)

    @property
    def version_known(self) -> bool:
        """Whether the policy versions of turns count the steps of the weights that sampled them."""
        return not self.is_evaluation or (self.provenance is not None and self.number is not None)

    @property
    def evaluation(self) -> str | None:
        """The name of the evaluation, or of its file; None: it is a training batch."""
        known = self.provenance.evaluation if self.provenance is not None else None
        return (known or self.file.stem) if self.is_evaluation else None

    @property
    def title(self) -> str:
        """``step 6``, or ``held-out, after step 6``."""
        step = "" if self.number is None else f"step {self.number}"
        if self.evaluation is None:
            return step or "trajectories"
        return f"{self.evaluation}, after {step}" if step else self.evaluation


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
        return _file_of(RunFolder.open(path), number)
    if number is not None or evaluation is not None:
        raise ConfigError(f"reading {path}: --step and --evaluation go with a folder; a file is one step.")
    if not path.exists():
        raise RunError(f"reading {path}: there is no such run folder or trajectory file.")
    return path


def command_of(path: Path, batch: TrajectoryBatch) -> tuple[str, ...]:
    """The arguments of the command that shows a batch of a run, of a folder, or of a file."""
    stepped = is_training(batch.file) or re.fullmatch(r"step_\d+", batch.file.parent.name)  # else no path has the step
    step = ("--step", str(batch.number)) if path.is_dir() and batch.number is not None and stepped else ()
    evaluation = ("--evaluation", batch.evaluation or batch.file.stem)
    named = evaluation if path.is_dir() and not is_training(batch.file) else ()
    return ("condensegrpo", "inspect", str(path), *step, *named)


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


def tokenizer_files(batch: TrajectoryBatch) -> Iterator[Path]:
    """Candidates for the tokenizer of some trajectories."""
    yield batch.file.parent / "tokenizer.json"
    if batch.run is not None:
        run = RunFolder(batch.run)
        yield run.path / "tokenizer.json"
        yield from sorted(run.checkpoints.glob("*/model/tokenizer.json"), reverse=True)
        yield from sorted(run.path.glob("origin/*/tokenizer.json"))
    if batch.provenance is not None:
        yield Path(batch.provenance.model) / "tokenizer.json"


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


def config_of(batch: TrajectoryBatch) -> "RunConfig | None":
    """The configuration of the run at its step; None: there is none that can be read."""
    from condensegrpo.config.load import load_config  # imports pydantic: only when needed
    from condensegrpo.config.resumed import config_at

    if batch.run is None:
        return None
    run = RunFolder(batch.run)
    try:
        return load_config(run.config) if batch.number is None else config_at(run, batch.number)
    except CondenseError:
        return None


def _file_of(run: RunFolder, number: int | None) -> Path:
    steps = run.steps()
    if not steps:
        raise RunError(
            f"reading {run.path}: there are no trajectories yet. Wait for the first step, or inspect another run."
        )
    if number is not None and number not in steps:
        raise RunError(f"reading {run.path}: step {number} has no trajectories. There are steps {ranges(steps)}.")
    return run.trajectories(steps[-1] if number is None else number)
