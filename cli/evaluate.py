"""``condensegrpo eval``: success of a policy on held-out problems, with intervals."""

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from condensegrpo.cli.compare import compare as run_comparison
from condensegrpo.cli.options import AsJson, Debug, names_and_overrides
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import counted
from condensegrpo.display.console import loading
from condensegrpo.display.tables import show_folding, table
from condensegrpo.learner.launchers import check_alone

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.core.evaluation import Evaluation

SHOWN = (  # of the metrics
    ("reward", "reward"),
    ("valid format", "format_valid"),
    ("largest context, tokens", "context_tokens"),
    ("of these, tokens of pictures", "picture_tokens"),
    ("calls of the policy", "calls"),
    ("tokens read, all calls", "prompt_tokens"),
    ("tokens read with a prefix cache", "prompt_tokens_uncached"),
    ("output, tokens", "output_tokens"),
    ("turns", "turns"),
    ("tool calls", "tool_calls"),
    ("successful tool calls", "tool_calls_valid"),
    ("information about the answer at the end, nats", "answer_information"),
    ("replies that are text, not the sampled tokens", "text_turns"),
    ("information lost to condensation, nats", "answer_information_lost"),
)
MOST_TURNS = 10  # of the information by turn that the table shows; --json has all of it


def evaluate(
    policy: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="A run, checkpoint or model folder, or a Hub id.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="By default the configuration of the run."),
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
    from condensegrpo.evaluation.policy import in_use

    if compare is not None:
        with in_use(model):
            run_comparison(
                config, model, compare, budgets, out or Path("compare"), save=save, quiet=as_json, debug=debug
            )
        return
    with in_use(model), loading("torch, transformers and the model", quiet=as_json, debug=debug) as display:
        from condensegrpo.assembly.build import build
        from condensegrpo.evaluation.stored import evaluate_policy
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
        typer.echo(f"next: condensegrpo inspect {shlex.quote(str(save))} --tokens")
    elif run is not None and step is not None:
        run_folder = shlex.quote(str(run))
        typer.echo(f"stored as {result.name}: condensegrpo inspect {run_folder} --evaluation {result.name}")


def _policy(policy: str, arguments: list[str]) -> "tuple[RunConfig, str, Path | None]":
    """The configuration without variants and the model that the arguments name, and the run of the policy, if any."""
    from condensegrpo.config.load import named_config
    from condensegrpo.evaluation.policy import model_of, run_of_policy

    names, overrides = names_and_overrides(arguments)
    if len(names) > 1:
        raise ConfigError(f"reading the arguments: wanted at most one CONFIG, found {names}.")
    model, run = model_of(policy), run_of_policy(policy)
    if not names and run is None:
        raise ConfigError(
            f"evaluating {policy}: it is not a run folder or a checkpoint in one, so a CONFIG must say the task. Add "
            f"one, such as gsm8k."
        )
    config = named_config(names[0] if names else str(run), ["evaluate.variants={}", *overrides])
    return config, model, run


def _print(result: "Evaluation", model: str, step: int | None) -> None:
    bounds = f"95 % interval [{result.success_low:.3f}, {result.success_high:.3f}]"
    stops = [(key.removeprefix("stop/"), value) for key, value in result.metrics.items() if key.startswith("stop/")]
    rows = [("success", f"{result.success:.3f}  {bounds}")]
    rows += [(f"pass@{k}", f"{value:.3f}") for k, value in result.pass_at.items()]
    rows += [(label, f"{result.metrics[key]:.3f}") for label, key in SHOWN if key in result.metrics]
    rows += [(f"stop: {stop}", f"{value:.3f}") for stop, value in stops if value]
    if result.information:
        known = " ".join("–" if value is None else f"{value:.1f}" for value in result.information[:MOST_TURNS])
        more = " …" if len(result.information) > MOST_TURNS else ""
        rows.append(("information about the answer by turn, nats", f"{known}{more}"))
    rows.append(("seconds", f"{result.seconds:.1f}"))
    problems, samples = counted(result.problems, "held-out problem"), counted(result.samples, "sample")
    console = Console()
    show_folding(console, table(f"{problems} × {samples}, seed {result.seed}", ("metric", "value"), rows))
    steps = "" if step is None else f", after {counted(step, 'step')}"
    console.print(f"model: {model}{steps}", highlight=False, soft_wrap=True, markup=False)
