"""``condensegrpo plan``: predicts the memory that a run needs on each device, and the tokens of a step."""

import json
import re
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from condensegrpo.cli.options import AnyConfig, AsJson, Overrides
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import plural
from condensegrpo.display import theme

if TYPE_CHECKING:
    from condensegrpo.planning import remedies
    from condensegrpo.planning.plan import Plan

GIB, MIB = 1 << 30, 1 << 20
UNITS = {"MB": 10**6, "GB": 10**9, "MIB": MIB, "GIB": GIB, "M": MIB, "G": GIB}


def plan_command(
    config: AnyConfig,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of training processes, one per device.")] = 1,
    device: Annotated[
        Literal["cpu", "gpu"] | None, typer.Option(help="Device of each rank; by default what this machine has.")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of a GPU, such as 24GiB: check that the run fits. Exit code 1: it does not."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the peak memory of each device and the tokens of a step. Loads no weights.

    Example: condensegrpo plan gsm8k model.new=null model.path=Qwen/Qwen2.5-0.5B-Instruct --device-memory 24GiB
    """
    room = None if device_memory is None else parse_size(device_memory)
    from condensegrpo.display.console import loading

    with loading("torch and transformers") as display:
        import torch

        from condensegrpo.config.checks import check_values
        from condensegrpo.config.load import config_on
        from condensegrpo.planning.architecture import architecture
        from condensegrpo.planning.plan import predict_memory as predict
        from condensegrpo.planning.remedies import remedy

        if device is None:
            device = "gpu" if room is not None or torch.cuda.is_available() else "cpu"
        loaded = config_on(device, config, overrides or ())
        check_values(loaded)
        display.phase("predicting the memory of every phase", None)
        predicted = predict(loaded, architecture(loaded.model), ranks=ranks, device=device, memory=room)
        fits = room is None or predicted.fits(room)
        change = None if room is None or fits else remedy(predicted, room)
    if as_json:
        typer.echo(json.dumps(_as_json(predicted, room, change), indent=2))
    else:
        _show(predicted)
        if room is not None:
            _verdict(predicted, room, change)
    if not fits:
        raise typer.Exit(1)


def parse_size(text: str) -> int:
    """A size in bytes: ``24GiB``, ``80 GB``, ``512MiB``; ``24G`` is ``24GiB``."""
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if size is None or size[2].upper() not in UNITS or float(size[1]) <= 0:
        raise ConfigError(
            f"reading --device-memory {text!r}: wanted a positive size with its unit (GiB, GB, MiB, MB), such as 24GiB."
        )
    return int(float(size[1]) * UNITS[size[2].upper()])


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


def _show(predicted: "Plan") -> None:
    run, config, console, peak = predicted.run, predicted.run.config, theme.console(), predicted.peak
    where = config.model.path or "a new model"
    console.print(
        f"{where} ({run.model.kind}): {run.model.parameters:,} parameters, {config.model.dtype}, ZeRO "
        f"{config.learner.zero_stage} on {run.ranks} × {run.device}\n",
        style="bold",
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=theme.DIM)
    table.add_column("")
    for name in predicted.phases:
        table.add_column(Text(name, theme.HEAD if name == peak else theme.DIM), justify="right")
    for part in dict.fromkeys(part for parts in predicted.phases.values() for part in parts):
        sizes = [parts.get(part, 0) for parts in predicted.phases.values()]
        if any(sizes):
            table.add_row(part, *(_size(size) if size else "" for size in sizes))
    totals = (Text(_size(predicted.total(name)), theme.HEAD if name == peak else "bold") for name in predicted.phases)
    table.add_row(Text("total", "bold"), *totals)
    console.print(table)
    parts, tokens = predicted.phases[peak], predicted.tokens
    largest = max(parts, key=lambda part: parts[part])
    each = plural(tokens.micro_batches, "micro-batch", "micro-batches")
    console.print(
        f"\npeak      {_size(predicted.bytes)} on each device, when {peak}; largest part: {largest}, "
        f"{_size(parts[largest])}\n"
        f"a step    at most {tokens.step:,} tokens, {tokens.trained:,} of them trained, over all ranks; "
        f"{each} of at most {run.batch.tokens:,} tokens on each\n"
        f"sampling  at most {predicted.requests:,} requests at a time\n"
        f"the run   {config.train.steps * config.algorithm.updates_per_batch:,} optimiser steps"
    )
    if run.checkpointed:
        console.print(f"backward  computes {run.checkpointed} of {run.model.decoder.layers} decoder layers again")
    for note in predicted.notes:
        console.print(f"note      {note}", style=theme.WARN)


def _verdict(predicted: "Plan", room: int, change: "tuple[remedies.Overrides, Plan] | None") -> None:
    from condensegrpo.planning.plan import USABLE
    from condensegrpo.planning.remedies import advice, lines

    console, needed = theme.console(), predicted.bytes
    usable = f"{_size(int(USABLE * room))} ({_size(room)} less {1 - USABLE:.0%} for CUDA, NCCL and unused reserves)"
    if predicted.fits(room):
        console.print(f"\nfits      {_size(needed)} of {usable}", style=theme.GOOD)
        return
    console.print(f"\ndoes not fit: needs {_size(needed)}, available {usable}", style=theme.BAD)
    if predicted.refusal is not None:
        console.print(predicted.refusal, style=theme.BAD)
    if change is None:
        text = (
            "no smaller batch, bfloat16, activation checkpointing, offload or ZeRO 3 on up to 64 devices (numbers that "
            "divide train.problems_per_step) makes it fit: "
        )
        console.print(f"→ {text}{advice(predicted, None)}.", style=theme.BAD)
        return
    overrides, changed = change
    ranks = changed.run.ranks
    where = "" if ranks == predicted.run.ranks else f" on {ranks} devices (--ranks {ranks})"
    console.print(f"→ it would fit{where}, with {_size(changed.bytes)}:", style=theme.BAD)
    typer.echo(f"  {' '.join(lines(overrides))}")  # on one line, to be copied


def _as_json(
    predicted: "Plan", room: int | None, change: "tuple[remedies.Overrides, Plan] | None"
) -> dict[str, object]:
    from condensegrpo.planning.remedies import lines

    run = predicted.run
    return {
        "version": 1,
        "model": {"kind": run.model.kind, "parameters": run.model.parameters, "trainable": run.trainable},
        "device": run.device,
        "ranks": run.ranks,
        "phases": [
            {
                "name": name,
                "bytes": predicted.total(name),
                "parts": {part: size for part, size in parts.items() if size},
            }
            for name, parts in predicted.phases.items()
        ],
        "peak": {"phase": predicted.peak, "bytes": predicted.bytes},
        "checkpointed_layers": run.checkpointed,
        "tokens": predicted.tokens._asdict(),
        "micro_batch": run.batch._asdict(),
        "requests": predicted.requests,
        "notes": predicted.notes,
        "device_memory": room,
        "fits": room is None or predicted.fits(room),
        "refusal": predicted.refusal,
        "remedy": None if change is None else {"overrides": lines(change[0]), "ranks": change[1].run.ranks},
    }
