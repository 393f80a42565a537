"""The part of ``condensegrpo eval`` that compares condensers: ``--compare``."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.console import loading
from condensegrpo.display.tables import show_folding, table
from condensegrpo.storage.evaluations import destination_of, kept_if_begun
from condensegrpo.storage.files import write_atomically

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.evaluation.comparison import Comparison, ContenderFigures

FILES = ("comparison.json", "comparison.png", "comparison.svg")
Column = tuple[str, Callable[["ContenderFigures"], str]]  # its head and its cells
FIGURES: tuple[Column, ...] = (
    ("success [95 %]", lambda each: f"{each.success:.3f}"),
    ("largest\ncontext", lambda each: f"{each.peak_tokens:.1f}"),
    ("conden-\nsations", lambda each: f"{each.condensations:.1f}"),
    ("re-\nfetched", lambda each: f"{each.refetch_rate:.1%}"),
)
TIMES: tuple[Column, ...] = (
    ("seconds", lambda each: f"{each.seconds:.1f}"),
    ("con-\ndensing", lambda each: f"{each.condensing:.1%}"),
)
CONTEXT: tuple[Column, ...] = (
    ("calls", lambda each: f"{each.calls:.1f}"),
    ("largest\ncontext", lambda each: f"{each.peak_tokens:.0f}"),
)
PICTURES: tuple[Column, ...] = (("of it\npictures", lambda each: f"{each.picture_tokens:.0f}"),)
TOKENS: tuple[Column, ...] = (
    ("tokens\nread", lambda each: f"{each.prompt_tokens:.0f}"),
    ("with a\nprefix cache", lambda each: f"{each.prompt_tokens_uncached:.0f}"),
    ("tokens\nwritten", lambda each: f"{each.output_tokens:.0f}"),
)


def parsed_condensers(text: str) -> list[tuple[str, dict[str, object]]]:
    """Parse ``--compare``: condensers separated by commas, each followed by its ``key=value``s.

        "full, last_k keep_last=3, path/to/mine.py:Mine words=[a, b]"

    Raises:
        ConfigError: the text has another form.
    """
    from condensegrpo.config.yaml_tree import apply_overrides

    depth, parts = 0, [""]
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    condensers = []
    for part in map(str.strip, parts):
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
    with loading("torch, transformers and the model", quiet=quiet, debug=debug) as display:
        from condensegrpo.evaluation.compare import check_contenders, contenders
        from condensegrpo.evaluation.compare import compare as run_comparison
        from condensegrpo.evaluation.stored import opened_policy
        from condensegrpo.learner.model_folder import save_tokenizer, trained_steps
        from condensegrpo.reporting.plots import plot_comparison
        from condensegrpo.storage.media import MediaFolder

        entrants = check_contenders(config, contenders(named, limits, config), model)
        step = trained_steps(model)
        destination_of(save, None, step)
        media = None if save is None else MediaFolder(save / "media")
        with kept_if_begun(save), opened_policy(config, model, media=media) as players:
            if save is not None:
                save_tokenizer(model, save)
            result = run_comparison(entrants, players=players, step=step, observer=display, save=save)
    text = json.dumps(asdict(result), indent=2)
    write_atomically(out / FILES[0], f"{text}\n")
    plot_comparison(result, out / Path(FILES[1]).stem)
    if quiet:
        typer.echo(text)
        return
    console = theme.console()
    show_folding(console, figures_table(result, with_times=console.width >= 100), heads=2)
    show_folding(console, tokens_table(result), heads=2)
    if result.differences:
        show_folding(console, _differences_table(result), heads=3)
    steps = "" if result.step is None else f", after {counted(result.step, 'step')}"
    console.print(f"model   {result.model}{steps}\nfolder  {out}: {', '.join(FILES)}", soft_wrap=True)


def figures_table(result: "Comparison", *, with_times: bool) -> Table:
    """One line per contender, at most 100 columns, 80 without times; the JSON has more digits."""
    title = (
        f"{counted(result.problems, 'held-out problem')} × {counted(result.samples, 'sample')}, seed {result.seed}; "
        f"means over trajectories"
    )
    return _contenders(title, result, (*FIGURES, *(TIMES if with_times else ())))


def tokens_table(result: "Comparison") -> Table:
    """What a trajectory costs under each contender: calls, and tokens read and written in all of them."""
    pictures = PICTURES if any(figures.picture_tokens for figures in result.figures) else ()
    return _contenders("a trajectory in all its calls, means", result, (*CONTEXT, *pictures, *TOKENS))


def _contenders(title: str, result: "Comparison", columns: "Sequence[Column]") -> Table:
    """A row for each contender with some of its figures."""
    heads = ("condenser", "budget", *(head for head, _ in columns))
    rows = (
        (each.contender.label, _budget(each.contender.budget), *(cell(each) for _, cell in columns))
        for each in result.figures
    )
    return table(title, heads, rows, padding=(0, 0, 0, 0))


def _differences_table(result: "Comparison") -> Table:
    heads = ("budget", "condenser", "minus", "difference [95 %]")
    rows = ((_budget(each.budget), each.ours, each.theirs, f"{each.success:+.3f}") for each in result.differences)
    return table("differences in success, paired by problem", heads, rows, left=3)


def _budget(tokens: int | None) -> str:
    return "–" if tokens is None else str(tokens)
