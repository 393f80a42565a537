"""What ``inspect-trajectory`` reads: a step of a run, an evaluation, or a trajectory file, with what lies beside it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.core.errors import ConfigError, DataError, RunError
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.storage.credit import Credit, read_credit
from condensegrpo.storage.run_folder import RunFolder, evaluation_file
from condensegrpo.storage.trajectories import Provenance, read_trajectories

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedStep:
    """The trajectories of one file and what is known about them."""

    file: Path
    run: Path | None  # the run folder that the file lies in
    number: int | None  # the step, if the file lies in a run folder or says it
    scored: tuple[ScoredTrajectory, ...]
    credit: Mapping[str, Credit] | None  # None: there is no credit file, as after an evaluation
    problems: tuple[str, ...]
    provenance: Provenance | None = None  # None: of an older file
    beside: tuple[str, ...] = ()  # names of the other evaluations of the same policy

    @property
    def is_evaluation(self) -> bool:
        """Whether the trajectories were sampled to evaluate, so that nothing is learned from them."""
        if self.provenance is not None:
            return self.provenance.evaluation is not None
        return any(scored.trajectory.id.startswith("-1-") for scored in self.scored)  # of older files


def open_step(path: Path, number: int | None, evaluation: str | None = None) -> InspectedStep:
    """A step of a run folder (the last one by default), an evaluation, or a trajectory file.

    Args:
        path: a run folder, a folder of evaluations, or a file.
        evaluation: the name of one; None: of a run folder the training batch, of other folders the first evaluation.

    Raises:
        CondenseError: there is no such run, step, evaluation or file, it holds nothing, or it is damaged.
    """
    if path.is_dir():
        files = tuple(_evaluations(path))
        if evaluation is not None or (files and not (path / "config.yaml").is_file()):
            return _read_evaluation(path, files, number, evaluation)
        run = RunFolder.open(path)
        return _read(_file_of(run, number), run.path)
    if number is not None or evaluation is not None:
        raise ConfigError(f"reading {path}: --step and --evaluation go with a folder; a file is one step.")
    if not path.exists():
        raise RunError(f"reading {path}: there is no such run folder or trajectory file.")
    return _read(path, _run_of(path))


def every_step(path: Path, number: int | None, evaluation: str | None = None) -> tuple[InspectedStep, ...]:
    """All steps and evaluations of a folder, or the one that ``open_step`` opens; raises as that does."""
    if number is not None or evaluation is not None or not path.is_dir():
        return (open_step(path, number, evaluation),)
    run = RunFolder(path)
    files = [*(run.trajectories(step) for step in run.steps()), *_evaluations(path)]
    return tuple(_read(file, _run_of(file)) for file in files) or (open_step(path, None),)


def budget_of(step: InspectedStep) -> int | None:
    """The context budget in tokens, as the file or else the run's configuration says; None: it is not known."""
    if step.provenance is not None:
        return step.provenance.max_context_tokens
    config = _config_of(step)
    return None if config is None else config.rollout.limits.max_context_tokens


def tokenizer_files(step: InspectedStep) -> Iterator[Path]:
    """Candidates for the tokenizer of some trajectories."""
    yield step.file.parent / "tokenizer.json"
    if step.run is not None:
        run = RunFolder(step.run)
        yield run.path / "tokenizer.json"
        yield from sorted(run.checkpoints.glob("*/model/tokenizer.json"), reverse=True)
        yield from sorted(run.path.glob("origin/*/tokenizer.json"))
    if step.provenance is not None:
        yield Path(step.provenance.model) / "tokenizer.json"
    config = _config_of(step) if step.provenance is None else None
    if config is not None and config.model.path is not None:
        yield Path(config.model.path) / "tokenizer.json"


def ranges(numbers: Sequence[int]) -> str:
    """``1–4, 6`` for 1, 2, 3, 4, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def step_of(trajectory: str | None, group: str | None) -> int | None:
    """The step that the id of a trajectory or a group begins with (6/12/3, 6/12, 6-name of older files), if any."""
    match = re.fullmatch(r"(\d+)(?:/\d+/\d+|-.+)", trajectory or "") or re.fullmatch(r"(\d+)(?:/\d+|-.+)", group or "")
    return int(match[1]) if match else None


def _evaluations(folder: Path) -> Iterator[Path]:
    """The files of evaluations: in a run's folder, in its ``evaluations``, or in one that ``eval --save`` made."""
    own = () if (folder / "config.yaml").is_file() else ("step_*/*.jsonl", "*.jsonl")
    for pattern in ("evaluations/step_*/*.jsonl", *own):
        yield from sorted(folder.glob(pattern))


def _read_evaluation(folder: Path, files: tuple[Path, ...], number: int | None, name: str | None) -> InspectedStep:
    """The evaluation of a name (held-out, or else the first) at a step (by default the last)."""
    steps = {file: re.fullmatch(r"step_(\d+)", file.parent.name) for file in files}
    wanted = [file for file, step in steps.items() if number is None or (step and int(step[1]) == number)]
    named = [file for file in wanted if name is None or file.name == evaluation_file(name)]
    if not named:
        found = ", ".join(dict.fromkeys(file.stem for file in wanted or files)) or "none"
        taken = ranges(sorted({int(step[1]) for step in steps.values() if step}))
        asked = f"evaluation {name}" if name else "evaluation"
        raise RunError(
            f"reading {folder}: there is no {asked}{'' if number is None else f' after step {number}'}. There are: "
            f"{found}{f'; after steps {taken}' if taken else ''}."
        )
    last = [file for file in named if file.parent == named[-1].parent]
    file = next((file for file in last if file.name == evaluation_file("held-out")), last[0])
    return _read(file, _run_of(file))


def _config_of(step: InspectedStep) -> "RunConfig | None":
    """The configuration of the run; None: there is none, or it cannot be read, perhaps of an older version."""
    from condensegrpo.config.load import load_stored  # imports pydantic: only when needed

    try:
        return load_stored(RunFolder(step.run).config) if step.run is not None else None
    except ConfigError:
        return None


def _run_of(file: Path) -> Path | None:
    """The run folder that a file lies in, by its place."""
    inside = file.resolve().parent
    if inside.name == "trajectories":
        return inside.parent
    return inside.parent.parent if inside.parent.name == "evaluations" else None


def _file_of(run: RunFolder, number: int | None) -> Path:
    steps = run.steps()
    if not steps:
        raise RunError(
            f"reading {run.path}: there are no trajectories yet. Wait for the first step, or inspect another run."
        )
    if number is not None and number not in steps:
        raise RunError(f"reading {run.path}: step {number} has no trajectories. There are steps {ranges(steps)}.")
    return run.trajectories(steps[-1] if number is None else number)


def _read(file: Path, run: Path | None) -> InspectedStep:
    result = read_trajectories(file)
    if not result.trajectories:
        raise DataError(
            f"reading {file}: it holds no trajectory{': ' + result.problems[0] if result.problems else ''}."
        )
    trained = file.resolve().parent.name == "trajectories"
    credit_file = RunFolder(run).credit_folder / file.name if run is not None and trained else None
    beside = sorted(other.stem for other in file.parent.glob("*.jsonl") if other != file)
    digits = file.stem.removeprefix("step_")
    known = result.provenance
    return InspectedStep(
        file=file,
        run=run,
        number=int(digits) if trained and digits.isdecimal() else known.step if known else None,
        scored=result.trajectories,
        credit=read_credit(credit_file) if credit_file and credit_file.is_file() else None,
        problems=result.problems,
        provenance=known,
        beside=tuple(beside) if known is not None and known.evaluation is not None else (),
    )
