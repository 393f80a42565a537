"""``condensegrpo init``: a task, a configuration and a test to start from, which run at once and offline."""

import json
import keyword
import os
import re
import shlex
import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.storage.files import write_atomically

NEW = "new"
TINY = "{new: {tokenizer: words, hidden_size: 64, layers: 2, heads: 2, ffn_size: 256, max_positions: 512}}"
WARM_START = "warm_start: {steps: 400}  # supervised steps on the task's demonstrations"
NAME = re.compile(r"[a-z][a-z0-9_]*")


class Episodes(StrEnum):
    """The templates of a task."""

    TURNS = "turns"  # an environment of several turns
    QUESTION = "question"  # one question, with tools if you like


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write the files; it is created.")] = Path(),
    name: Annotated[str | None, typer.Option(help="Of the task: a Python module, such as my_task.")] = None,
    episodes: Annotated[
        Episodes | None, typer.Option(help="turns: an environment of several turns; question: one question.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face folder or Hub id; new: a tiny model, made and warmed up on the spot, offline."),
    ] = None,
) -> None:
    """Write a task, a configuration and a test of your own to start from. Asks for what no option says.

    Example: condensegrpo init my_task --name my_task --episodes turns --model new
    """
    name = name or typer.prompt("Name of the task", default="my_task")
    if NAME.fullmatch(name) is None or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise ConfigError(
            f"reading --name: found {name!r}, wanted the name of a Python module (lower-case letters, digits and _), "
            f"none that Python uses itself."
        )
    question = "Episodes (turns: an environment of several turns; question: one question)"
    episodes = episodes or typer.prompt(question, default=Episodes.TURNS.value, value_proc=_episodes)
    model = model or typer.prompt("Model (Hub id or folder; new: a tiny one)", default=NEW)
    if model != NEW and (local := Path(model).expanduser()).is_dir():
        model = os.path.relpath(local.resolve(), folder.resolve())  # the configuration lies in the folder
    texts = _texts(name, episodes, model)
    taken = [file for file in texts if (folder / file).exists()]
    if taken:
        raise RunError(f"writing {folder / taken[0]}: the file exists. Choose another --name or folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"creating {folder}: {error.strerror}. Give another folder.") from error
    for file, text in texts.items():
        write_atomically(folder / file, text)
        typer.echo(f"wrote {folder / file}")
    go = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    typer.echo(f"next: {go}pytest test_{name}.py && condensegrpo train {name}.yaml")


def _episodes(text: str) -> Episodes:
    """An answer, or an error after which the question is repeated."""
    if text not in {*Episodes}:
        raise typer.BadParameter(f"found {text!r}, wanted {' or '.join(Episodes)}")
    return Episodes(text)


def _texts(name: str, kind: Episodes, model: str) -> Mapping[str, str]:
    """The text of every file, by its name."""
    several = kind is Episodes.TURNS
    tiny = model == NEW
    values = {
        "name": name,
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "model": TINY if tiny else f"{{path: {json.dumps(model)}}}",
        "condenser": "{name: last_k, options: {keep_last: 1}}" if several else "{name: full}",
        "turns": 6 if several else 1,
        "context": 96 if tiny else 1024,
        "output": 12 if tiny else 256,
        "warm_start": WARM_START if tiny else "sampler: {name: transformers}  # vllm is faster on a GPU",
        "rate": "1.0e-3" if tiny else "1.0e-6",
    }
    sources = {f"{name}.py": f"{kind.value}.py", f"{name}.yaml": "config.yaml", f"test_{name}.py": "test.py"}
    folder = files("condensegrpo.cli") / "templates"
    return {
        file: Template((folder / f"{source}.txt").read_text(encoding="utf-8")).substitute(values)
        for file, source in sources.items()
    }
