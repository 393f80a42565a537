"""Prints the table of a benchmark: drawn on a terminal, as Markdown (which docs/results has) into a file or pipe."""

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console

from condensegrpo.display.tables import table


def show(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table under its title; an empty title is left out."""
    if sys.stdout.isatty():
        Console().print(table(title, heads, lines))
        return
    rows = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *lines)]
    print("\n".join([*([title, ""] if title else []), *rows]), end="\n\n", flush=True)


class Target(NamedTuple):
    """A figure that is to be reached."""

    name: str
    measured: float
    bound: float
    at_least: bool = False  # else at most

    @property
    def line(self) -> list[str]:
        """Of the table of targets."""
        met = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        bound = f"{'≥' if self.at_least else '≤'} {self.bound:g}"
        return [self.name, bound, f"{self.measured:.3f}", "yes" if met else "no"]


def show_targets(targets: Iterable[Target]) -> None:
    """Print which targets are met."""
    show("", ["target", "bound", "measured", "met"], [target.line for target in targets])
