"""The picture of a run: ``report.png``, drawn from its metrics."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from condensegrpo.config.resumed import Change
from condensegrpo.reporting.curves import PANELS, SHARES, Diagram, Metrics, Panel, series, variants
from condensegrpo.reporting.plots import HELD_OUT, TRAIN, alone, arm_style, smoothed, window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ((TRAIN, "-"), (HELD_OUT, "--"), ("#009E73", "-."), ("#CC79A7", ":"))


def draw_run(metrics: Metrics, changes: Sequence[Change], *, title: str, file: Path) -> None:
    """Write the diagrams of a run to an image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7.2), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)  # not pyplot, which keeps figures alive and looks for a display
    figure.suptitle(title, fontsize=15, fontweight="bold", x=0.01, ha="left")
    # a constrained layout would draw everything twice
    figure.subplots_adjust(left=0.045, right=0.99, bottom=0.12, top=0.9, wspace=0.2, hspace=0.36)
    diagrams = figure.subplots(2, 4)
    for axes, panel in zip(diagrams[:, :3].flat, PANELS, strict=True):
        _panel(axes, panel, metrics)
    for axes, shares in zip(diagrams[:, 3], SHARES, strict=True):
        _shares(axes, shares, metrics)
    _mark(figure, diagrams.flat, [change for change in changes if change.learned])
    figure.savefig(file)


def _mark(figure: "Figure", diagrams: "Iterable[Axes]", changes: Sequence[Change]) -> None:
    """A dotted line where a resume changed what is learned, half a step before; the keys below all diagrams."""
    keys: dict[int, list[str]] = {}
    for change in changes:
        keys.setdefault(change.first_step, []).append(str(change))
    for axes in diagrams:
        for step in keys if axes.lines else ():
            axes.axvline(step - 0.5, color="#222222", linestyle=":", linewidth=1.2)
    if keys:
        texts = (f"changed from step {step} on: {', '.join(changed)}" for step, changed in keys.items())
        text = f"dotted lines: {'; '.join(texts)}"
        figure.supxlabel(text, fontsize=9, x=0.01, ha="left", wrap=True, parse_math=False)


def _panel(axes: "Axes", panel: Panel, metrics: Metrics) -> None:
    train = series(metrics, panel.metric)
    if train.steps:
        length = window(train)
        if length > 1:  # pale measured values under their running mean: a batch is a small sample
            axes.plot(train.steps, train.values, color=TRAIN, alpha=0.25, linewidth=1)
        label = f"training, mean of {length} steps" if length > 1 else "training"
        values = smoothed(train.values, length)
        axes.plot(train.steps, values, color=TRAIN, linewidth=1.8, label=label, **_lone_marks(values))
    _held_out(axes, panel, metrics)
    if panel.metric == "success":
        axes.set_ylim(-0.03, 1.03)
    elif axes.has_data():
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _finish(axes, panel.title, panel.unit)


def _shares(axes: "Axes", shares: Diagram, metrics: Metrics) -> None:
    for (metric, label), (colour, style) in zip(shares.lines, STYLES[: len(shares.lines)], strict=True):
        line = series(metrics, metric)
        if line.steps:
            values = smoothed(line.values, window(line))
            marks = _lone_marks(values)
            axes.plot(line.steps, values, color=colour, linestyle=style, linewidth=1.6, label=label, **marks)
    axes.set_ylim(-0.03, 1.6)  # the legend stands above the curves
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    _finish(axes, shares.title, shares.unit, legend="upper left")


def _lone_marks(values: Sequence[float]) -> dict[str, Any]:
    """The markers of a curve in training: only where no line would be seen, so that most have none in the legend."""
    return {"marker": "o", "markevery": lone} if (lone := alone(values)) else {}


def _finish(axes: "Axes", title: str, unit: str, *, legend: str = "best") -> None:
    """Titles, labels, grid and legend, the same for all diagrams."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", y=1.0)
    axes.set_ylabel(unit, fontsize=9, color="#555555")
    axes.set_xlabel("optimiser steps", fontsize=9, color="#555555")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors="#555555")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#bbbbbb")
    if axes.has_data():
        axes.legend(fontsize=8.5, frameon=False, loc=legend)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="#999999")


def _held_out(axes: "Axes", panel: Panel, metrics: Metrics) -> None:
    held_out = series(metrics, f"eval/{panel.metric}")
    if held_out.steps:
        axes.plot(*held_out, **arm_style(0), markersize=5, linewidth=1.6, linestyle="--", label="held-out")
        low, high = series(metrics, f"eval/{panel.metric}_low"), series(metrics, f"eval/{panel.metric}_high")
        if low.steps and low.steps == high.steps:
            axes.fill_between(low.steps, low.values, high.values, color=HELD_OUT, alpha=0.15, linewidth=0)
    if panel.varied:
        for number, name in enumerate(variants(metrics), start=2):  # held-out is arm 0, training has the next colour
            key = f"eval/{name}/{panel.metric}"
            line, low, high = series(metrics, key), series(metrics, f"{key}_low"), series(metrics, f"{key}_high")
            style = arm_style(number)
            if line.steps:
                axes.plot(*line, **style, markersize=5, linewidth=1.2, linestyle=":", label=name)
            if line.steps and line.steps == low.steps == high.steps:
                axes.vlines(line.steps, low.values, high.values, color=style["color"], linewidth=1.2)
