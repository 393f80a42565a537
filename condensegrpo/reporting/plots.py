"""The pictures of a comparison of condensers, of several runs and of a study; the palette that all plots share."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from condensegrpo.core.errors import RunError
from condensegrpo.evaluation.comparison import Comparison, ContenderFigures
from condensegrpo.evaluation.study import StudyFigures
from condensegrpo.metrics.estimates import Interval
from condensegrpo.reporting.curves import Series, series
from condensegrpo.reporting.runs import RunComparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/): distinguishable when colour-blind and in greyscale
TRAIN = "#0072B2"
HELD_OUT = "#D55E00"
COLOURS = (HELD_OUT, TRAIN, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")  # one more than colours: 72 arms differ
MARKS = 8  # on a curve, about
COLUMNS = 4  # of diagrams in the picture of several runs


def plot_comparison(comparison: Comparison, stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``: a line per condenser, a point per budget, 95 % intervals as bars."""
    with canvas(9, 4) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        lines: dict[str, list[ContenderFigures]] = defaultdict(list)
        for figures in comparison.figures:
            lines[figures.contender.label].append(figures)
        for index, (label, points) in enumerate(lines.items()):
            success = [point.success for point in points]
            peaks, sums = [point.peak_tokens for point in points], [point.prompt_tokens for point in points]
            for panel, tokens in zip(panels, (peaks, sums), strict=True):
                _points(panel, tokens, success, label=label, **arm_style(index))
        panels[0].set_ylabel("success, 95 % interval")
        panels[0].set_xlabel("largest context, tokens")
        panels[1].set_xlabel("sum of all contexts, tokens")
        for panel in panels:
            panel.set_ylim(-0.03, 1.03)
            panel.set_xlim(left=0)
            panel.grid(alpha=0.3)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        figure.suptitle(
            f"problems: {comparison.problems}, samples per problem: {comparison.samples}, seed: {comparison.seed}",
            fontsize=9,
        )
        return save_figure(figure, stem)


def plot_runs(compared: RunComparison, curves: Sequence[tuple[str, str]], file: Path) -> None:
    """Draw metrics over optimiser steps, a panel for each metric and title, and a line for each run.

    Raises:
        RunError: the file cannot be written, or its ending names no format.
    """
    measured = [each for each in curves if any(series(lines, each[0]).steps for lines in compared.metrics)]
    rows = max(1, -(-len(measured) // COLUMNS))
    with canvas(14, 3.4 * rows) as figure:
        panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
        for panel, (metric, title) in zip(panels, measured, strict=False):
            for number, (run, lines) in enumerate(zip(compared.runs, compared.metrics, strict=True)):
                line = series(lines, metric)
                low, high = series(lines, f"{metric}_low"), series(lines, f"{metric}_high")
                banded = bool(line.steps) and line.steps == low.steps == high.steps  # of an evaluation
                values = line.values if banded else smoothed(line.values, window(line))
                style, marks = arm_style(number), marked(values, number)
                panel.plot(line.steps, values, label=run, markersize=5, markevery=marks, **style)
                if banded:
                    panel.fill_between(
                        line.steps, low.values, high.values, color=style["color"], alpha=0.15, linewidth=0
                    )
            panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
            panel.set_title(title, loc="left")
            panel.set_xlabel("optimiser steps")
            panel.grid(alpha=0.3)
        for panel in list(figure.axes)[len(measured) :]:
            panel.remove()
        if measured:
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        save_picture(figure, file)


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
        _points(axes, ticks, intervals, linewidth=1, label=curve.arm, **_style(figures, curve.arm))
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("evaluation; bars: 95 % over seeds and problems")


def _frontier(axes: "Axes", figures: StudyFigures) -> None:
    for arm in figures.evaluations[0].arms:
        context, style = bars([arm.context]), _style(figures, arm.arm)
        _points(axes, [arm.context.mean], [arm.success], xerr=context, markersize=6, **style)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"largest context, tokens ({figures.evaluations[0].name})")


def _points(axes: "Axes", at: Sequence[float], success: Sequence[Interval], **style: Any) -> None:  # noqa: ANN401  matplotlib's
    """Means, with their intervals as bars."""
    means = [interval.mean for interval in success]
    axes.errorbar(at, means, yerr=bars(success), capsize=3, **{"markersize": 5, **style})


def arm_style(number: int) -> dict[str, Any]:
    """Colour and marker of a run, an arm or a condenser, by its number: the same in all plots."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def marked(values: Sequence[float], number: int) -> list[int]:
    """The indices of the values of a curve that get its marker: a few, at other steps in each curve, and lone ones."""
    stride = max(1, len(values) // MARKS)
    return sorted({*range(number % stride, len(values), stride), *alone(values)})


def alone(values: Sequence[float]) -> list[int]:
    """The indices of the values that no line leads to or from: without a marker they would be invisible."""
    known = [not math.isnan(value) for value in values]
    beside = zip([False, *known], known, [*known[1:], False], strict=False)
    return [index for index, around in enumerate(beside) if around == (False, True, False)]


@contextmanager
def canvas(width: float, height: float) -> Iterator["Figure"]:
    """A figure of a size in inches, with small letters and no formulas: a label may have dollars.

    In an SVG, texts are texts and equal parts have equal names.
    """
    import matplotlib
    from matplotlib.figure import Figure

    texts = {"font.size": 9, "text.parse_math": False, "svg.fonttype": "none"}
    with matplotlib.rc_context({"svg.hashsalt": "condensegrpo", **texts}):
        yield Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``."""
    paths = (stem.with_suffix(".png"), stem.with_suffix(".svg"))
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def save_picture(figure: "Figure", file: Path) -> None:
    """Write one file, in the format that its ending names.

    Raises:
        RunError: it cannot be written, or its ending names no format.
    """
    try:
        figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise RunError(f"drawing {file}: {error}. Give a file that ends in .svg or .png.") from error


def bars(intervals: Sequence[Interval]) -> list[list[float]]:
    """The lengths of error bars below and above the means."""
    return [[abs(i.mean - i.low) for i in intervals], [abs(i.high - i.mean) for i in intervals]]


def window(line: Series) -> int:
    """The length of a curve's running mean, in values."""
    return max(1, len(line.values) // 12)


def smoothed(values: Sequence[float], window: int) -> tuple[float, ...]:
    """The mean of each value and the known ones of up to ``window`` − 1 values before it; NaN stays NaN."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return tuple(
        math.nan if math.isnan(part[-1]) else fmean(value for value in part if not math.isnan(value)) for part in parts
    )
