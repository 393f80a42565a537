"""The plots of a run: ``report.png`` and a self-contained ``report.html``, made from ``metrics.jsonl`` alone."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from condensegrpo.config.resumed import Change, recorded_changes
from condensegrpo.core.errors import RunError
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trackers import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Metrics = Sequence[Mapping[str, float]]

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/): distinguishable when colour-blind and in greyscale
TRAIN = "#0072B2"
HELD_OUT = "#D55E00"
VARIANTS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("s", "^", "D", "v")
STYLES = ((TRAIN, "-"), (HELD_OUT, "--"), ("#009E73", "-."), ("#CC79A7", ":"))


class Panel(NamedTuple):
    """One diagram: a metric over optimiser steps, in training and on held-out problems."""

    metric: str
    title: str
    unit: str
    varied: bool = False  # also for the variants; the lengths of variants would only compress the scale


PANELS = (
    Panel("success", "Success", "share of trajectories", varied=True),
    Panel("context_tokens", "Largest context", "tokens, mean over trajectories", varied=True),
    Panel("reward", "Reward", "mean over trajectories"),
    Panel("output_tokens", "Output length", "tokens per trajectory"),
    Panel("turns", "Turns", "replies per trajectory"),
    Panel("grad_norm", "Gradient norm", "before clipping"),
)


class Shares(NamedTuple):
    """One diagram of several shares of the training batches."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]  # metric and label


SHARES = (
    Shares(
        "Signal",
        "share of groups or trajectories",
        (
            ("groups_of_equal_reward", "groups without signal"),
            ("trajectories_without_advantage", "trajectories without gradient"),
            ("correct_with_negative_advantage", "correct with negative advantage"),
            ("masked", "masked trajectories"),
        ),
    ),
    Shares(
        "Credit",
        "share of the batch",
        (
            ("weight/correct", "weight on correct"),
            ("pull/correct", "gradient weight on correct"),
            ("weight/gini", "Gini of the weights"),
        ),
    ),
)


class Series(NamedTuple):
    """A line of a diagram."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


def write_report(run_folder: Path) -> tuple[Path, Path]:
    """Write ``report.png`` and ``report.html`` into a run folder and return their paths.

    Raises:
        RunError: there are no metrics yet, or the files cannot be written.
    """
    run = RunFolder(run_folder)
    metrics = read_metrics(run.metrics)
    if not metrics:
        raise RunError(f"making the report of {run_folder}: {run.metrics} holds no metrics yet. Train a step first.")
    changes = recorded_changes(run)
    image, page = run_folder / "report.png", run_folder / "report.html"
    try:
        _draw(metrics, changes, title=run_folder.resolve().name, file=image)
        picture = base64.b64encode(image.read_bytes()).decode("ascii")
    except OSError as error:
        raise RunError(f"writing {image}: {error.strerror}. Free some space or check the permissions.") from error
    write_atomically(page, _page(run_folder.resolve().name, picture, metrics, changes))
    return image, page


def series(metrics: Metrics, key: str) -> Series:
    """The steps and values of a metric; the later of two values at one step counts."""
    values = {line["step"]: line[key] for line in metrics if key in line and "step" in line}
    steps = tuple(sorted(values))
    return Series(steps, tuple(values[step] for step in steps))


def variants(metrics: Metrics) -> tuple[str, ...]:
    """The names of the evaluation variants: k20 of ``eval/k20/success``."""
    keys = (key.split("/") for line in metrics for key in line)
    named = (parts[1] for parts in keys if len(parts) == 3 and parts[::2] == ["eval", "success"])
    return tuple(dict.fromkeys(named))


def smoothed(values: Sequence[float], window: int) -> tuple[float, ...]:
    """The mean of each value and up to ``window`` − 1 values before it."""
    return tuple(
        sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)
    )


def _draw(metrics: Metrics, changes: Sequence[Change], *, title: str, file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # not pyplot, which keeps figures alive and looks for a display
    figure.suptitle(title, fontsize=15, fontweight="bold", x=0.01, ha="left")
    places = figure.subplots(2, 4)
    for axes, panel in zip(places[:, :3].flat, PANELS, strict=True):
        _panel(axes, panel, metrics)
    for axes, shares in zip(places[:, 3], SHARES, strict=True):
        _shares(axes, shares, metrics)
    _mark(figure, places.flat, [change for change in changes if change.learned])
    figure.savefig(file)


def _mark(figure: "Figure", diagrams: "Iterable[Axes]", changes: Sequence[Change]) -> None:
    """A dotted line where a resume changed what is learned, half a step before; the keys below all diagrams."""
    keys: dict[int, list[str]] = {}
    for change in changes:
        keys.setdefault(change.first_step, []).append(str(change))
    for axes in diagrams:
        for step in keys if axes.lines else ():
            axes.axvline(step - 0.5, color="#222222", linestyle=":", linewidth=1.2)
    if keys:
        texts = (f"changed from step {step} on: {', '.join(changed)}" for step, changed in keys.items())
        text = f"dotted lines: {'; '.join(texts)}"
        figure.supxlabel(text, fontsize=9, x=0.01, ha="left", wrap=True, parse_math=False)


def _panel(axes: "Axes", panel: Panel, metrics: Metrics) -> None:
    train = series(metrics, panel.metric)
    if train.steps:
        window = _window(train)
        if window > 1:  # pale measured values under their running mean: a batch is a small sample
            axes.plot(train.steps, train.values, color=TRAIN, alpha=0.25, linewidth=1)
        marker = "o" if len(train.steps) == 1 else ""
        label = f"training, mean of {window} steps" if window > 1 else "training"
        axes.plot(train.steps, smoothed(train.values, window), color=TRAIN, linewidth=1.8, marker=marker, label=label)
    _held_out(axes, panel, metrics)
    if panel.metric == "success":
        axes.set_ylim(-0.03, 1.03)
    elif axes.has_data():
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _finish(axes, panel.title, panel.unit)


def _shares(axes: "Axes", shares: Shares, metrics: Metrics) -> None:
    for (metric, label), (colour, style) in zip(shares.lines, STYLES[: len(shares.lines)], strict=True):
        line = series(metrics, metric)
        if line.steps:
            marker = "o" if len(line.steps) == 1 else ""
            values = smoothed(line.values, _window(line))
            axes.plot(line.steps, values, color=colour, linestyle=style, linewidth=1.6, marker=marker, label=label)
    axes.set_ylim(-0.03, 1.3)  # the legend stands above the curves
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    _finish(axes, shares.title, shares.unit, columns=2)


def _finish(axes: "Axes", title: str, unit: str, *, columns: int = 1) -> None:
    """Titles, labels, grid and legend, the same for all diagrams."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_ylabel(unit, fontsize=9, color="#555555")
    axes.set_xlabel("optimiser steps", fontsize=9, color="#555555")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors="#555555")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#bbbbbb")
    if axes.has_data():
        place = "upper left" if columns > 1 else "best"
        axes.legend(fontsize=8.5, frameon=False, ncols=columns, loc=place, columnspacing=1.0)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, color="#999999")


def _window(line: Series) -> int:
    """The length of the running mean, in steps."""
    return max(1, len(line.values) // 12)


def _held_out(axes: "Axes", panel: Panel, metrics: Metrics) -> None:
    held_out = series(metrics, f"eval/{panel.metric}")
    if held_out.steps:
        axes.plot(*held_out, color=HELD_OUT, marker="o", markersize=5, linewidth=1.6, linestyle="--", label="held-out")
        low, high = series(metrics, f"eval/{panel.metric}_low"), series(metrics, f"eval/{panel.metric}_high")
        if low.steps and low.steps == high.steps:
            axes.fill_between(low.steps, low.values, high.values, color=HELD_OUT, alpha=0.15, linewidth=0)
    if panel.varied:
        for place, name in enumerate(variants(metrics)):
            key = f"eval/{name}/{panel.metric}"
            line, low, high = series(metrics, key), series(metrics, f"{key}_low"), series(metrics, f"{key}_high")
            colour, marker = VARIANTS[place % len(VARIANTS)], MARKERS[place % len(MARKERS)]
            if line.steps:
                axes.plot(*line, color=colour, marker=marker, markersize=5, linewidth=1.2, linestyle=":", label=name)
            if line.steps and line.steps == low.steps == high.steps:
                axes.vlines(line.steps, low.values, high.values, color=colour, linewidth=1.2)


def _page(title: str, picture: str, metrics: Metrics, changes: Sequence[Change]) -> str:
    name = html.escape(title)
    changed = "".join(
        f"<li>from step {change.first_step} on: {html.escape(str(change))}"
        f"{', which changes what is learned' if change.learned else ''}</li>"
        for change in changes
    )
    notes = f"<p>Changed when the run was resumed:</p>\n<ul>{changed}</ul>\n" if changes else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }}
img {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .3rem 1rem; text-align: right; border-bottom: 1px solid #e6e6e6; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ color: #555; font-weight: 600; }}
</style></head><body>
<h1>{name}</h1>
{notes}<table><thead><tr><th>metric</th><th>first</th><th>last</th><th>steps</th></tr></thead><tbody>
{_rows(metrics)}
</tbody></table>
<img alt="Success, context, reward, lengths and credit over optimiser steps" src="data:image/png;base64,{picture}">
</body></html>
"""


def _rows(metrics: Metrics) -> str:
    """Table rows: the first and last value of every metric in the diagrams, with 95 % intervals where there are."""
    places = [("held-out", "eval/"), *((f"held-out {name}", f"eval/{name}/") for name in variants(metrics))]
    lines = [
        (f"{panel.title} ({panel.unit}), {label}", f"{prefix}{panel.metric}")
        for label, prefix in (*places, ("training", ""))
        for panel in PANELS
    ]
    lines += [(f"{shares.title}: {label}", key) for shares in SHARES for key, label in shares.lines]
    rows = (
        (label, _value(metrics, key, steps[0]), _value(metrics, key, steps[-1]), f"{steps[0]:.0f} – {steps[-1]:.0f}")
        for label, key in lines
        if (steps := series(metrics, key).steps)
    )
    return "\n".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)


def _value(metrics: Metrics, key: str, step: float) -> str:
    """``0.9 [0.86, 0.94]``: a metric at a step, with its 95 % interval if it has one."""
    value, low, high = (
        dict(zip(*series(metrics, f"{key}{bound}"), strict=True)).get(step) for bound in ("", "_low", "_high")
    )
    return f"{value:.4g}" if low is None or high is None else f"{value:.4g} [{low:.3g}, {high:.3g}]"
