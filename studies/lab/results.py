"""The results of a study from the folders of its runs: ``results.json``, ``.md``, ``.png`` and ``.svg``."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import fmean, median

from condensegrpo.config.load import HELD_OUT
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.study import same_warm_start
from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.core.wording import plural
from condensegrpo.evaluation.figures import metrics_of
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.studies.lab import cross_play
from condensegrpo.studies.lab.figures import (
    ArmComparison,
    ArmFigures,
    EvaluationFigures,
    LearningCurve,
    SeedOutcome,
    StudyFigures,
    evaluation_figures,
    figure_of,
    learning_curve,
)
from condensegrpo.studies.lab.intervals import ENOUGH, could_find
from condensegrpo.studies.lab.plots import plot_study
from condensegrpo.studies.lab.predictions import Figure, PredictionOutcome, Verdict, outcome, unfinished
from condensegrpo.studies.lab.study import EFFECTS, LabStudy, Prediction
from condensegrpo.training.sweep import runs_of

SHOWN = ("success", "context_tokens")  # figures with columns of their own
RESULTS = ("results.json", "results.md", "results.png", "results.svg")


def write_results(study: LabStudy, out: Path) -> StudyFigures:
    """Write the results of the finished runs of a study into the folder of its runs."""
    finished = [run for run in runs_of(study, out) if run.finished]
    if not finished:
        raise RunError(f"writing the results of {study.name}: {out} has no finished run. Run condensegrpo sweep first.")
    figures = study_figures(study, [run.config for run in finished], [run.arm for run in finished])
    write_atomically(out / RESULTS[0], f"{json.dumps(asdict(figures), indent=2)}\n")
    write_atomically(out / RESULTS[1], markdown(figures))
    plot_study(figures, out / Path(RESULTS[2]).stem)
    return figures


def study_figures(study: LabStudy, runs: Sequence[RunConfig], arms: Sequence[str]) -> StudyFigures:
    """The figures of finished runs.

    Args:
        runs: their configurations, at least one.
        arms: the arm of each.
    """
    by_arm: dict[str, list[RunConfig]] = {arm: [] for arm in study.arms if arm in arms}
    for arm, config in zip(arms, runs, strict=True):
        by_arm[arm].append(config)
    paired = {
        (ours, theirs): _share_warm_starts(configs, others)
        for ours, configs in by_arm.items()
        for theirs, others in by_arm.items()
    }

    @cache
    def outcomes(arm: str, evaluation: str) -> tuple[SeedOutcome, ...]:
        return tuple(_outcome(config, evaluation) for config in by_arm.get(arm, ()))

    cells = defaultdict[tuple[str, str], dict[int, cross_play.Cells]](dict)  # (arm, evaluation) → seed → cells
    for arm, config in zip(arms, runs, strict=True):
        for evaluation, of_run in cross_play.stored(RunFolder(Path(config.runs_dir) / config.name)).items():
            cells[arm, evaluation][config.seed] = of_run

    def figure(name: str, arm: str, evaluation: str) -> Figure | None:
        if name not in EFFECTS:
            return figure_of(outcomes(arm, evaluation), name)
        return cross_play.effect(name, cells[arm, evaluation]) if (arm, evaluation) in cells else None

    def predicted(claim: Prediction) -> PredictionOutcome:
        if claim.figure in EFFECTS:
            kind, done = "cross-plays", {side: len(cells.get(side, ())) for side in claim.sides}
        else:
            kind, done = "runs", {(arm, ""): len(by_arm.get(arm, ())) for arm, _ in claim.sides}
        if (total := sum(done.values())) < (needed := len(study.seeds) * len(done)):
            return unfinished(claim, f"{total} of {needed} {kind}")
        sides = [figure(claim.figure, *side) for side in claim.sides]
        if claim.minus is None:
            return outcome(claim, sides[0], None, paired=False)
        same = claim.arm == claim.minus or paired.get((claim.arm, claim.minus), False)
        return outcome(claim, *sides, paired=same)

    names = dict.fromkeys(name for config in runs for name in (HELD_OUT, *config.evaluate.variants))
    shown = study.report.evaluations or [
        name for name in names if name == HELD_OUT or all(name in config.evaluate.variants for config in runs)
    ]
    return StudyFigures(
        study=study.name,
        question=study.question,
        baseline=study.baseline,
        reach=study.report.reach,
        metrics=tuple(study.report.metrics),
        evaluations=tuple(
            evaluation_figures(
                name,
                {arm: outcomes(arm, name) for arm in by_arm},
                baseline=study.baseline,
                metrics=study.report.metrics,
                shared=[arm for arm in by_arm if paired.get((arm, study.baseline))],
            )
            for name in shown
        ),
        curves=tuple(
            learning_curve(arm, {config.seed: _course(config) for config in configs}, reach=study.report.reach)
            for arm, configs in by_arm.items()
        ),
        predictions=tuple(map(predicted, study.predictions)),
        cross_play=tuple(cross_play.cross_play(*of, by_seed) for of, by_seed in cells.items()),
    )


def _share_warm_starts(ours: Sequence[RunConfig], theirs: Sequence[RunConfig]) -> bool:
    """Whether two arms have the same warm start in every seed that both have, and such a seed."""
    by_seed = {config.seed: config for config in theirs}
    both = [(config, by_seed[config.seed]) for config in ours if config.seed in by_seed]
    return bool(both) and all(same_warm_start(*pair) for pair in both)


def play_study(study: LabStudy, out: Path, arm: str | None, evaluation: str) -> Iterator[str]:
    """Play the cross-play of the finished runs of an arm in an evaluation; yields a line for each run.

    Args:
        arm: None: play what the predictions of writer_effect and reader_effect name.
    """
    predicted = [side for claim in study.predictions if claim.figure in EFFECTS for side in claim.sides]
    sides = predicted if arm is None else [(arm, evaluation)]
    if not sides or sides[0][0] not in study.arms:
        found = "no prediction has one of its figures" if arm is None else f"there is no arm {arm!r}"
        raise ConfigError(f"playing the cross-play of {study.name}: {found}. Give --arm: {', '.join(study.arms)}.")
    for of_arm, name in dict.fromkeys(sides):
        for run in runs_of(study, out):
            if run.arm == of_arm and run.finished:
                cross_play.play(run.config, run.folder, name)
                yield f"{run.name}: played {name}"
            elif run.arm == of_arm:
                yield f"{run.name}: not finished, not played"


def markdown(figures: StudyFigures) -> str:
    """The results as a page: the predictions and whether they hold, and two tables for each evaluation."""
    parts = [f"# {figures.study}", *([figures.question] if figures.question else [])]
    fewest = min(len(arm.seeds) for evaluation in figures.evaluations for arm in evaluation.arms)
    if fewest < ENOUGH:
        parts.append(
            f"**Fewer than {ENOUGH} seeds** ({fewest} of an arm): intervals miss what happens to one seed in five or "
            f"ten, such as a collapse."
        )
    parts += [predictions_table(figures.predictions)] if figures.predictions else []
    parts += map(cross_play.cross_play_table, figures.cross_play)
    parts += [_table(evaluation, figures) for evaluation in figures.evaluations]
    return "\n\n".join([*parts, *map(_seed_table, figures.evaluations)]) + "\n"


def predictions_table(predictions: Sequence[PredictionOutcome]) -> str:
    """``Predicted | Found`` with the values by seed; a figure in [−1, 1] has three digits, others have one."""
    heads = ["claim", "predicted", "found [95 %]", "", "could have found", "by seed"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for each in predictions:
        form, found = _digits(each), _found(each)
        values = ", ".join(f"{value:{form}}" for value in each.by_seed.values()) or "–"
        verdict = f"**{each.verdict}**"
        if each.verdict is None:
            found, verdict = "–", f"{each.done}: no verdict before all seeds are done"
        least = "–" if each.could_find is None else f"effects >= {each.could_find:{form}}"
        cells = (each.claim, f"{each.predicted} ({each.evaluation})", found, verdict, least, values)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def claims_table(predictions: Sequence[PredictionOutcome]) -> str:
    """The same for a page: without words and seeds; the effect that could have been found behind *undecided* alone."""
    lines = ["| predicted | found [95 %] |  |", "| --- | --- | --- |"]
    for each in predictions:
        least = each.could_find
        if each.found is not None and each.by_seed:  # of results that were stored before
            least = could_find(each.found, len(each.by_seed))
        short = f" (≥ {least:{_digits(each)}})" if each.verdict is Verdict.UNDECIDED and least is not None else ""
        lines.append(f"| {each.predicted} ({each.evaluation}) | {_found(each)} | **{each.verdict}**{short} |")
    return "\n".join(lines)


def _digits(each: PredictionOutcome) -> str:
    return ".3f" if each.found is None or abs(each.found.mean) <= 1 else ".1f"


def _found(each: PredictionOutcome) -> str:
    return "not measured" if each.found is None else f"{each.found:{_digits(each)}}{', paired' if each.paired else ''}"


def _seed_table(evaluation: EvaluationFigures) -> str:
    """The success of every seed after training."""
    lines = [f"## {evaluation.name}: success by seed", "", "| arm | by seed |", "| --- | --- |"]
    values = (
        (arm.arm, ", ".join(f"{value:.3f}" for value in arm.by_seed["success"].values())) for arm in evaluation.arms
    )
    return "\n".join([*lines, *(f"| {arm} | {by_seed} |" for arm, by_seed in values)])


def _table(evaluation: EvaluationFigures, figures: StudyFigures) -> str:
    measured = (metric for arm in evaluation.arms for metric in arm.by_seed)
    named = dict.fromkeys((*measured, *figures.metrics))  # one that no run measured has a column too
    metrics = [metric for metric in named if metric not in SHOWN]
    compared = {comparison.arm: comparison for comparison in evaluation.comparisons}
    curves = {curve.arm: curve for curve in figures.curves} if evaluation.name == HELD_OUT else {}
    heads = ["arm", "seeds", "before", "success [95 %]", "a new seed, 95 %", "interquartile mean"]
    heads += ["largest context, tokens [95 %]"]
    heads += [f"success − {figures.baseline} [95 %]", "could have found", f"P(better than {figures.baseline})"]
    heads += ["context ratio"]
    heads += [f"steps to {figures.reach:g}"] if curves else []
    rows = [_row(arm, compared.get(arm.arm), curves.get(arm.arm), metrics) for arm in evaluation.arms]
    lines = (f"| {' | '.join(cells)} |" for cells in ([*heads, *metrics], ["---"] * len([*heads, *metrics]), *rows))
    few, many = (choose(arm.problems for arm in evaluation.arms) for choose in (min, max))
    title = f"## {evaluation.name}: {plural(many, 'problem') if few == many else f'{few} to {many} problems an arm'}"
    return "\n".join([title, "", *lines])


def _row(
    arm: ArmFigures, comparison: ArmComparison | None, curve: LearningCurve | None, metrics: Sequence[str]
) -> list[str]:
    before = "–" if arm.success_before is None else f"{arm.success_before:.3f}"
    cells = [arm.arm, str(len(arm.seeds)), before, f"{arm.success:.3f}"]
    cells += [f"{arm.new_seed.low:.3f} … {arm.new_seed.high:.3f}" if arm.new_seed else "–", f"{arm.success_iqm:.3f}"]
    cells += [f"{'–' if arm.context_before is None else f'{arm.context_before:.1f}'} → {arm.context:.1f}"]
    if comparison is None:
        cells += ["–"] * 4
    else:
        cells += [f"{comparison.difference:+.3f}{', paired' if comparison.paired else ''}"]
        cells += ["–" if comparison.could_find is None else f"effects >= {comparison.could_find:.3f}"]
        cells += [f"{comparison.improvement:.2f}", f"{comparison.context_ratio:.2f}"]
    cells += [_reached(curve)] if curve else []
    return cells + [f"{fmean(arm.by_seed[key].values()):.3f}" if key in arm.by_seed else "–" for key in metrics]


def _reached(curve: LearningCurve) -> str:
    """``40 (4 of 5)``: the median over the seeds that reached it, and how many did."""
    steps = [step for step in curve.reached.values() if step is not None]
    return f"{median(steps):g} ({len(steps)} of {len(curve.reached)})" if steps else f"– (0 of {len(curve.reached)})"


def _outcome(config: RunConfig, evaluation: str) -> SeedOutcome:
    """One evaluation of a run, from its trajectories and metrics."""
    folder = RunFolder(Path(config.runs_dir) / config.name)
    success, context = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for scored in read_trajectories(folder.evaluation(config.train.steps, evaluation)):
        figures, problem = scored.figures, f"{scored.figures.problem_id} {scored.trajectory.question}"
        success[problem].append(figures.correct)
        context[problem].append(float(figures.context_tokens))
    lines = _evaluated(folder)
    before, after = (metrics_of(evaluation, lines.get(step, {})) for step in (0, config.train.steps))
    return SeedOutcome(seed=config.seed, success=_means(success), context=_means(context), before=before, after=after)


def _course(config: RunConfig) -> dict[int, float]:
    """The held-out success of a run by the step after which it was evaluated."""
    lines = _evaluated(RunFolder(Path(config.runs_dir) / config.name))
    return {step: line["eval/success"] for step, line in lines.items()}


def _evaluated(folder: RunFolder) -> dict[int, dict[str, float]]:
    return {int(line["step"]): line for line in read_metrics(folder.metrics) if "eval/success" in line}


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {problem: fmean(of_problem) for problem, of_problem in values.items()}
