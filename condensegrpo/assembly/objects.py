"""Plug-ins given as Python objects in place of names, as ``condensegrpo.train(…, task=MyTask())`` does.

    task=MyTask                           ─▶   task: {name: "path/to/mine.py:MyTask"}: a class can be imported
    task=MyTask()                         ─▶   task: {name: "python:MyTask"}, and the object by that name
    tools=["calculator", look_up]         ─▶   rollout.tools.use: [{name: calculator}, {name: "python:look_up"}]
    condenser="full"                      ─▶   condenser: {name: full}
    reward={"name": "weighted_sum",       ─▶   reward: {name: weighted_sum,
      "options": {"parts": [Brief()]}}           options: {parts: ["python:Brief"]}}

A configuration cannot hold an object: it names it, and ``build`` takes the object of that name. Only the program that
made the object can build it again.
"""

import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, TypedDict

from condensegrpo.config.load import named_config, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.use import Objects
from condensegrpo.config.yaml_tree import is_within, key_of
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.plugin_kinds import KINDS
from condensegrpo.core.plugins import OBJECT, forget_edited
from condensegrpo.core.protocols.reward import GroupReward, Reward
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Task
from condensegrpo.core.protocols.tool import Tool
from condensegrpo.core.wording import did_you_mean


class Parts(TypedDict, total=False):
    """Parts of a run as objects, as classes in a file, or by name.

    A mapping ``{"name": …, "options": {…}}`` names a part, or gives its class, with options.
    """

    task: Task | type | str | Mapping[str, object]
    reward: Reward | GroupReward | type | str | Mapping[str, object]
    condenser: Condenser | type | str | Mapping[str, object]
    tools: Sequence[Tool | type | str | Mapping[str, object]]
    sampler: Sampler | type | str | Mapping[str, object]


SECTIONS = {place.argument: place.section.removesuffix("[]") for place in KINDS.values() if place.argument}
PARTS = tuple(Parts.__annotations__)


def configured(
    config: RunConfig | os.PathLike[str] | str, overrides: Sequence[str], parts: Parts
) -> tuple[RunConfig, Objects]:
    """A configuration with some of its parts replaced, then with overrides, and the objects among the parts.

    A part replaces its whole section. Evaluation variants that change a replaced section are left out.

    Args:
        config: also a YAML file, the name of a shipped configuration, or a run folder.
    """
    forget_edited()  # a call of Python begins: the files of plug-ins may have been edited since the last one
    if not isinstance(config, RunConfig | str | os.PathLike):
        raise ConfigError(
            f"reading the arguments: the configuration is {config!r:.80}, wanted a YAML file, the name of a shipped "
            f"one, a run or a RunConfig."
        )
    before = config if isinstance(config, RunConfig) else named_config(os.fspath(config))
    objects, changes = dict[str, object](), dict[str, object]()
    named = partial(_name_of, objects)
    if wrong := [each for each in overrides if not isinstance(each, str)]:
        raise ConfigError(f"reading the arguments: found {wrong[0]!r}, wanted overrides such as 'train.steps=3'.")
    for part, given in parts.items():
        if part not in PARTS:
            raise ConfigError(
                f"reading the arguments: there is no part {part!r}. {did_you_mean(part, PARTS)}Parts are "
                f"{', '.join(PARTS)}; a key of the configuration is an override in quotes, such as 'train.steps=20'."
            )
        is_list = part == "tools" and isinstance(given, Sequence) and not isinstance(given, str)
        several: Any = given if is_list else (given,)
        sections = [
            dict(each) if isinstance(each, Mapping) else {"name": each if isinstance(each, str) else named(each)}
            for each in several
        ]
        changes[SECTIONS[part]] = sections if part == "tools" else sections[0]
    variants = before.evaluate.variants
    kept = {name: lines for name, lines in variants.items() if not any(_is_within(line, changes) for line in lines)}
    if kept != variants:
        changes["evaluate.variants"] = kept
    lines = [*(f"{key}={json.dumps(value, default=named)}" for key, value in changes.items()), *overrides]
    if not lines:
        return before, objects
    return vary(config, lines) if isinstance(config, RunConfig) else named_config(os.fspath(config), lines), objects


def _is_within(line: str, sections: Iterable[str]) -> bool:
    """Whether an override changes one of some sections, or a section around it."""
    key = key_of(line)
    return any(is_within(key, each) or is_within(each, key) for each in sections)


def _name_of(objects: dict[str, object], given: object) -> str:
    """The name that a configuration has for what it cannot hold; an object is added to ``objects`` by that name."""
    if isinstance(given, os.PathLike):
        return str(os.fspath(given))
    if inspect.isclass(given):
        return _import_path(given)
    label = given.__name__ if isinstance(given, FunctionType | MethodType) else type(given).__name__
    name = f"{OBJECT}{label}"
    while objects.setdefault(name, given) is not given:
        name += "_"
    return name


def _import_path(given: type) -> str:
    """The place of a class, as a configuration names it: ``path/to/file.py:Name``."""
    file = getattr(sys.modules.get(given.__module__), "__file__", None)
    if given.__module__ == "__main__" or "." in given.__qualname__ or file is None:
        raise ConfigError(
            f"reading the arguments: found the class {given.__name__} of {given.__module__}, which no file has that "
            f"can be imported alone. Put it at the top level of a file and import it from there, or give an object: "
            f"{given.__name__}(…)."
        )
    return f"{Path(file).resolve()}:{given.__name__}"


def described_objects(config: RunConfig, objects: Objects) -> tuple[str, ...]:
    """The lines of the log of a run whose parts are objects."""
    if not objects:
        return ()
    names = ", ".join(name.removeprefix(OBJECT) for name in objects)
    if {tool.name for tool in config.rollout.tools.tools} >= objects.keys():
        override = KINDS["tools"].override("mine.py:look_up")
        cure = f'{override}, unless the run names functions of a file, as in tools=["mine.py:look_up"]'
    else:
        override = KINDS["rewards"].override("mine.py:Mine")
        cure = f"{override}, unless the run is given classes of a file, as in reward=Mine"
    return (f"built by this program alone: {names}. condensegrpo eval needs them by name, as in {cure}",)
