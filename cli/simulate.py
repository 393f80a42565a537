"""``condensegrpo simulate``: how long the steps of a run take on a cluster, with the real engine in virtual time."""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from condensegrpo.cli.options import AnyConfig, Overrides, check_plot
from condensegrpo.core.errors import ConfigError
from condensegrpo.display import theme
from condensegrpo.display.tables import show_fitting, table

if TYPE_CHECKING:
    from condensegrpo.simulation.simulate import Simulation

SHORT = {"staleness": "rollout.staleness"}  # keys of --sweep that are no keys of the cluster file


def simulate(
    config: AnyConfig,
    overrides: Overrides = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The cluster file (YAML); without it the presets H100 and 7B.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override of a key of the cluster file.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,…", help="Simulate every combination: keys of the cluster file, or staleness."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a sweep into this file (.png, .svg or .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Predict the time of a run's steps on a cluster, and what servers and learner wait for. Needs no GPU.

    Example: condensegrpo simulate search_mt_grpo --set gpus=64 --sweep staleness=0,1,2
    """
    check_plot(plot, ".png", ".svg", ".pdf")
    if plot is not None and not sweep:
        raise ConfigError("reading --plot: it draws a sweep. Add --sweep, such as --sweep servers=4,8,16.")
    from condensegrpo.display.console import PhaseDisplay

    results: list[tuple[dict[str, str], Simulation]] = []
    with PhaseDisplay(theme.console(sys.stderr)) as display:
        display.phase("loading torch and transformers", None)
        from condensegrpo.config.load import named_config
        from condensegrpo.display.console import quiet_libraries
        from condensegrpo.simulation.cluster import read_cluster
        from condensegrpo.simulation.simulate import simulate as simulated

        quiet_libraries()
        points = list(_points(sweep or ()))
        for point in points:
            of_config = [f"{SHORT[key]}={value}" for key, value in point.items() if key in SHORT]
            of_cluster = [f"{key}={value}" for key, value in point.items() if key not in SHORT]
            loaded = named_config(config, [*(overrides or ()), *of_config])
            chosen = read_cluster(cluster, [*(sets or ()), *of_cluster])
            results.append((point, simulated(loaded, chosen, display)))
            if len(points) > 1:  # what a long sweep has found so far stands, should it be interrupted
                cells = _cells(*results[-1]).items()
                display.say(f"{_name(point)}: {', '.join(f'{header} {value}' for header, value in cells)}")
        if plot is not None:
            from condensegrpo.simulation.plot import plot_sweep

            plot_sweep(results, plot)
    if as_json:
        typer.echo(json.dumps([_as_json(point, result) for point, result in results], indent=2))
        return
    rows = [{**point, **_cells(point, result)} for point, result in results]
    show_fitting(theme.console(), table("", tuple(rows[0]), (tuple(row.values()) for row in rows), left=0))
    for point, result in results:
        if result.failed:
            theme.console().print(f"{_name(point)}: {result.failed} trajectories ended with an error", style=theme.WARN)


def _cells(point: dict[str, str], result: "Simulation") -> dict[str, str]:
    """The columns of the table, with their values."""
    figures = _as_json(point, result)
    return {header: form.format(figures[name]) for name, (header, form) in COLUMNS.items()}


def _name(point: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in point.items()) or "the run"


def _points(sweep: Sequence[str]) -> Iterator[dict[str, str]]:
    """Every combination of the values of a sweep; without one, the run itself."""
    axes = list[list[tuple[str, str]]]()
    for given in sweep:
        key, equals, values = given.partition("=")
        if not equals or not key or not all(values.split(",")):
            raise ConfigError(f"reading --sweep {given!r}: wanted KEY=A,B,…, such as servers=4,8,16.")
        if any(axis[0][0] == key for axis in axes):  # its later value would stand for both in every point
            raise ConfigError(f"reading --sweep {given!r}: {key} is swept already. Give its values in one option.")
        axes.append([(key, value) for value in values.split(",")])
    return (dict(point) for point in itertools.product(*axes))


COLUMNS = {  # of the table, and how their values are written
    "gpus": ("GPUs", "{}"),
    "seconds": ("s/step", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "servers/busy": ("servers busy", "{:.0%}"),
    "servers/tools": ("tools", "{:.0%}"),
    "servers/tail": ("tail", "{:.0%}"),
    "servers/learner": ("learner", "{:.0%}"),
    "servers/weights": ("weights", "{:.0%}"),
    "learner/learning": ("learner busy", "{:.0%}"),
    "gpu_hours": ("GPU-h/1000", "{:.2f}"),
    "engine_cores": ("engine cores", "{:.2f}"),
}


def _as_json(point: dict[str, str], result: "Simulation") -> dict[str, Any]:
    return {
        "point": point,
        "gpus": result.plan.gpus,
        "servers": result.plan.servers,
        "learner_gpus": result.plan.learner_gpus,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        **{f"servers/{state.value}": share for state, share in result.servers.items()},
        **{f"learner/{name}": share for name, share in result.learner.items()},
        "gpu_hours": result.gpu_hours,
        "engine_cores": result.engine_cores,
        "engine_wait": result.engine_wait,
        "cache_hits": result.cache_hits,
        "preemptions": result.preemptions,
        "staleness": {str(age): share for age, share in result.staleness.items()},
        "failed": result.failed,
        "step_seconds": [step.seconds for step in result.steps],
    }
