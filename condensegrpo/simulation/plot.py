"""The picture of a sweep: seconds a step and busy servers over its first key, a line for each value of the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from condensegrpo.reporting.plots import arm_style, canvas, save_picture
from condensegrpo.simulation.server import State
from condensegrpo.simulation.simulate import Simulation


def plot_sweep(results: Sequence[tuple[Mapping[str, str], Simulation]], file: Path) -> None:
    """Draw a sweep.

    Raises:
        RunError: the file cannot be written, or its ending names no format.
    """
    with canvas(9, 3.6) as figure:
        axis = next(iter(results[0][0]))
        lines: dict[str, list[tuple[str, Simulation]]] = {}
        for point, simulation in results:
            label = ", ".join(f"{key}={value}" for key, value in point.items() if key != axis)
            lines.setdefault(label, []).append((point[axis], simulation))
        panels = figure.subplots(1, 2)
        for index, (label, points) in enumerate(lines.items()):
            names = [name for name, _ in points]
            seconds, busy = zip(*((each.seconds, each.servers[State.BUSY]) for _, each in points), strict=True)
            for panel, values in zip(panels, (seconds, busy), strict=True):
                panel.plot(names, values, label=label, **arm_style(index))
        for panel, title in zip(panels, ("seconds a step", "share of servers' time with requests"), strict=True):
            panel.set(xlabel=axis, ylabel=title, ylim=(0, None))
            panel.grid(alpha=0.3)
        if any(lines):
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        save_picture(figure, file)
