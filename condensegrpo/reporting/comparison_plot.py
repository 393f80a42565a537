"""The plot of a comparison: success against prompt tokens, as PNG and SVG."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from condensegrpo.evaluation.comparison import Comparison, Figures
from condensegrpo.reporting.run_report import HELD_OUT, MARKERS, TRAIN, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (HELD_OUT, TRAIN, *VARIANTS, "#000000", "#999999")


class _Look(NamedTuple):
    label: str
    colour: str
    marker: str


def plot(comparison: Comparison, stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``: a line per condenser, a point per budget, 95 % intervals as bars."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "condensegrpo", "svg.fonttype": "none", "font.size": 9}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        lines: dict[str, list[Figures]] = defaultdict(list)
        for figures in comparison.figures:
            lines[figures.contender.label].append(figures)
        for index, (label, points) in enumerate(lines.items()):
            look = _Look(label, COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)])
            _line(panels[0], [point.peak_tokens for point in points], points, look)
            _line(panels[1], [point.summed_tokens for point in points], points, look)
        panels[0].set_ylabel("success, 95 % interval")
        panels[0].set_xlabel("largest context, tokens")
        panels[1].set_xlabel("sum of all contexts, tokens")
        for panel in panels:
            panel.set_ylim(-0.03, 1.03)
            panel.grid(alpha=0.3)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        figure.suptitle(
            f"problems: {comparison.problems}, samples per problem: {comparison.samples}, seed: {comparison.seed}",
            fontsize=9,
        )
        paths = (stem.with_suffix(".png"), stem.with_suffix(".svg"))
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _line(axes: "Axes", tokens: list[float], points: list[Figures], look: _Look) -> None:
    low = [point.success.mean - _known(point.success.low, point.success.mean) for point in points]
    high = [_known(point.success.high, point.success.mean) - point.success.mean for point in points]
    axes.errorbar(
        tokens,
        [point.success.mean for point in points],
        yerr=[low, high],
        capsize=3,
        markersize=5,
        color=look.colour,
        marker=look.marker,
        label=look.label,
    )


def _known(bound: float | None, mean: float) -> float:
    return mean if bound is None else bound
