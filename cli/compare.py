"""The part of ``condensegrpo eval`` that compares condensers: ``--compare``."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from condensegrpo.cli import theme
from condensegrpo.cli.neutral import counted
from condensegrpo.core.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rich.table import Table

    from condensegrpo.config.schema import RunConfig
    from condensegrpo.evaluation.comparison import Comparison, Contender
    from condensegrpo.metrics.estimates import Interval

FILES = ("comparison.json", "comparison.png", "comparison.svg")


def parsed_condensers(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse ``--compare``: condensers separated by commas, each followed by its ``key=value``s.

        "full, last_k keep_last=3, path/to/mine.py:Mine words=[a, b]"

    Raises:
        ConfigError: the text has another form.
    """
    from condensegrpo.config.yaml_tree import apply_overrides

    parts = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", text)]  # commas outside brackets
    condensers = []
    for part in parts:
        name, _, rest = part.partition(" ")
        if not name or "=" in name:
            raise ConfigError(
                f"reading --compare {text!r}: found {part!r}, wanted a condenser's name with its options after it, "
                f"such as 'full, last_k keep_last=3, random_drop'."
            )
        condensers.append((name, apply_overrides({}, re.split(r"\s+(?=\w+=)", rest.strip()) if rest.strip() else [])))
    return condensers


def parsed_budgets(text: str | None) -> list[int]:
    """Parse ``--budgets``, such as ``64,96``.

    Raises:
        ConfigError: the text has another form.
    """
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d*", word) for word in words):
        raise ConfigError(f"reading --budgets {text!r}: wanted numbers of tokens, such as 64,96.")
    return [int(word) for word in words]


def compare(
    config: "RunConfig", model: str, condensers: str, budgets: str | None, out: Path, *, save: Path | None, quiet: bool
) -> None:
    """Compare condensers and write a table, ``comparison.json`` and the plot; ``quiet``: print the JSON alone."""
    from rich.console import Console

    from condensegrpo.cli.console import PhaseDisplay

    named, within = parsed_condensers(condensers), parsed_budgets(budgets)
    _make(out)
    with PhaseDisplay(Console(stderr=True, quiet=quiet)) as display:
        display.phase("loading torch, transformers and the model", None)
        from condensegrpo.assembly.runtime import open_sampler, use_threads
        from condensegrpo.cli.quiet import quiet_libraries
        from condensegrpo.evaluation.compare import check, contenders
        from condensegrpo.evaluation.compare import compare as run_comparison

        quiet_libraries()
        entrants = contenders(named, within, config)
        checked = check(config, entrants, model)
        use_threads(config)
        sampler = open_sampler(config, model)
        try:
            found = run_comparison(checked, sampler=sampler, source=model, observer=display, on_scored=_saving(save))
        finally:
            sampler.close()
    _write(found, out)
    if quiet:
        typer.echo(_as_json(found))
        return
    _show(found, out)


def _make(out: Path) -> None:
    """Create the folder before anything is loaded."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"creating {out} for the comparison: {error.strerror}. Give another --out.") from error


def _saving(save: Path | None) -> "Callable[[Contender, Any], None]":
    from condensegrpo.storage.trajectories import write_trajectory

    if save is None:
        return lambda contender, one: None
    write: Callable[..., None] = partial(write_trajectory, save)
    return lambda contender, one: write(one)


def _as_json(found: "Comparison") -> str:
    return json.dumps(asdict(found), indent=2)


def _write(found: "Comparison", out: Path) -> None:
    from condensegrpo.reporting.comparison_plot import plot
    from condensegrpo.storage.files import write_atomically

    write_atomically(out / FILES[0], _as_json(found) + "\n")
    plot(found, out / Path(FILES[1]).stem)


def _show(found: "Comparison", out: Path) -> None:
    console = theme.console()
    console.print(_figures_table(found))
    console.print(_differences_table(found))
    console.print(f"model   {found.model}\nfolder  {out}: {', '.join(FILES)}")


def _figures_table(found: "Comparison") -> "Table":
    """One line per contender, at most 100 columns; the JSON has turns, calls and more digits."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{counted(found.problems, 'held-out problem', 'held-out problems')} × "
        f"{counted(found.samples, 'sample', 'samples')}, seed {found.seed}; means over trajectories",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("condenser", max_width=22, overflow="fold")
    for heading in (
        "budget",
        "success [95 %]",
        "largest\ncontext",
        "sum of\ncontexts",
        "conden-\nsations",
        "re-\nfetched",
        "seconds",
        "con-\ndensing",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found.figures:
        table.add_row(
            one.contender.label,
            "–" if one.contender.budget is None else str(one.contender.budget),
            f"{one.success.mean:.3f} {_bounds(one.success, '{:.3f}')}",
            f"{one.peak_tokens:.1f}",
            f"{one.summed_tokens:.0f}",
            f"{one.condensations:.1f}",
            f"{one.refetch_rate:.1%}",
            f"{one.seconds:.1f}",
            f"{one.condensing:.1%}",
        )
    return table


def _differences_table(found: "Comparison") -> "Table":
    from rich.table import Table

    table = Table(title="differences in success, paired by problem", title_justify="left")
    for heading in ("budget", "condenser", "minus"):
        table.add_column(heading)
    table.add_column("difference", justify="right")
    table.add_column("95 % interval", justify="right")
    for one in found.differences:
        within = "–" if one.budget is None else str(one.budget)
        bounds = _bounds(one.success, "{:+.3f}")
        table.add_row(within, one.ours, one.theirs, f"{one.success.mean:+.3f}", bounds)
    return table


def _bounds(found: "Interval", form: str) -> str:
    if found.low is None or found.high is None:
        return "–"
    return f"[{form.format(found.low)}, {form.format(found.high)}]"
