"""The curves of several runs over each other, as one picture."""

from collections.abc import Sequence
from pathlib import Path

from condensegrpo.core.errors import RunError
from condensegrpo.reporting.curves import series
from condensegrpo.reporting.plotting import HELD_OUT, OTHERS, TRAIN, VARIANTS, settings, smoothed, window
from condensegrpo.reporting.runs import RunComparison

COLOURS = (TRAIN, HELD_OUT, *VARIANTS, *OTHERS)
STYLES = ("-", "--", "-.", ":")
COLUMNS = 4


def draw(compared: RunComparison, curves: Sequence[tuple[str, str]], file: Path) -> None:
    """Draw metrics over optimiser steps, a panel for each metric and title, and a line for each run.

    Raises:
        RunError: the file cannot be written, or its ending names no format.
    """
    with settings():
        from matplotlib.figure import Figure

        measured = [each for each in curves if any(series(lines, each[0]).steps for lines in compared.metrics)]
        rows = max(1, -(-len(measured) // COLUMNS))
        figure = Figure(figsize=(14, 3.4 * rows), layout="constrained")
        panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
        for panel, (metric, title) in zip(panels, measured, strict=False):
            for place, (run, lines) in enumerate(zip(compared.runs, compared.metrics, strict=True)):
                line = series(lines, metric)
                values = smoothed(line.values, window(line))
                style = STYLES[place // len(COLOURS) % len(STYLES)]
                panel.plot(line.steps, values, color=COLOURS[place % len(COLOURS)], linestyle=style, label=run)
            panel.set_title(title, loc="left")
            panel.set_xlabel("optimiser steps")
            panel.grid(alpha=0.3)
        for panel in list(figure.axes)[len(measured) :]:
            panel.remove()
        if measured:
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        try:
            figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            raise RunError(f"drawing {file}: {error}. Give a file that ends in .svg or .png.") from error
