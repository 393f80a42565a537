"""The curves of runs, and the pictures of runs and comparisons, in one palette."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from condensegrpo.config.load import HELD_OUT
from condensegrpo.core.errors import RunError
from condensegrpo.evaluation.figures import Comparison, ContenderFigures, evaluations_in
from condensegrpo.metrics.intervals import Interval
from condensegrpo.reporting.runs import RunComparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Metrics = Sequence[Mapping[str, float]]
Pairs = tuple[tuple[str, str], ...]
# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/): distinguishable when colour-blind and in greyscale
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")  # one more than colours: 72 arms differ
MARKS = 8  # on a curve, about
COLUMNS = 4  # of diagrams in the picture of several runs
SMOOTHED = 12  # parts of a curve, of which one is the length of its running mean


class Panel(NamedTuple):
    """One diagram: a metric over optimiser steps, in training and on held-out problems."""

    metric: str
    title: str
    unit: str
    varied: bool = False  # also for the variants; the lengths of variants would only compress the scale


PANELS = (
    Panel("success", "Success", "share of trajectories", varied=True),
    Panel("context_tokens", "Largest context", "tokens, mean over trajectories", varied=True),
    Panel("reward", "Reward", "mean over trajectories"),
    Panel("output_tokens", "Output length", "tokens per trajectory"),
    Panel("turns", "Turns", "replies per trajectory"),
    Panel("grad_norm", "Gradient norm", "before clipping"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """One diagram of several metrics."""

    title: str
    unit: str
    lines: Pairs  # metric and label


SHARES = (  # of the training batches
    Diagram(
        title="Signal",
        unit="share of groups or trajectories",
        lines=(
            ("groups_of_equal_reward", "groups without signal"),
            ("trajectories_without_advantage", "trajectories without gradient"),
            ("correct_with_negative_advantage", "correct with negative advantage"),
            ("masked", "masked trajectories"),
        ),
    ),
    Diagram(
        title="Credit",
        unit="share of the batch",
        lines=(
            ("weight/correct", "weight on correct"),
            ("update/correct", "gradient weight on correct"),
            ("weight/gini", "Gini of the weights"),
        ),
    ),
)


class Series(NamedTuple):
    """A line of a diagram."""

    steps: tuple[float, ...]
    values: tuple[float, ...]  # NaN: not measured


def series(metrics: Metrics, key: str) -> Series:
    """The steps and values of a metric from its first value to its last; the later of two values at one step counts.

    A step between them that was logged without the metric has the value NaN: a gap of the line. Training is logged at
    other steps than an evaluation.
    """
    known = {line["step"]: line[key] for line in metrics if key in line and "step" in line}
    if not known:
        return Series((), ())
    prefix, *names = key.split("/")
    marks = (f"eval/{names[0]}/success", "eval/success") if prefix == "eval" and names else ()
    mark = next((each for each in marks if any(each in line for line in metrics)), None)
    if mark is not None:  # every line of that evaluation has it
        lines = [line for line in metrics if mark in line]
    else:
        lines = [line for line in metrics if any(name != "step" and not name.startswith("eval/") for name in line)]
    logged = {line["step"] for line in lines if "step" in line}
    first, last = min(known), max(known)
    steps = tuple(sorted({step for step in logged if first < step < last} | known.keys()))
    return Series(steps, tuple(known.get(step, math.nan) for step in steps))


def variants(metrics: Metrics) -> tuple[str, ...]:
    """The names of the evaluation variants: k20 of ``eval/k20/success``."""
    names = evaluations_in(key for line in metrics for key in line)
    return tuple(name for name in names if name != HELD_OUT)


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
                success_points(panel, tokens, success, label=label, **arm_style(index))
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
    """Draw metrics over optimiser steps, a panel for each metric and title, and a line for each run."""
    from matplotlib.ticker import MaxNLocator

    measured = [each for each in curves if any(series(lines, each[0]).steps for lines in compared.metrics)]
    rows = max(1, -(-len(measured) // COLUMNS))
    with canvas(14, 3.4 * rows) as figure:
        panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
        for panel, (metric, title) in zip(panels, measured, strict=False):
            for number, (run, lines) in enumerate(zip(compared.runs, compared.metrics, strict=True)):
                line = series(lines, metric)
                low, high = series(lines, f"{metric}_low"), series(lines, f"{metric}_high")
                banded = bool(line.steps) and line.steps == low.steps == high.steps  # of an evaluation
                title += ", 95 % intervals" * (banded and not title.endswith("intervals"))
                values = line.values if banded else smoothed(line.values, max(1, len(line.values) // SMOOTHED))
                style, marks = arm_style(number), marked(values, number)
                panel.plot(line.steps, values, label=run, markersize=5, markevery=marks, **style)
                if banded:
                    panel.fill_between(
                        line.steps, low.values, high.values, color=style["color"], alpha=0.15, linewidth=0
                    )
            panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
            panel.set_title(title, loc="left")
            panel.set_xlabel("optimiser steps")
            panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
            panel.grid(alpha=0.3)
        for panel in list(figure.axes)[len(measured) :]:
            panel.remove()
        if measured:
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        save_picture(figure, file)


def success_points(axes: "Axes", at: Sequence[float], success: Sequence[Interval], **style: Any) -> None:  # noqa: ANN401  matplotlib's
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
    """Write one file, in the format that its ending names."""
    try:
        figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise RunError(f"drawing {file}: {error}. Give a file that ends in .svg or .png.") from error


def bars(intervals: Sequence[Interval]) -> list[list[float]]:
    """The lengths of error bars below and above the means."""
    return [[abs(i.mean - i.low) for i in intervals], [abs(i.high - i.mean) for i in intervals]]


def smoothed(values: Sequence[float], window: int) -> tuple[float, ...]:
    """The mean of each value and the known ones of up to ``window`` − 1 values before it; NaN stays NaN."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return tuple(
        math.nan if math.isnan(part[-1]) else fmean(value for value in part if not math.isnan(value)) for part in parts
    )
