"""The runs of a folder, and how they compare: configurations, curves and results, from their files alone."""

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from condensegrpo.config.load import load_config
from condensegrpo.config.yaml_tree import leaves
from condensegrpo.core.credentials import without_credentials
from condensegrpo.core.errors import CondenseError
from condensegrpo.evaluation.figures import evaluations_in, metrics_of
from condensegrpo.metrics.intervals import Interval, paired_difference
from condensegrpo.storage.evaluations import correctness, stored_evaluations
from condensegrpo.storage.files import TEMPORARY
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import provenance_of, read_figures

DEPTH = 3  # folders below each other in which runs are looked for: a sweep's are in runs/STUDY/
BARS = "▁▂▃▄▅▆▇█"
LOG_TAIL = 4096  # bytes of log.txt in which the last error stands


class RunStatus(StrEnum):
    """What a run folder says about its run."""

    RUNNING = "running"  # a process holds its lock
    FINISHED = "finished"  # the last step is evaluated
    STOPPED = "stopped"  # it can be continued
    FAILED = "failed"  # its last start ended with an error
    PROXIED = "proxied"  # it holds sessions of ``condensegrpo proxy``, and nothing was trained
    UNREADABLE = "unreadable"  # a file is damaged, or the configuration is not valid


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A line of the list of runs."""

    name: str  # its path below the folder of the list
    path: str
    status: RunStatus
    step: int  # the last one logged
    steps: int | None  # of the configuration; None: it cannot be read
    success: Interval | None  # of the last held-out evaluation
    age: float  # seconds since it last wrote
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedEvaluation:
    """The last evaluation of a name in one run."""

    evaluation: str
    run: str
    step: int
    success: Interval
    metrics: Mapping[str, float]
    difference: Interval | None  # of the success to that of the first run, paired; None: that run, or no pairs
    pairs: int  # problems that both runs were evaluated on


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Several runs side by side. Sequences of values are in the order of ``runs``."""

    runs: tuple[str, ...]
    settings: Mapping[str, tuple[object, ...]]  # keys that are not equal in all, and their values
    metrics: tuple[tuple[Mapping[str, float], ...], ...]  # the lines of metrics.jsonl of each
    evaluations: tuple[ComparedEvaluation, ...]


class _Latest(NamedTuple):
    """The last evaluation of a name in a run."""

    run: RunFolder
    name: str
    step: int
    metrics: Mapping[str, float]
    conditions: tuple[object, ...] | None = None  # of ``condensegrpo eval``; None: those of its run


def find_runs(folder: Path) -> Iterator[Path]:
    """The run folders below a folder, sweeps' included, by name; one to which links lead, too, once."""
    seen, roots = set[str](), [folder]
    for root in roots:  # links come last: a run that is there, too, has its own name
        for path, inside, files in os.walk(root):
            if (real := os.path.realpath(path)) in seen:
                inside.clear()
                continue
            if "config.yaml" in files:
                yield Path(path)
                seen.add(real)
                inside.clear()
            elif len(Path(path).relative_to(folder).parts) >= DEPTH:
                inside.clear()  # a link may lead here from above
            else:
                seen.add(real)
            inside[:] = sorted(name for name in inside if not name.startswith(".") and TEMPORARY not in name)
            roots += [link for name in inside if (link := Path(path, name)).is_symlink()]


def summary(path: Path, folder: Path) -> RunSummary:
    """What the list says of a run in a folder."""
    run, readable = RunFolder(path), True
    lines: Sequence[Mapping[str, float]] = ()
    steps: int | None = None
    try:
        lines = read_metrics(run.metrics)
        steps = load_config(run.config).train.steps
    except CondenseError:
        readable = False
    evaluated = [line for line in lines if "eval/success" in line]
    written = [file for file in (run.metrics, run.log, run.config) if file.is_file()]
    return RunSummary(
        name=str(path.relative_to(folder)),
        path=str(path),
        status=_status(run, [line["step"] for line in evaluated], steps) if readable else RunStatus.UNREADABLE,
        step=int(max((line["step"] for line in lines), default=0)),
        steps=steps,
        success=_interval(evaluated[-1], "eval/success") if evaluated else None,
        age=max(0.0, time.time() - max(file.stat().st_mtime for file in written)),
        bytes=sum(_sizes(path)),
    )


def compare_runs(runs: Sequence[RunFolder]) -> RunComparison:
    """Compare runs; the first is what the others are compared with."""
    names = _names([run.path for run in runs])
    trees = (load_config(run.config).model_dump(mode="json", exclude={"name", "runs_dir"}) for run in runs)
    values = (leaves(without_credentials(tree), lists=False) for tree in trees)
    settings = [{".".join(path): value for path, value in each if value != {}} for each in values]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    rows = {key: tuple(setting.get(key) for setting in settings) for key in keys}
    latest = [_latest_evaluations(run) for run in runs]
    return RunComparison(
        runs=names,
        settings={key: values for key, values in rows.items() if any(value != values[0] for value in values)},
        metrics=tuple(read_metrics(run.metrics) for run in runs),
        evaluations=tuple(
            _compared(name, each[evaluation], None if number == 0 else latest[0].get(evaluation))
            for evaluation in dict.fromkeys(evaluation for each in latest for evaluation in each)
            for number, (name, each) in enumerate(zip(names, latest, strict=True))
            if evaluation in each
        ),
    )


def sparklines(curves: Sequence[Sequence[tuple[float, float]]], cells: int) -> list[str]:
    """Curves of (step, value) as text over the same steps and on the same scale; a cell is the mean of its values.

    (0, 0), (1, 1)  and  (0, 1), (2, 1)   ─▶   ``▁█ `` and ``█ █`` in three cells
    """
    curves = [[(step, value) for step, value in curve if isfinite(value)] for curve in curves]
    points = [point for curve in curves for point in curve]
    if not points:
        return ["" for _ in curves]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    lines = []
    for curve in curves:
        values: list[list[float]] = [[] for _ in range(cells)]
        for step, value in curve:
            values[min(int((step - first) / max(last - first, 1) * cells), cells - 1)].append(value)
        means = [sum(cell) / len(cell) if cell else None for cell in values]
        scaled = (
            None if mean is None else round((mean - low) / ((high - low) or 1) * (len(BARS) - 1)) for mean in means
        )
        lines.append("".join(" " if level is None else BARS[level] for level in scaled))
    return lines


def _sizes(folder: Path) -> Iterator[int]:
    """The bytes of the files below a folder, in which a run may be deleting checkpoints."""
    for path, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                about = Path(path, name).lstat()
                yield about.st_size if stat.S_ISREG(about.st_mode) else 0


def _status(run: RunFolder, evaluated: Sequence[float], steps: int | None) -> RunStatus:
    if run.in_use:
        return RunStatus.RUNNING
    if steps in evaluated:
        return RunStatus.FINISHED
    if run.trajectories(0).is_file():
        return RunStatus.PROXIED
    log = run.log.read_bytes()[-LOG_TAIL:].decode(errors="replace") if run.log.is_file() else ""
    return RunStatus.FAILED if "  error: " in log.rpartition("  run folder ")[2] else RunStatus.STOPPED


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    """The last parts of some paths, as many as tell them apart."""
    paths = [Path(os.path.abspath(path)) for path in paths]  # of . and .. too
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = tuple("/".join(path.parts[-parts:]) for path in paths)
        if len(set(names)) == len(names):
            return names
    return tuple(map(str, paths))


def _latest_evaluations(run: RunFolder) -> dict[str, _Latest]:
    """The last evaluation of each name: those of the training, then those of ``condensegrpo eval``."""
    latest: dict[str, _Latest] = {}
    for line in read_metrics(run.metrics):
        latest |= {name: _Latest(run, name, int(line["step"]), metrics_of(name, line)) for name in evaluations_in(line)}
    for stored in stored_evaluations(run):
        conditions = _conditions(run, run.evaluation(stored.step, stored.name))
        latest[stored.name] = _Latest(run, stored.name, stored.step, stored.metrics, conditions)
    return latest


def _conditions(run: RunFolder, file: Path) -> tuple[object, ...] | None:
    """Condenser, budget and temperature of an evaluation; None: those of its run, or they are not known."""
    known = provenance_of(read_figures(file)) if file.is_file() else None
    if known is None:
        return None
    config = load_config(run.config)
    own = config.condenser.name, config.rollout.limits.max_context_tokens, config.evaluate.temperature
    given = known.condenser, known.max_context_tokens, known.temperature
    return None if given == own else given


def _compared(run: str, latest: _Latest, base: _Latest | None) -> ComparedEvaluation:
    """An evaluation of a run, its success paired by problem with that of the base."""
    difference, pairs = None, 0
    if base is not None and latest.conditions == base.conditions:
        sides = [correctness(side.run, side.step, side.name) for side in (latest, base)]
        both = sides[0].keys() & sides[1].keys()
        pairs = len(both)
        if both:
            difference = paired_difference(*({problem: side[problem] for problem in both} for side in sides))
    return ComparedEvaluation(
        evaluation=latest.name,
        run=run,
        step=latest.step,
        success=_interval(latest.metrics, "success"),
        metrics=latest.metrics,
        difference=difference,
        pairs=pairs,
    )


def _interval(metrics: Mapping[str, float], key: str) -> Interval:
    return Interval(metrics[key], metrics.get(f"{key}_low", metrics[key]), metrics.get(f"{key}_high", metrics[key]))
