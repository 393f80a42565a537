"""The plot of a comparison: success against prompt tokens, as PNG and SVG."""

from collections import defaultdict
from pathlib import Path

from condensegrpo.evaluation.comparison import Comparison, ContenderFigures
from condensegrpo.reporting.plotting import HELD_OUT, MARKERS, OTHERS, TRAIN, VARIANTS, bars, save, settings

COLOURS = (HELD_OUT, TRAIN, *VARIANTS, *OTHERS)


def plot(comparison: Comparison, stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``: a line per condenser, a point per budget, 95 % intervals as bars."""
    with settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        lines: dict[str, list[ContenderFigures]] = defaultdict(list)
        for figures in comparison.figures:
            lines[figures.contender.label].append(figures)
        for index, (label, points) in enumerate(lines.items()):
            success = [point.success for point in points]
            peaks, sums = [point.peak_tokens for point in points], [point.summed_tokens for point in points]
            for panel, tokens in zip(panels, (peaks, sums), strict=True):
                panel.errorbar(
                    tokens,
                    [interval.mean for interval in success],
                    yerr=bars(success),
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
        return save(figure, stem)
