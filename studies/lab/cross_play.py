"""Cross-play: the initial and the trained policy of a run as writer of condensers' texts and as reader of them.

                     reader initial   reader trained
    writer initial   y_II             y_IT                writer effect = ((y_TI − y_II) + (y_TT − y_IT)) / 2
    writer trained   y_TI             y_TT                reader effect = ((y_IT − y_II) + (y_TT − y_TI)) / 2

The reader writes every reply, the writer all that the condenser asks for. ``RUN/cross_play.json`` holds a run's cells.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import numpy as np

from condensegrpo.assembly.policy import initial_of, model_of
from condensegrpo.config.load import evaluations, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import override
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observer
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.wording import did_you_mean, plural
from condensegrpo.metrics.intervals import Interval
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.studies.lab.intervals import Matrix, mean_interval
from condensegrpo.studies.lab.predictions import Figure
from condensegrpo.studies.lab.study import EFFECTS

FILE = "cross_play.json"
POLICIES = ("initial", "trained")
Success = Mapping[str, float]  # problem → mean correctness of its samples
Cells = Mapping[str, Success]  # ``cell(writer, reader)`` → success


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossPlay:
    """The cross-play of an arm in one evaluation."""

    arm: str
    evaluation: str
    cells: Mapping[str, Mapping[str, float]]  # cell → seed → success
    effects: Mapping[str, Interval]  # of ``EFFECTS``
    by_seed: Mapping[str, Mapping[str, float]]  # effect → seed → value


def cell(writer: str, reader: str) -> str:
    """The name of a cell."""
    return f"writer {writer}, reader {reader}"


def play(config: RunConfig, folder: RunFolder, evaluation: str) -> None:
    """Play the four cells of a finished run and store them; those of its newest checkpoint that are stored stay."""
    if evaluation in (known := stored(folder)):
        return
    if (varied := evaluations(config).get(evaluation)) is None:
        names = tuple(evaluations(config))
        raise ConfigError(
            f"playing the cross-play of {folder.path}: it has no evaluation {evaluation}. "
            f"{did_you_mean(evaluation, names)}Its evaluations: {', '.join(names)}."
        )
    checkpoint, trained = _newest(folder), model_of(str(folder.path))
    sources = {"initial": initial_of(trained, config), "trained": trained}
    cells = {
        cell(writer, reader): _played(varied, sources[reader], "policy" if writer == reader else sources[writer])
        for writer, reader in product(POLICIES, repeat=2)
    }
    played = {"checkpoint": checkpoint, "evaluations": {**known, evaluation: cells}}
    write_atomically(folder.path / FILE, f"{json.dumps(played, indent=1)}\n")


def stored(folder: RunFolder) -> dict[str, Cells]:
    """The cells of a run's newest checkpoint by evaluation: a run that went on is to be played again."""
    file = folder.path / FILE
    played = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return dict(played["evaluations"]) if played.get("checkpoint") == _newest(folder) else {}


def _newest(folder: RunFolder) -> str:
    """The name of a run's newest checkpoint; empty: it has none."""
    names = (path.name for path in folder.checkpoints.glob("step_*") if path.name[5:].isdigit())  # none that is written
    return max(names, default="")


def _played(config: RunConfig, reader: str, writer: str) -> Success:
    """The success of one cell; ``reader``, ``writer``: model folders or Hub ids, the writer or ``policy``."""
    from condensegrpo.assembly.build import build
    from condensegrpo.assembly.preflight import check_writer_needed, check_writers
    from condensegrpo.evaluation.evaluate import evaluate_variant, opened_policy  # imports torch

    components = build(vary(config, ["evaluate.variants={}", override("rollout.condense.writer", writer)]))
    check_writer_needed(components)
    check_writers(components, reader)
    scored = list[ScoredTrajectory]()
    with opened_policy(components.config, reader) as players:
        evaluate_variant(
            "cross-play", components, players=players, step=None, observer=Observer(), on_scored=scored.append
        )
    return by_problem(scored)


def by_problem(scored: Iterable[ScoredTrajectory]) -> Success:
    """Problem → the mean correctness of its samples."""
    correct = defaultdict[str, list[float]](list)
    for each in scored:
        correct[f"{each.figures.problem_id} {each.trajectory.question}"].append(each.figures.correct)
    return {problem: fmean(values) for problem, values in correct.items()}


def effect(name: str, by_seed: Mapping[int, Cells]) -> Figure:
    """One of ``EFFECTS``, of every seed and problem.

    Args:
        by_seed: seed → cells. Where seeds have problems of their own, the value of each is a mean over them.
    """
    seeds, (problems, *others) = (
        tuple(by_seed),
        [sorted(cells[cell("initial", "initial")]) for cells in by_seed.values()],
    )
    own = any(other != problems for other in others)

    def matrix(writer: str, reader: str) -> Matrix:
        cells = [by_seed[seed][cell(writer, reader)] for seed in seeds]
        if own:
            return np.array([[fmean(success.values())] for success in cells])
        return np.array([[success[problem] for problem in problems] for success in cells])

    swapped = matrix("trained", "initial") - matrix("initial", "trained")
    both = matrix("trained", "trained") - matrix("initial", "initial")
    value_SP = (both + (swapped if name == "writer_effect" else -swapped)) / 2
    return Figure(value_SP=value_SP, seeds=seeds, problems=() if own else tuple(problems))


def cross_play(arm: str, evaluation: str, by_seed: Mapping[int, Cells]) -> CrossPlay:
    """The cells and effects of an arm, of at least one seed."""
    effects = {name: effect(name, by_seed) for name in EFFECTS}
    names = [cell(*pair) for pair in product(POLICIES, repeat=2)]
    return CrossPlay(
        arm=arm,
        evaluation=evaluation,
        cells={name: {str(seed): fmean(by_seed[seed][name].values()) for seed in by_seed} for name in names},
        effects={name: mean_interval(each.value_SP, share=False) for name, each in effects.items()},
        by_seed={
            name: dict(zip(map(str, each.seeds), each.value_SP.mean(axis=1).tolist(), strict=True))
            for name, each in effects.items()
        },
    )


def cross_play_table(found: CrossPlay) -> str:
    """The cells as means over seeds, and the two effects with the values by seed."""
    seeds = len(found.by_seed[EFFECTS[0]])
    lines = [f"## Cross-play of {found.arm} ({found.evaluation}, {plural(seeds, 'seed')})", ""]
    lines += ["| success | reader initial | reader trained |", "| --- | --- | --- |"]
    for writer in POLICIES:
        means = (f"{fmean(found.cells[cell(writer, reader)].values()):.3f}" for reader in POLICIES)
        lines.append(f"| writer {writer} | {' | '.join(means)} |")
    lines += ["", "| effect of training | found [95 %] | by seed |", "| --- | --- | --- |"]
    for name, interval in found.effects.items():
        values = ", ".join(f"{value:+.3f}" for value in found.by_seed[name].values())
        lines.append(f"| {name.replace('_', ' ')} | {interval:+.3f} | {values} |")
    return "\n".join(lines)
