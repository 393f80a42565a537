"""Prints the table of a benchmark: drawn on a terminal, as Markdown (which docs/results has) into a file or pipe."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def show(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table under its title; an empty title is left out."""
    if sys.stdout.isatty():
        drawn = Table(*heads, title=title, title_justify="left")
        for line in lines:
            drawn.add_row(*line)
        Console().print(drawn)
        return
    rows = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *lines)]
    print("\n".join([*([title, ""] if title else []), *rows]), end="\n\n", flush=True)
