"""Every table of docs/reference/estimators.md, and its plot, from the package's own functions.

    python docs/scripts/algorithms.py                              prints the tables, as they stand in the page
    python docs/scripts/algorithms.py --plot docs/images/advantage.svg    draws the plot

A test compares tables and page.
"""

import argparse
import inspect
from collections.abc import Mapping
from pathlib import Path

from algorithms_context import draw_plot, pressure_table, reward_table, unscaled_table
from algorithms_example import (
    advantage_table,
    group_table,
    importance_table,
    kl_table,
    loss_table,
    together_table,
    weight_table,
)
from algorithms_parts import table

from condensegrpo.algorithms.advantages import EstimatorPlugin
from condensegrpo.algorithms.losses import LossPlugin
from condensegrpo.assembly.learning_signal import declared

ANCHORS = {
    "context_low": "1/16 of the budget",
    "context_high": "the budget",
}  # see assembly/learning_signal.py


def tables() -> dict[str, str]:
    """Every table that the page quotes."""
    return {
        "Estimators": choices_table("estimator", declared("estimators")),
        "Losses": choices_table("loss", declared("losses")),
        "Rewards": reward_table(),
        "Pressure": pressure_table(),
        "Pressure without scaling": unscaled_table(),
        "Example: the group": group_table(),
        "Example: advantages": advantage_table(),
        "Example: weights": weight_table(),
        "Example: losses": loss_table(),
        "Example: KL": kl_table(),
        "Example: importance": importance_table(),
        "Example: put together": together_table(),
    }


def choices_table(kind: str, plugins: Mapping[str, EstimatorPlugin | LossPlugin]) -> str:
    """Names, what they are in a line, and their options with defaults."""
    rows = [[f"[`{name}`](#{kind}-{name})", plugin.summary, options_of(plugin)] for name, plugin in plugins.items()]
    return table([kind, "", "options and defaults"], rows)


def options_of(plugin: EstimatorPlugin | LossPlugin) -> str:
    """What a configuration may set, with defaults."""
    parameters = inspect.signature(plugin.function).parameters
    defaults = ((name, ANCHORS.get(name, _plain(parameters[name].default))) for name in plugin.options)
    return ", ".join(f"`{name}` {default}" for name, default in defaults) or "–"


def _plain(value: object) -> str:
    return "none" if value is None else str(value).replace("e-0", "e-")


def main() -> None:
    """Print the tables, or draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the plot there instead")
    path = parser.parse_args().plot
    if path is not None:
        draw_plot(path)
        return
    print("\n\n".join(f"# {title}\n\n{text}" for title, text in tables().items()))


if __name__ == "__main__":
    main()
