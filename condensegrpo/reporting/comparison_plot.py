"""The plot of a comparison: success against prompt tokens, as PNG and SVG."""

from collections import defaultdict
from pathlib import Path

from condensegrpo.evaluation.comparison import Comparison, ContenderFigures
from condensegrpo.reporting.run_plot import HELD_OUT, MARKERS, TRAIN, VARIANTS

COLOURS = (HELD_OUT, TRAIN, *VARIANTS, "#000000", "#999999")


def plot(comparison: Comparison, stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``: a line per condenser, a point per budget, 95 % intervals as bars."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "condensegrpo", "svg.fonttype": "none", "font.size": 9}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        lines: dict[str, list[ContenderFigures]] = defaultdict(list)
        for figures in comparison.figures:
            lines[figures.contender.label].append(figures)
        for index, (label, points) in enumerate(lines.items()):
            means = [point.success.mean for point in points]
            low, high = (
                [abs(bound - mean) for bound, mean in zip(bounds, means, strict=True)]
                for bounds in ([point.success.low for point in points], [point.success.high for point in points])
            )
            peaks, sums = [point.peak_tokens for point in points], [point.summed_tokens for point in points]
            for panel, tokens in zip(panels, (peaks, sums), strict=True):
                panel.errorbar(
                    tokens,
                    means,
                    yerr=[low, high],
                    capsize=3,
                    markersize=5,
                    color=COLOURS[index % len(COLOURS)],
                    marker=MARKERS[index % len(MARKERS)],
                    label=label,
                )
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
