"""The plot of a study, as PNG and SVG: success against context, success by evaluation, learning curves."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from condensegrpo.evaluation.study import StudyFigures
from condensegrpo.reporting.comparison_plot import COLOURS
from condensegrpo.reporting.plotting import MARKERS, bars, save, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(figures: StudyFigures, stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``; intervals are 95 % over seeds and problems, bands over seeds."""
    with settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(14, 4.2), layout="constrained")
        curves, lengths, frontier = figure.subplots(1, 3, sharey=True)
        _curves(curves, figures)
        _by_evaluation(lengths, figures)
        _frontier(frontier, figures)
        for axes in (curves, lengths, frontier):
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
        curves.set_ylabel("success on held-out problems")
        figure.legend(*lengths.get_legend_handles_labels(), loc="outside right upper")
        figure.suptitle(figures.study, fontsize=10, parse_math=False)
        return save(figure, stem)


def _style(figures: StudyFigures, arm: str) -> dict[str, Any]:
    """Colour and marker of an arm, the same in all diagrams."""
    at = [curve.arm for curve in figures.curves].index(arm)
    return {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)]}


def _curves(axes: "Axes", figures: StudyFigures) -> None:
    for curve in figures.curves:
        steps, style = [point.step for point in curve.points], _style(figures, curve.arm)
        axes.plot(steps, [point.success.mean for point in curve.points], markersize=4, label=curve.arm, **style)
        low, high = ([getattr(point.success, end) for point in curve.points] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel("optimiser steps; bands: 95 % over seeds")


def _by_evaluation(axes: "Axes", figures: StudyFigures) -> None:
    """A line per arm over the evaluations, slightly apart."""
    names = [evaluation.name for evaluation in figures.evaluations]
    for number, curve in enumerate(figures.curves):
        points = [
            (at, arm.success)
            for at, evaluation in enumerate(figures.evaluations)
            for arm in evaluation.arms
            if arm.arm == curve.arm
        ]
        shift = 0.04 * (number - (len(figures.curves) - 1) / 2)
        intervals = [interval for _, interval in points]
        axes.errorbar(
            [at + shift for at, _ in points],
            [interval.mean for interval in intervals],
            yerr=bars(intervals),
            capsize=3,
            markersize=5,
            linewidth=1,
            label=curve.arm,
            **_style(figures, curve.arm),
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("evaluation; bars: 95 % over seeds and problems")


def _frontier(axes: "Axes", figures: StudyFigures) -> None:
    for arm in figures.evaluations[0].arms:
        axes.errorbar(
            [arm.context.mean],
            [arm.success.mean],
            xerr=bars([arm.context]),
            yerr=bars([arm.success]),
            capsize=3,
            markersize=6,
            **_style(figures, arm.arm),
        )
    axes.set_xlabel(f"largest context, tokens ({figures.evaluations[0].name})")
