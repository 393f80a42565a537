"""What all plots share: a palette, error bars, running means, and files that are the same for the same figures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.metrics.estimates import Interval
from condensegrpo.reporting.curves import Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/): distinguishable when colour-blind and in greyscale
TRAIN = "#0072B2"
HELD_OUT = "#D55E00"
VARIANTS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")
OTHERS = ("#000000", "#999999")
MARKERS = ("s", "^", "D", "v")


@contextmanager
def settings() -> Iterator[None]:
    """Draw with small letters and, in an SVG, with texts as texts and the same names for the same parts."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "condensegrpo", "svg.fonttype": "none", "font.size": 9}):
        yield


def save(figure: "Figure", stem: Path) -> tuple[Path, ...]:
    """Write ``<stem>.png`` and ``<stem>.svg``."""
    paths = (stem.with_suffix(".png"), stem.with_suffix(".svg"))
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def bars(intervals: Sequence[Interval]) -> list[list[float]]:
    """The lengths of error bars below and above the means."""
    return [[abs(i.mean - i.low) for i in intervals], [abs(i.high - i.mean) for i in intervals]]


def window(line: Series) -> int:
    """The length of a curve's running mean, in values."""
    return max(1, len(line.values) // 12)


def smoothed(values: Sequence[float], window: int) -> tuple[float, ...]:
    """The mean of each value and up to ``window`` − 1 values before it."""
    return tuple(
        sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)
    )
