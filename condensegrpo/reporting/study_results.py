"""The results of a study from the folders of its runs: ``results.json``, ``.md``, ``.png`` and ``.svg``."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median

from condensegrpo.config.load import HELD_OUT
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.study import Study
from condensegrpo.core.wording import counted
from condensegrpo.evaluation.figures import metric_prefix
from condensegrpo.evaluation.study import (
    ArmComparison,
    ArmFigures,
    EvaluationFigures,
    LearningCurve,
    SeedCurve,
    SeedOutcome,
    StudyFigures,
    evaluation_figures,
    learning_curve,
)
from condensegrpo.reporting.plots import plot_study
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trackers import read_metrics
from condensegrpo.storage.trajectories import read_trajectories

RESULTS = ("results.json", "results.md", "results.png", "results.svg")


def write_results(study: Study, runs: Sequence[RunConfig], arms: Sequence[str], out: Path) -> StudyFigures:
    """Write the results of the finished runs of a study into a folder.

    Args:
        runs: their configurations, at least one.
        arms: the arm of each.
    """
    figures = study_figures(study, runs, arms)
    write_atomically(out / RESULTS[0], f"{json.dumps(asdict(figures), indent=2)}\n")
    write_atomically(out / RESULTS[1], markdown(figures))
    plot_study(figures, out / Path(RESULTS[2]).stem)
    return figures


def study_figures(study: Study, runs: Sequence[RunConfig], arms: Sequence[str]) -> StudyFigures:
    """The figures of finished runs; arguments as of ``write_results``."""
    by_arm: dict[str, list[RunConfig]] = {arm: [] for arm in study.arms if arm in arms}
    for arm, config in zip(arms, runs, strict=True):
        by_arm[arm].append(config)
    names = dict.fromkeys(name for config in runs for name in (HELD_OUT, *config.evaluate.variants))
    shown = study.report.evaluations or [
        name for name in names if name == HELD_OUT or all(name in config.evaluate.variants for config in runs)
    ]
    return StudyFigures(
        study=study.name,
        question=study.question,
        baseline=study.baseline,
        reach=study.report.reach,
        evaluations=tuple(
            evaluation_figures(
                name,
                {arm: [_outcome(config, name) for config in configs] for arm, configs in by_arm.items()},
                baseline=study.baseline,
                metrics=study.report.metrics,
            )
            for name in shown
        ),
        curves=tuple(
            learning_curve(arm, [_course(config) for config in configs], reach=study.report.reach)
            for arm, configs in by_arm.items()
        ),
    )


def markdown(figures: StudyFigures) -> str:
    """The results as a page: a table for each evaluation."""
    tables = (_table(evaluation, figures) for evaluation in figures.evaluations)
    return "\n\n".join([f"# {figures.study}", *([figures.question] if figures.question else []), *tables]) + "\n"


def _table(evaluation: EvaluationFigures, figures: StudyFigures) -> str:
    metrics = list(dict.fromkeys(metric for arm in evaluation.arms for metric in arm.metrics))
    compared = {comparison.arm: comparison for comparison in evaluation.comparisons}
    curves = {curve.arm: curve for curve in figures.curves} if evaluation.name == HELD_OUT else {}
    heads = ["arm", "seeds", "before", "success [95 %]", "interquartile mean [95 %]", "context, tokens [95 %]"]
    heads += [f"success − {figures.baseline} [95 %]", f"P(better than {figures.baseline}) [95 %]", "context ratio"]
    heads += [f"steps to {figures.reach:g}"] if curves else []
    rows = [_row(arm, compared.get(arm.arm), curves.get(arm.arm), metrics) for arm in evaluation.arms]
    lines = (f"| {' | '.join(cells)} |" for cells in ([*heads, *metrics], ["---"] * len([*heads, *metrics]), *rows))
    title = f"## {evaluation.name}: {counted(evaluation.problems, 'problem')}"
    return "\n".join([title, "", *lines])


def _row(
    arm: ArmFigures, comparison: ArmComparison | None, curve: LearningCurve | None, metrics: Sequence[str]
) -> list[str]:
    cells = [arm.arm, str(len(arm.seeds)), f"{arm.success_before:.3f}", f"{arm.success:.3f}", f"{arm.success_iqm:.3f}"]
    cells += [f"{arm.context_before:.1f} → {arm.context:.1f}"]
    if comparison is None:
        cells += ["–"] * 3
    else:
        cells += [f"{comparison.difference:+.3f}", f"{comparison.improvement:.2f}"]
        cells += [f"{comparison.context_ratio:.2f}"]
    cells += [_reached(curve)] if curve else []
    return cells + [f"{arm.metrics[metric]:.3f}" if metric in arm.metrics else "–" for metric in metrics]


def _reached(curve: LearningCurve) -> str:
    """``40 (4 of 5)``: the median over the seeds that reached it, and how many did."""
    steps = [step for step in curve.reached.values() if step is not None]
    return f"{median(steps):g} ({len(steps)} of {len(curve.reached)})" if steps else f"– (0 of {len(curve.reached)})"


def _outcome(config: RunConfig, evaluation: str) -> SeedOutcome:
    """One evaluation of a run, from its trajectories and metrics."""
    folder = RunFolder(Path(config.runs_dir) / config.name)
    success, context = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for scored in read_trajectories(folder.evaluation(config.train.steps, evaluation)).trajectories:
        figures = scored.figures
        success[figures.problem_id].append(figures.correct)
        context[figures.problem_id].append(float(figures.context_tokens))
    lines = {line["step"]: line for line in _evaluated(folder)}
    before, after = (_metrics(lines[step], evaluation) for step in (0, config.train.steps))
    return SeedOutcome(seed=config.seed, success=_means(success), context=_means(context), before=before, after=after)


def _metrics(line: Mapping[str, float], evaluation: str) -> dict[str, float]:
    """The metrics of one evaluation in a line of all."""
    prefix = f"{metric_prefix(evaluation)}/"
    return {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}


def _course(config: RunConfig) -> SeedCurve:
    lines = _evaluated(RunFolder(Path(config.runs_dir) / config.name))
    return SeedCurve(seed=config.seed, success={int(line["step"]): line["eval/success"] for line in lines})


def _evaluated(folder: RunFolder) -> Iterator[dict[str, float]]:
    yield from (line for line in read_metrics(folder.metrics) if "eval/success" in line)


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {problem: fmean(own) for problem, own in values.items()}
