"""The part of ``condensegrpo eval`` that compares condensers: ``--compare``."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.console import PhaseDisplay
from condensegrpo.display.quiet import quiet_libraries
from condensegrpo.storage.evaluations import destination_of
from condensegrpo.storage.files import write_atomically

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.evaluation.comparison import Comparison

FILES = ("comparison.json", "comparison.png", "comparison.svg")


def parsed_condensers(text: str) -> list[tuple[str, dict[str, object]]]:
    """Parse ``--compare``: condensers separated by commas, each followed by its ``key=value``s.

        "full, last_k keep_last=3, path/to/mine.py:Mine words=[a, b]"

    Raises:
        ConfigError: the text has another form.
    """
    from condensegrpo.config.yaml_tree import apply_overrides

    condensers = []
    for part in map(str.strip, re.split(r",(?![^\[{]*[\]}])", text)):  # commas outside brackets
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
    config: "RunConfig",
    model: str,
    condensers: str,
    budgets: str | None,
    out: Path,
    *,
    save: Path | None,
    quiet: bool,
    debug: bool,
) -> None:
    """Compare condensers and write a table, ``comparison.json`` and the plot.

    Args:
        quiet: print the JSON alone.
        debug: show the tracebacks of failed trajectories.
    """
    named, limits = parsed_condensers(condensers), parsed_budgets(budgets)
    try:
        out.mkdir(parents=True, exist_ok=True)  # before anything is loaded
    except OSError as error:
        raise RunError(f"creating {out} for the comparison: {error.strerror}. Give another --out.") from error
    with PhaseDisplay(Console(stderr=True, quiet=quiet), debug=debug) as display:
        display.phase("loading torch, transformers and the model", None)
        from condensegrpo.evaluation.compare import check_contenders, contenders
        from condensegrpo.evaluation.compare import compare as run_comparison
        from condensegrpo.evaluation.stored import opened_policy
        from condensegrpo.learner.policy import save_tokenizer, trained_steps
        from condensegrpo.reporting.plots import plot_comparison

        quiet_libraries()
        entrants = check_contenders(config, contenders(named, limits, config), model)
        step = trained_steps(model)
        if save is not None:
            destination_of(save, None, step)
            save_tokenizer(model, save)
        with opened_policy(config, model) as players:
            result = run_comparison(entrants, players=players, step=step, observer=display, save=save)
    text = json.dumps(asdict(result), indent=2)
    write_atomically(out / FILES[0], f"{text}\n")
    plot_comparison(result, out / Path(FILES[1]).stem)
    if quiet:
        typer.echo(text)
        return
    console = theme.console()
    console.print(figures_table(result, with_times=console.width >= 100))
    console.print(tokens_table(result))
    console.print(_differences_table(result))
    steps = "" if result.step is None else f", after {counted(result.step, 'step')}"
    console.print(f"model   {result.model}{steps}\nfolder  {out}: {', '.join(FILES)}", soft_wrap=True)


def figures_table(result: "Comparison", *, with_times: bool) -> Table:
    """One line per contender, at most 100 columns, 80 without times; the JSON has more digits."""
    table = Table(
        title=f"{counted(result.problems, 'held-out problem')} × "
        f"{counted(result.samples, 'sample')}, seed {result.seed}; means over trajectories",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("condenser", max_width=22, overflow="fold")
    headings = ("budget", "success [95 %]", "largest\ncontext", "conden-\nsations", "re-\nfetched")
    for heading in (*headings, *(("seconds", "con-\ndensing") if with_times else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for figures in result.figures:
        table.add_row(
            figures.contender.label,
            "–" if figures.contender.budget is None else str(figures.contender.budget),
            f"{figures.success:.3f}",
            f"{figures.peak_tokens:.1f}",
            f"{figures.condensations:.1f}",
            f"{figures.refetch_rate:.1%}",
            *((f"{figures.seconds:.1f}", f"{figures.condensing:.1%}") if with_times else ()),
        )
    return table


def tokens_table(result: "Comparison") -> Table:
    """What a trajectory costs under each contender: calls, and tokens read and written in all of them."""
    table = Table(title="a trajectory in all its calls, means", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("condenser", overflow="fold")
    with_pictures = any(figures.picture_tokens for figures in result.figures)
    pictures = ("of it\npictures",) if with_pictures else ()
    for heading in (
        "budget",
        "calls",
        "largest\ncontext",
        *pictures,
        "tokens\nread",
        "with a\nprefix cache",
        "tokens\nwritten",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for figures in result.figures:
        budget = "–" if figures.contender.budget is None else str(figures.contender.budget)
        context = (figures.peak_tokens, figures.picture_tokens) if with_pictures else (figures.peak_tokens,)
        tokens = (*context, figures.prompt_tokens, figures.prompt_tokens_uncached, figures.output_tokens)
        table.add_row(figures.contender.label, budget, f"{figures.calls:.1f}", *(f"{number:.0f}" for number in tokens))
    return table


def _differences_table(result: "Comparison") -> Table:
    table = Table(title="differences in success, paired by problem", title_justify="left")
    for heading in ("budget", "condenser", "minus"):
        table.add_column(heading)
    table.add_column("difference", justify="right")
    table.add_column("95 % interval", justify="right")
    for difference in result.differences:
        budget = "–" if difference.budget is None else str(difference.budget)
        success = difference.success
        bounds = f"[{success.low:+.3f}, {success.high:+.3f}]"
        table.add_row(budget, difference.ours, difference.theirs, f"{success.mean:+.3f}", bounds)
    return table
