"""``condensegrpo eval`` and ``play``: the success of a policy, or of condensers, and one episode played by a person."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.rule import Rule
from rich.table import Table

from condensegrpo.assembly.policy import in_use, model_of, run_of_policy
from condensegrpo.cli.options import AnyConfig, AsJson, Debug, Overrides, names_and_overrides
from condensegrpo.config.load import named_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import apply_overrides
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.observer import Observer
from condensegrpo.core.process import temporary_folder
from condensegrpo.core.protocols.task import Split
from condensegrpo.core.trajectory import StopReason
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.console import loading
from condensegrpo.display.tables import show_folding, table
from condensegrpo.display.theme import neutral, program
from condensegrpo.evaluation.figures import Comparison, ContenderFigures
from condensegrpo.learner.launchers import check_alone
from condensegrpo.storage.evaluations import destination_of, kept_if_begun
from condensegrpo.storage.files import make_folder, write_atomically
from condensegrpo.storage.media import MediaFolder

if TYPE_CHECKING:
    from condensegrpo.assembly.components import Components
    from condensegrpo.samplers.scripted import ReplyRequest

SHOWN = (  # of the metrics
    ("reward", "reward"),
    ("valid format", "format_valid"),
    ("largest context, tokens", "context_tokens"),
    ("of these, tokens of pictures", "picture_tokens"),
    ("calls of the policy", "calls"),
    ("tokens read, all calls", "prompt_tokens"),
    ("tokens read with a prefix cache", "prompt_tokens_uncached"),
    ("output, tokens", "output_tokens"),
    ("price, in tokens read", "price"),
    ("turns", "turns"),
    ("tool calls", "tool_calls"),
    ("successful tool calls", "tool_calls_valid"),
    ("information about the answer at the end, nats", "answer_information"),
    ("replies that are text, not the sampled tokens", "text_turns"),
    ("information lost to condensation, nats", "answer_information_lost"),
)
MOST_TURNS = 10  # of the information by turn that the table shows; --json has all of it
FILES = ("comparison.json", "comparison.png", "comparison.svg")
Column = tuple[str, Callable[[ContenderFigures], str]]  # its head and its cells
FIGURES: tuple[Column, ...] = (
    ("success [95 %]", lambda each: f"{each.success:.3f}"),
    ("largest\ncontext", lambda each: f"{each.peak_tokens:.1f}"),
    ("price", lambda each: f"{each.price:.0f}"),
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
    ("price", lambda each: f"{each.price:.0f}"),
)
# no evaluation, warm start, other model or measure of replies; a person may take a day
PLAYED = ("evaluate.variants={}", "warm_start.steps=0", "rollout.answer_form=null", "rollout.limits.turn_seconds=86400")
CONTINUED = "\\"  # at the end of a line: the reply goes on


def evaluate_command(
    policy: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="A run, checkpoint or model folder, or a Hub id.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG|KEY=VALUE", help="By default the configuration of the run."),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Trajectories per problem.")] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write trajectories and tokenizer into this new folder, not the run's."),
    ] = None,
    as_json: AsJson = False,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="CONDENSERS", help="Compare condensers, such as 'full, last_k keep_last=3, truncate, random_drop'."
        ),
    ] = None,
    budgets: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="With --compare: largest contexts, such as 64,96.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="With --compare: folder for comparison.json, .png and .svg; by default ./compare."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Evaluate a policy on held-out problems: success with its 95 % interval, pass@k, context, turns, stop reasons.

    Example: condensegrpo eval runs/quickstart --samples 4 task.options.min_ops=20 task.options.max_ops=20

    With --compare: the same policy under several condensers and budgets, with paired differences and a plot.

    Example: condensegrpo eval runs/memory --compare "full, truncate, random_drop, attention" --budgets 50,100
    """
    if compare is None and (budgets is not None or out is not None):
        raise ConfigError(
            "reading the options: found --budgets or --out without --compare. Add --compare with the condensers."
        )
    check_alone(os.environ)
    override = [] if samples is None else [f"evaluate.samples={samples}"]
    config, model, run = _policy(policy, [*(arguments or []), *override])
    if compare is not None:
        with in_use(model):
            named, limits = parsed_condensers(compare), parsed_budgets(budgets)
            _compare(config, model, named, limits, out or Path("compare"), save=save, quiet=as_json, debug=debug)
        return
    with in_use(model), loading("torch, transformers and the model", quiet=as_json, debug=debug) as display:
        from condensegrpo.assembly.build import build
        from condensegrpo.evaluation.evaluate import evaluate_policy
        from condensegrpo.learner.model_folder import trained_steps

        result = evaluate_policy(
            build(config), model, save=save, run=run, observer=display, command=shlex.join(sys.argv)
        )
    step = trained_steps(model)
    if as_json:
        typer.echo(json.dumps({"model": model, "step": step, **asdict(result)}, indent=2))
        return
    _print(result, model, step)
    if save is not None:
        typer.echo(f"next: {program()} inspect {shlex.quote(str(save))} --tokens")
    elif run is not None and step is not None:
        typer.echo(f"stored as {result.name}: {program()} inspect {shlex.quote(str(run))} --evaluation {result.name}")


def _policy(policy: str, arguments: list[str]) -> tuple[RunConfig, str, Path | None]:
    """The configuration without variants and the model that the arguments name, and the run of the policy, if any."""
    names, overrides = names_and_overrides(arguments)
    if len(names) > 1:
        raise ConfigError(f"reading the arguments: wanted at most one CONFIG, found {names}.")
    model, run = model_of(policy), run_of_policy(policy)
    if not names and run is None:
        raise ConfigError(
            f"evaluating {policy}: it is not a run folder or a checkpoint in one, so a CONFIG must say the task. Add "
            f"one, such as gsm8k."
        )
    return named_config(names[0] if names else str(run), ["evaluate.variants={}", *overrides]), model, run


def _print(result: Evaluation, model: str, step: int | None) -> None:
    bounds = f"95 % interval [{result.success_low:.3f}, {result.success_high:.3f}]"
    stops = [(key.removeprefix("stop/"), value) for key, value in result.metrics.items() if key.startswith("stop/")]
    rows = [
        ("success", f"{result.success:.3f}  {bounds}"),
        *((f"pass@{k}", f"{value:.3f}") for k, value in result.pass_at.items()),
        *((label, f"{result.metrics[key]:.3f}") for label, key in SHOWN if key in result.metrics),
        *((f"stop: {stop}", f"{value:.3f}") for stop, value in stops if value),
    ]
    if result.information:
        known = " ".join("–" if value is None else f"{value:.1f}" for value in result.information[:MOST_TURNS])
        more = " …" if len(result.information) > MOST_TURNS else ""
        rows.append(("information about the answer by turn, nats", f"{known}{more}"))
    rows.append(("seconds", f"{result.seconds:.1f}"))
    problems, samples = plural(result.problems, "held-out problem"), plural(result.samples, "sample")
    console = theme.EscapingConsole()
    show_folding(console, table(f"{problems} × {samples}, seed {result.seed}", ("metric", "value"), rows))
    steps = "" if step is None else f", after {plural(step, 'step')}"
    console.print(f"model: {model}{steps}", highlight=False, soft_wrap=True, markup=False)


def parsed_condensers(text: str) -> list[tuple[str, dict[str, object]]]:
    """Parse ``--compare``: condensers separated by commas, each followed by its ``key=value``s.

    "full, last_k keep_last=3, path/to/mine.py:Mine words=[a, b]"
    """
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
    """Parse ``--budgets``, such as ``64,96``."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d*", word) for word in words):
        raise ConfigError(f"reading --budgets {text!r}: wanted numbers of tokens, such as 64,96.")
    return [int(word) for word in words]


def _compare(
    config: RunConfig,
    model: str,
    named: Sequence[tuple[str, dict[str, object]]],
    budgets: Sequence[int],
    out: Path,
    *,
    save: Path | None,
    quiet: bool,
    debug: bool,
) -> None:
    """Compare condensers; write ``comparison.json`` and the plot, and print tables, or the JSON alone if ``quiet``."""
    make_folder(out)  # before anything is loaded
    with loading("torch, transformers and the model", quiet=quiet, debug=debug) as display:
        from condensegrpo.evaluation.evaluate import check_contenders, contenders, opened_policy
        from condensegrpo.evaluation.evaluate import compare_contenders as run_comparison
        from condensegrpo.learner.model_folder import save_tokenizer, trained_steps
        from condensegrpo.reporting.plots import plot_comparison

        entrants = check_contenders(config, contenders(named, budgets, config), model)
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
        differences = (
            (_budget(each.budget), each.ours, each.theirs, f"{each.success:+.3f}") for each in result.differences
        )
        heads = ("budget", "condenser", "minus", "difference [95 %]")
        drawn = table("differences in success, paired by problem", heads, differences, left=3)
        show_folding(console, drawn, heads=3)
    steps = "" if result.step is None else f", after {plural(result.step, 'step')}"
    console.print(f"model   {result.model}{steps}\nfolder  {out}: {', '.join(FILES)}", soft_wrap=True)


def figures_table(result: Comparison, *, with_times: bool) -> Table:
    """One line per contender, at most 100 columns, 80 without times; the JSON has more digits."""
    title = (
        f"{plural(result.problems, 'held-out problem')} × {plural(result.samples, 'sample')}, seed {result.seed}; "
        f"means over trajectories"
    )
    return _contenders(title, result, (*FIGURES, *(TIMES if with_times else ())))


def tokens_table(result: Comparison) -> Table:
    """The cost of a trajectory under each contender: calls, and tokens read and written in all of them."""
    pictures = PICTURES if any(figures.picture_tokens for figures in result.figures) else ()
    return _contenders("a trajectory in all its calls, means", result, (*CONTEXT, *pictures, *TOKENS))


def _contenders(title: str, result: Comparison, columns: Sequence[Column]) -> Table:
    """A row for each contender with some of its figures."""
    heads = ("condenser", "budget", *(head for head, _ in columns))
    rows = (
        (each.contender.label, _budget(each.contender.budget), *(cell(each) for _, cell in columns))
        for each in result.figures
    )
    return table(title, heads, rows, padding=(0, 0, 0, 0))


def _budget(tokens: int | None) -> str:
    return "–" if tokens is None else str(tokens)


def play(
    config: AnyConfig,
    overrides: Overrides = None,
    problem: Annotated[int, typer.Option(min=0, help="Which problem of the split, counted from 0.")] = 0,
    split: Annotated[Split, typer.Option(help="Of the problems.")] = "eval",
    replies: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file of texts to reply with; by default you type."),
    ] = None,
) -> None:
    """Play an episode in place of the policy: see every prompt, type the reply, and get the reward. Loads no model.

    A line that ends in a backslash goes on in the next one; Ctrl-D gives up the episode, which is then not scored.

    Example: condensegrpo play quickstart --problem 3
    """
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # half a character may be deleted at a terminal
    with loading("transformers") as display:
        from condensegrpo.api import sample_rollouts
        from condensegrpo.assembly.build import build, build_components
        from condensegrpo.assembly.objects import configured
        from condensegrpo.episodes.failures import check_failures
        from condensegrpo.learner.model_folder import load_tokenizer
        from condensegrpo.samplers.scripted import TextSampler, read_replies, said

        settings = named_config(config, [*(overrides or ()), *PLAYED])
        display.phase(f"reading the problems of {settings.task.name}", None)
        components = build_components(settings)
        problems = components.problems(split)
    if problem >= len(problems):
        raise ConfigError(
            f"reading --problem: found {problem}, and the {split} problems are {len(problems)}, counted from 0."
        )
    reply = typed if replies is None else said(read_replies(replies))

    def say(request: "ReplyRequest") -> str | None:
        console, budget = theme.console(), components.config.rollout.limits.max_context_tokens
        size = f"{request.tokens} of {plural(budget, 'token')}, a reply has at most {request.max_tokens}"
        console.print(Rule(f"turn {request.number}: the prompt, {size}", style=theme.FREE, align="left"))
        console.print(neutral(request.prompt), markup=False, highlight=False, soft_wrap=True)
        text = reply(request)
        if text is not None and (replies is not None or not sys.stdin.isatty()):  # a terminal shows what is typed
            console.print(neutral(text), style="bold", markup=False, soft_wrap=True)
        return text

    with _tokenizer_of(components) as source:
        sampler = TextSampler(load_tokenizer(source), say)
        posed = [problems[problem]]
        chosen, objects = configured(components.config, (), {"sampler": sampler})
        played, failures = sample_rollouts(build(chosen, components, objects), source, posed, n=1, observer=Observer())
    if played[0].figures.stop is StopReason.ABORTED:
        typer.echo(f"left after {plural(played[0].figures.turns, 'reply', 'replies')}: the episode is not scored")
        return
    theme.console().print(Rule("the episode", style=theme.HEAD))
    played[0].show()
    check_failures([failures], Observer())


def typed(_: "ReplyRequest") -> str | None:
    """A reply from the terminal; None at the end of its input."""
    typer.echo("your reply: ", nl=False)
    lines = list[str]()
    while not lines or lines[-1].endswith(CONTINUED):
        line = sys.stdin.readline()
        if not line:
            typer.echo()
            return None
        lines.append(line.rstrip("\n"))
    return "\n".join(line.removesuffix(CONTINUED) for line in lines)


@contextmanager
def _tokenizer_of(components: "Components") -> Iterator[str]:
    """The folder or Hub id of the policy's tokenizer; for a new model it is made, without weights."""
    from condensegrpo.assembly.preflight import made_tokenizer
    from condensegrpo.learner.new_model import new_config

    model = components.config.model
    if model.new is None:
        yield str(model.path)
        return
    made = made_tokenizer(components.task, model.new)
    with temporary_folder("play") as folder:
        made.save_pretrained(folder)
        new_config(model.new, vocab_size=len(made)).save_pretrained(folder)
        yield str(folder)
