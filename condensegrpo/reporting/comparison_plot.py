"""The picture of a comparison: success against the tokens that were read, as PNG and SVG."""

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


def plot(found: Comparison, stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``: one line a condenser, one point a budget, 95 % intervals as bars."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "condensegrpo", "svg.fonttype": "none", "font.size": 9}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        lines: dict[str, list[Figures]] = defaultdict(list)
        for one in found.figures:
            lines[one.contender.label].append(one)
        for place, (label, its) in enumerate(lines.items()):
            look = _Look(label, COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)])
            _line(panels[0], [one.peak_tokens for one in its], its, look)
            _line(panels[1], [one.summed_tokens for one in its], its, look)
        panels[0].set_ylabel("success, 95 % interval")
        panels[0].set_xlabel("largest context, tokens")
        panels[1].set_xlabel("all contexts together, tokens")
        for panel in panels:
            panel.set_ylim(-0.03, 1.03)
            panel.grid(alpha=0.3)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        figure.suptitle(f"{found.problems} problems × {found.samples}, seed {found.seed}", fontsize=9)
        paths = (stem.with_suffix(".png"), stem.with_suffix(".svg"))
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _line(axes: "Axes", tokens: list[float], its: list[Figures], look: _Look) -> None:
    low = [one.success.mean - _known(one.success.low, one.success.mean) for one in its]
    high = [_known(one.success.high, one.success.mean) - one.success.mean for one in its]
    axes.errorbar(
        tokens,
        [one.success.mean for one in its],
        yerr=[low, high],
        capsize=3,
        markersize=5,
        color=look.colour,
        marker=look.marker,
        label=look.label,
    )


def _known(bound: float | None, mean: float) -> float:
    return mean if bound is None else bound
