"""The picture of a study."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from condensegrpo.reporting.plots import arm_style, bars, canvas, save_figure, success_points
from condensegrpo.studies.lab.figures import StudyFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_study(figures: StudyFigures, stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``; intervals are 95 % over seeds and problems, bands over seeds."""
    with canvas(14, 4.2) as figure:
        curves, lengths, frontier = figure.subplots(1, 3, sharey=True)
        _curves(curves, figures)
        _by_evaluation(lengths, figures)
        _frontier(frontier, figures)
        for axes in (curves, lengths, frontier):
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
        curves.set_ylabel("success on held-out problems")
        figure.legend(*lengths.get_legend_handles_labels(), loc="outside right upper")
        figure.suptitle(figures.study, fontsize=10)
        return save_figure(figure, stem)


def _style(figures: StudyFigures, arm: str) -> dict[str, Any]:
    """How an arm is drawn, the same in all diagrams."""
    return arm_style([curve.arm for curve in figures.curves].index(arm))


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
        ticks, intervals = [at + shift for at, _ in points], [interval for _, interval in points]
        success_points(axes, ticks, intervals, linewidth=1, label=curve.arm, **_style(figures, curve.arm))
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("evaluation; bars: 95 % over seeds and problems")


def _frontier(axes: "Axes", figures: StudyFigures) -> None:
    for arm in figures.evaluations[0].arms:
        context, style = bars([arm.context]), _style(figures, arm.arm)
        success_points(axes, [arm.context.mean], [arm.success], xerr=context, markersize=6, **style)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"largest context, tokens ({figures.evaluations[0].name})")
