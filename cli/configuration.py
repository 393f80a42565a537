"""``condensegrpo config``, ``explain`` and ``plan``: the keys of a configuration, and the memory that a run takes."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from condensegrpo.cli.options import AnyConfig, AsJson, Overrides
from condensegrpo.config.keys import Key, explained, foreign_names, keys
from condensegrpo.config.load import shipped
from condensegrpo.config.study import shipped_studies
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.console import loading

if TYPE_CHECKING:
    from condensegrpo.planning.plan import Plan
    from condensegrpo.planning.remedies import Overrides as Changes

GIB, MIB = 1 << 30, 1 << 20
UNITS = {"MB": 10**6, "GB": 10**9, "MIB": MIB, "GIB": GIB, "M": MIB, "G": GIB}


def config_command(
    listed: Annotated[bool, typer.Option("--list", show_default=False, help="List the keys, as by default.")] = True,
    names: Annotated[
        bool, typer.Option("--shipped", help="List the shipped configurations and studies instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List all keys of a configuration with type, default and meaning, or what is shipped.

    Example: condensegrpo config --list | grep context
    """
    if names:
        found = {"version": 1, "shipped": shipped(), "studies": [*shipped_studies()]}
        lines = (*shipped(), *(f"studies/{name}.yaml" for name in shipped_studies()))
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines))
        return
    if as_json:
        typer.echo(json.dumps({"version": 1, "keys": [key._asdict() for key in keys().values()]}, indent=2))
        return
    for key in keys().values():
        typer.echo(_line(key))


def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A key or section, its last part, or a key of TRL or verl.",
            autocompletion=lambda incomplete: [name for name in keys() if name.startswith(incomplete)],
        ),
    ],
) -> None:
    """Explain one key of a configuration: type, default, meaning.

    Example: condensegrpo explain num_generations
    """
    found = explained(key)
    typer.echo(_line(found))
    if named := foreign_names(found.name):
        typer.echo(f"in TRL or verl: {', '.join(named)}")
    for each in keys().values():
        if each.name.startswith(f"{found.name}."):
            typer.echo(_line(each))


def _line(key: Key) -> str:
    default = f", default {key.default}" if key.default not in ("", "required") else f", {key.default}".rstrip(", ")
    return f"{key.name}  ({key.type}{default}){'  ' * bool(key.about)}{key.about}"


def plan_command(
    config: AnyConfig,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of training processes, one per device.")] = 1,
    device: Annotated[
        Literal["cpu", "gpu"] | None, typer.Option(help="Device of each rank; by default what this machine has.")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a GPU, such as 24GiB: exit with 1 if it is too small.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the peak memory of each device and the tokens of a step. Loads no weights.

    Example: condensegrpo plan gsm8k model.new=null model.path=Qwen/Qwen2.5-0.5B-Instruct --device-memory 24GiB
    """
    room = None if device_memory is None else parse_size(device_memory)
    with loading("torch and transformers"):
        import torch

        from condensegrpo.config.checks import check_values
        from condensegrpo.config.load import config_on
        from condensegrpo.planning.plan import Plan, architecture
        from condensegrpo.planning.remedies import remedy

        device = device or ("gpu" if room is not None or torch.cuda.is_available() else "cpu")
        loaded = config_on(device, config, overrides or ())
        check_values(loaded)
        planned = Plan(loaded, architecture(loaded.model), ranks=ranks, device=device, memory=room)
        fits = room is None or planned.fits(room)
        change = None if room is None or fits else remedy(planned, room)
    if as_json:
        _print_json(planned, room, change)
    else:
        _show(planned, room, change)
    if not fits:
        raise typer.Exit(1)


def parse_size(text: str) -> int:
    """A size in bytes: ``24GiB``, ``80 GB``, ``512MiB``; ``24G`` is ``24GiB``."""
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if size is None or size[2].upper() not in UNITS or float(size[1]) <= 0:
        raise ConfigError(f"reading --device-memory {text!r}: wanted a positive size with its unit, such as 24GiB.")
    return int(float(size[1]) * UNITS[size[2].upper()])


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


def _show(planned: "Plan", room: int | None, change: "tuple[Changes, Plan] | None") -> None:
    from condensegrpo.planning.plan import USABLE
    from condensegrpo.planning.remedies import advice

    config, model, console, peak = planned.config, planned.model, theme.console(), planned.peak
    shown = (config.model.path or "a new model").removeprefix(f"{Path.cwd()}/")
    console.print(
        f"{shown} ({model.kind}): {model.parameters:,} parameters, {config.model.dtype}, "
        f"ZeRO {config.learner.zero_stage} on {planned.ranks} × {planned.device}\n",
        style="bold",
    )
    table = Table("", box=None, padding=(0, 2, 0, 0), header_style=theme.DIM)
    for name in planned.phases:
        table.add_column(Text(name, theme.HEAD if name == peak else theme.DIM), justify="right")
    for part in dict.fromkeys(part for parts in planned.phases.values() for part in parts):
        sizes = [parts.get(part, 0) for parts in planned.phases.values()]
        if any(sizes):
            table.add_row(part, *(_size(size) if size else "" for size in sizes))
    totals = (Text(_size(planned.total(name)), theme.HEAD if name == peak else "bold") for name in planned.phases)
    table.add_row(Text("total", "bold"), *totals)
    console.print(table)
    largest, size = max(planned.phases[peak].items(), key=lambda item: item[1])
    tokens, batches = planned.tokens, plural(planned.tokens.micro_batches, "micro-batch", "micro-batches")
    console.print(
        f"\npeak      {_size(planned.bytes)} on each device, when {peak}; largest part: {largest}, {_size(size)}\n"
        f"a step    at most {tokens.step:,} tokens, {tokens.trained:,} of them trained, over all ranks; "
        f"{batches} of at most {planned.batch.tokens:,} tokens on each\n"
        f"sampling  at most {planned.requests:,} requests at a time\n"
        f"the run   {config.train.steps * config.algorithm.updates_per_batch:,} optimiser steps"
    )
    if planned.checkpointed:
        console.print(f"backward  computes {planned.checkpointed} of {model.layers} decoder layers again")
    for note in planned.notes:
        console.print(f"note      {note}", style=theme.WARN)
    if room is None:
        return
    usable = f"{_size(int(USABLE * room))} ({_size(room)} less {1 - USABLE:.0%} for CUDA, NCCL and unused reserves)"
    if planned.fits(room):
        console.print(f"\nfits      {_size(planned.bytes)} of {usable}", style=theme.GOOD)
        return
    console.print(f"\ndoes not fit: needs {_size(planned.bytes)}, available {usable}", style=theme.BAD)
    if planned.refusal is not None:
        console.print(planned.refusal, style=theme.BAD)
    found = "no smaller batch, bfloat16, checkpointing, offload or ZeRO 3 on up to 64 devices makes it fit"
    if change is not None:
        found = f"it would fit, with {_size(change[1].bytes)}"
    console.print(f"→ {found}:", style=theme.BAD)
    typer.echo(f"  {advice(planned, change)}")  # on one line, to be copied


def _print_json(planned: "Plan", room: int | None, change: "tuple[Changes, Plan] | None") -> None:
    from condensegrpo.planning.remedies import lines

    names, phases = ("device", "ranks", "trainable", "requests", "notes", "refusal"), planned.phases.items()
    found = {
        "version": 1,
        **{name: getattr(planned, name) for name in names},
        "phases": [{"name": name, "bytes": planned.total(name), "parts": parts} for name, parts in phases],
        "peak": {"phase": planned.peak, "bytes": planned.bytes},
        "checkpointed_layers": planned.checkpointed,
        "tokens": planned.tokens._asdict(),
        "fits": room is None or planned.fits(room),
        "remedy": None if change is None else {"overrides": lines(change[0]), "ranks": change[1].ranks},
    }
    typer.echo(json.dumps(found, indent=2))
