"""``condensegrpo play``: a person, or a list of texts, plays an episode in place of the policy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.rule import Rule

from condensegrpo.cli.options import AnyConfig, Overrides
from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.core.observer import Silent
from condensegrpo.core.protocols.task import Split
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.console import loading
from condensegrpo.display.theme import neutral

if TYPE_CHECKING:
    from condensegrpo.assembly.components import Components
    from condensegrpo.samplers.scripted_texts import ReplyRequest

# no evaluation, warm start, other model or measure of replies; a person may take a day
PLAYED = ("evaluate.variants={}", "warm_start.steps=0", "rollout.answer_form=null", "rollout.limits.turn_seconds=86400")
CONTINUED = "\\"  # at the end of a line: the reply goes on


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
    with loading("torch and transformers") as display:
        from condensegrpo.api import rollout
        from condensegrpo.assembly.build import build
        from condensegrpo.config.load import named_config
        from condensegrpo.learner.model_folder import load_tokenizer
        from condensegrpo.samplers.scripted_texts import TextSampler, read_replies, said

        settings = named_config(config, [*(overrides or ()), *PLAYED])
        display.phase(f"reading the problems of {settings.task.name}", None)
        components = build(settings)
        problems = components.problems(split)
    if problem >= len(problems):
        raise ConfigError(
            f"reading --problem: found {problem}, and the {split} problems are {len(problems)}, counted from 0."
        )
    reply = typed if replies is None else said(read_replies(replies))

    def say(request: "ReplyRequest") -> str:
        _show(request, components.config.rollout.limits.max_context_tokens)
        text = reply(request)
        if replies is not None or not sys.stdin.isatty():  # a terminal shows what is typed
            theme.console().print(neutral(text), style="bold", markup=False, soft_wrap=True)
        return text

    with _tokenizer_of(components) as source:
        sampler = TextSampler(load_tokenizer(source), say)
        posed = [problems[problem]]
        played = rollout(components.config, model=source, problems=posed, sampler=sampler, observer=Silent())
    theme.console().print(Rule("the episode", style=theme.HEAD))
    played[0].show()


def typed(request: "ReplyRequest") -> str:
    """A reply from the terminal."""
    typer.echo("your reply: ", nl=False)
    lines = list[str]()
    while not lines or lines[-1].endswith(CONTINUED):
        line = sys.stdin.readline()
        if not line:
            typer.echo()
            raise SamplerError(f"reading reply {request.number}, counted from 0: the input ended before a reply.")
        lines.append(line.rstrip("\n"))
    return "\n".join(line.removesuffix(CONTINUED) for line in lines)


def _show(request: "ReplyRequest", budget: int) -> None:
    """Print a prompt as the policy gets it."""
    console = theme.console()
    size = f"{request.tokens} of {counted(budget, 'token')}, a reply has at most {request.max_tokens}"
    console.print(Rule(f"turn {request.number}: the prompt, {size}", style=theme.FREE, align="left"))
    console.print(neutral(request.prompt), markup=False, highlight=False, soft_wrap=True)


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
    with TemporaryDirectory(prefix="condensegrpo-play-") as folder:
        made.save_pretrained(folder)
        new_config(model.new, vocab_size=len(made)).save_pretrained(folder)
        yield folder
