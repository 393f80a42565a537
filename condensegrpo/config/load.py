"""From YAML files and ``key=value`` overrides to a configuration, and back to YAML.

    extends: search_base          a path relative to this file, or the name of a shipped configuration; or a list,
    train: {steps: 10}            of which later files win. Mappings are merged, lists and scalars replaced.

    reward: {name: my/reward.py:Brief}   ─▶   reward: {name: /home/me/project/my/reward.py:Brief}

A relative path is looked for in the working directory, and one of a file also beside that file. If it is found, it is
absolute from here on; if not, it stays, and what reads it says so. Paths are the files of plug-ins and data wherever
they are named, and the folders of ``FOLDERS``.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, reduce
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from condensegrpo.algorithms.settings import LossSettings
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.section import Layers, parse
from condensegrpo.config.use import CondenserUse, RewardUse, SamplerUse
from condensegrpo.config.yaml_tree import (
    EXTENDS,
    KeyPath,
    Tree,
    apply_overrides,
    changed,
    dump,
    dump_commented,
    key_of,
    leaves,
    read_yaml,
)
from condensegrpo.core.credentials import without_credentials
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.process import working_directory
from condensegrpo.core.wording import did_you_mean

HELD_OUT = "held-out"  # the evaluation on a configuration's own problems
CONFIG_FILE = "config.yaml"  # the configuration in a run folder
OVERRIDE = "override"  # the origin of a value that an override set
BFLOAT16_CAP = 2.0  # of algorithm.importance, unless it is set: the bound that truncated importance sampling uses
SHIPPED = Path(str(files("condensegrpo.configs"))).parent  # with configs/ and studies/, in a clone and installed
LISTED = "condensegrpo config --shipped lists those of the package."
FOLDERS = (  # they may be files
    ("task", "data"),
    ("task", "eval_data"),
    ("model", "path"),
    ("sandbox", "packages"),
    ("rollout", "condense", "writer"),
)
# of the task ``agent``, relative to the folder of an episode
IN_EPISODE = tuple(("task", "options", name) for name in ("program", "outcome", "answer_file", "protected"))
PLUGINS: Mapping[KeyPath, tuple[str, str | None]] = {  # sections with options: the key of the plug-in, its default
    ("task",): ("name", None),
    ("condenser",): ("name", CondenserUse().name),
    ("reward",): ("name", RewardUse().name),
    ("sampler",): ("name", SamplerUse().name),
    ("algorithm", "advantage"): ("estimator", "default for the reward"),
    ("algorithm", "loss"): ("name", LossSettings().name),
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file and the files that it extends, with ``key=value`` overrides on top.

    A value is read as YAML: ``train.steps=20``, ``rollout.tools.use=[calculator]``, ``model.new=null``. Where an
    override names another plug-in, the options of the file's plug-in are dropped.
    """
    tree, layers = _read(path, locate=True)
    return validate(overridden(tree, overrides), source=str(path), overrides=overrides, files=layers)


def resolved(path: Path, overrides: Sequence[str]) -> Tree:
    """The tree of a file, the files that it extends, and overrides, with the paths that are written there."""
    tree, _ = _read(path, locate=False)
    return overridden(tree, overrides, locate=False)


def _read(path: Path, extended_by: tuple[Path, ...] = (), *, locate: bool) -> tuple[Tree, Layers]:
    """The tree of a file on top of those that it extends, and the tree of each of these files alone.

    Args:
        locate: whether paths are made absolute.
    """
    chain = (*extended_by, path)
    if path.resolve() in [each.resolve() for each in extended_by]:
        raise ConfigError(
            f"reading the configuration {chain[0]}: {EXTENDS} makes a cycle: {' → '.join(map(str, chain))}. "
            "Remove it from one of these files."
        )
    tree = read_yaml(path)
    given = tree.pop(EXTENDS, [])
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"reading the configuration {path}: {EXTENDS} is {given!r}, wanted the name of a file or a list of names."
        )
    if locate:
        tree = located(tree, path)
    bases = [_read(_base(path, name), chain, locate=locate) for name in names]
    below: Tree = reduce(merged, (base for base, _ in bases), {})
    return merged(below, tree), (*(layer for _, layers in bases for layer in layers), (path, tree))


def _base(path: Path, name: str) -> Path:
    base = path.parent / name
    if base.is_file():
        return base
    known = shipped_files()
    if known_file := known.get(name.removesuffix(".yaml")):
        return known_file
    raise ConfigError(
        f"reading the configuration {path}: it extends {name}, but there is no file {base} and no shipped "
        f"configuration of this name. {did_you_mean(name, known, most=3)}{LISTED}"
    )


def merged(base: Tree, child: Tree, path: KeyPath = ()) -> Tree:
    """A tree on top of another: mappings are merged, lists and scalars replaced.

    Where the child names another plug-in, the options of the base's plug-in are dropped.
    """
    result = dict(base)
    for name, value in child.items():
        old, below = base.get(name), (*path, str(name))
        if isinstance(old, dict) and isinstance(value, dict):
            key, default = PLUGINS.get(below, ("", None))
            plugin = old.get(key) or default
            if plugin is not None and value.get(key, plugin) != plugin:
                old = {entry: kept for entry, kept in old.items() if entry != "options"}
            value = merged(old, value, below)
        result[name] = value
    return result


def overridden(base: Tree, overrides: Sequence[str], *, locate: bool = True) -> Tree:
    """A tree with ``key=value`` overrides on top, see ``merged``; ``locate``: their paths are made absolute."""
    keys = {".".join((*path, key)) for path, (key, _) in PLUGINS.items()}
    change = [partial(_absolute, file=None)] if locate else []
    names = apply_overrides({}, [each for each in overrides if key_of(each) in keys], *change)
    return apply_overrides(merged(base, names), overrides, *change)


def located(tree: Tree, file: Path) -> Tree:
    """The tree of a file with absolute paths."""
    here: Tree = changed(tree, partial(_absolute, file=file))
    return here


def _absolute(value: object, key: KeyPath, file: Path | None) -> object:
    """A value whose paths that are found are absolute, those in overrides of variants too; ``file``: see ``_found``."""
    if not isinstance(value, str):
        return value
    if key[:2] != ("evaluate", "variants"):
        return _found(value, key, file)
    name, equals, text = value.partition("=")
    return f"{name}={_found(text, tuple(name.split('.')), file)}" if equals else value


def _found(text: str, key: KeyPath, file: Path | None) -> str:
    """The absolute path in place of a path, or of that of ``path.py:Name``, if it is found; else the text.

    Args:
        file: that holds the text; None: it is an override.
    """
    named, colon, attribute = text.rpartition(":") if ".py:" in text else (text, "", "")
    path, exists = Path(named), os.path.exists if key in FOLDERS else os.path.isfile  # of a text of any length
    if (
        path.is_absolute()
        or not (path.suffix or key in FOLDERS)
        or (key in IN_EPISODE and not colon)
        or (key[1:] == ("condense", "writer") and text in ("policy", "initial"))  # no folders, whatever is here
    ):
        return text
    of_studies = SHIPPED if text.startswith("studies/") else None  # files of the studies that a package brings
    for folder in (working_directory(), file and file.parent, of_studies):
        if folder is not None and exists(folder / path):
            # one file has one path, whatever links lead to it
            return f"{(folder / path).parent.resolve() / path.name}{colon}{attribute}"
    return text


def vary(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A configuration with some ``key=value`` overrides."""
    return validate(overridden(config.model_dump(mode="json"), overrides), source=f"overrides {list(overrides)}")


def evaluations(config: RunConfig) -> dict[str, RunConfig]:
    """The evaluations of a configuration: ``held-out``, its own problems, then each of ``evaluate.variants``."""
    found = {HELD_OUT: config}
    for name, overrides in config.evaluate.variants.items():
        with in_evaluation(name):
            found[name] = vary(config, overrides)
    return found


@contextmanager
def in_evaluation(name: str) -> Iterator[None]:
    """Errors of a configuration name the variant that they are in."""
    try:
        yield
    except ConfigError as error:
        if name == HELD_OUT:
            raise
        raise type(error)(f"checking evaluate.variants.{name}: {error}") from error


def longest_request(config: RunConfig) -> int:
    """The most tokens that a prompt and its reply make, in training and in every evaluation."""
    return max(varied.rollout.limits.turn_tokens for varied in evaluations(config).values())


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; ``load_config`` reads it back to an equal value."""
    return dump(config.model_dump(mode="json"))


def dump_with_origins(config: RunConfig, path: Path, overrides: Sequence[str] = ()) -> str:
    """``dump_config`` without credentials, with the origin of every value: a file, an override, or the default.

    ``path`` and ``overrides`` are those that gave the configuration.
    """
    given = [tuple(key_of(override).split(".")) for override in overrides]
    tree, layers = _read(path, locate=True)
    tree = overridden(tree, overrides)
    known = [(str(file), {leaf for leaf, _ in leaves(its)}) for file, its in reversed(layers)]
    origins = dict[KeyPath, str]()
    for leaf, _ in leaves(tree):
        file = next((name for name, its in known if leaf in its), OVERRIDE)
        origins[leaf] = OVERRIDE if any(leaf[: len(key)] == key for key in given) else file
    names = Counter(Path(origin).name for origin in set(origins.values()))

    def comment(leaf: KeyPath) -> str:
        origin = origins.get(leaf, "default")
        name = Path(origin).name
        return origin if names[name] > 1 else name  # the whole path where two files have the same name

    shown: Any = without_credentials(config.model_dump(mode="json"))
    return dump_commented(shown, comment)


def shipped() -> tuple[str, ...]:
    """The names of the configurations in the package, without ``.yaml`` and without those that are only extended."""
    return tuple(name for name in shipped_files() if not name.endswith("base"))


def named_config(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a CONFIG argument means: a YAML file, the name of a shipped one, or a run folder."""
    stored = Path(name) / CONFIG_FILE
    return load_config(stored if stored.is_file() else find_config(name), overrides)


def config_on(device: Literal["cpu", "gpu"], name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a CONFIG argument means on a machine with such a device.

    A dtype that is not set is that device's, and so is what follows from it, such as ``algorithm.importance.cap``.
    """
    config = named_config(name, overrides)
    if "dtype" in config.model.model_fields_set:
        return config
    return named_config(name, (*overrides, f"model.dtype={'bfloat16' if device == 'gpu' else 'float32'}"))


def find_config(name: str) -> Path:
    """The file that a command's CONFIG argument means: a path, or the name of a shipped configuration.

    ``configs/quickstart.yaml`` works from an installed wheel as it does in a checkout, and so do ``methods/mem1`` and
    ``studies/configs/memory.yaml``.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"reading the configuration {name}: it is the folder of a run. Continue that run with --resume {name}, or "
            f"start a new one from {path / CONFIG_FILE}."
        )
    shipped_as = path.as_posix().removeprefix("configs/").removesuffix(".yaml")  # not the suffix: qwen3_0.6b has a dot
    if inside := shipped_files().get(shipped_as):
        return inside
    if path.parts[:1] == ("studies",) and (SHIPPED / path).is_file():
        return SHIPPED / path
    fault = f"it is a folder without {CONFIG_FILE}, so not that of a run" if path.is_dir() else "there is no such file"
    raise ConfigError(
        f"reading the configuration {name}: {fault}. {did_you_mean(shipped_as, shipped(), most=3)}{LISTED}"
    )


@cache
def shipped_files() -> Mapping[str, Path]:
    """The configurations in the package by name (``quickstart``, ``methods/mem1``), those that others extend too."""
    folder = SHIPPED / "configs"
    return {path.relative_to(folder).as_posix().removesuffix(".yaml"): path for path in sorted(folder.rglob("*.yaml"))}


def validate(tree: Mapping[str, Any], *, source: str, overrides: Sequence[str] = (), files: Layers = ()) -> RunConfig:
    """The checked configuration of a tree; ``overrides`` and ``files`` as of ``parse``.

    Its importance correction is set, by default by the precision of sampler and learner: in bfloat16 two programs that
    compute one model differ by some hundredths of a nat a token; in fp32 by 1e-6.
    """
    config = parse(RunConfig, tree, source=f"the configuration {source}", overrides=overrides, files=files)
    algorithm = config.algorithm
    if algorithm.importance.cap is not None:
        return config
    importance = replace(algorithm.importance, cap=BFLOAT16_CAP if config.in_bfloat16 else 0.0)
    return config.model_copy(update={"algorithm": algorithm.model_copy(update={"importance": importance})})


def plugin_files(config: RunConfig) -> tuple[Path, ...]:
    """The Python files that a configuration names, as ``path.py:Name``."""
    values = (value for _, value in leaves(config.model_dump(mode="json")))
    named = (value.rpartition("=")[2] for value in values if isinstance(value, str) and ".py:" in value)
    return tuple(sorted({Path(text.rpartition(":")[0]).absolute() for text in named}))


def portable(tree: Any) -> Any:  # noqa: ANN401  a YAML tree
    """A plain tree without folders of this machine: paths below the working directory are relative to it, and of other
    files only their names stay.
    """
    here = working_directory()

    def relative(leaf: object, _: KeyPath) -> object:
        file, colon, attribute = leaf.rpartition(":") if isinstance(leaf, str) and ".py:" in leaf else (leaf, "", "")
        if not (isinstance(file, str) and os.path.isabs(file) and os.path.exists(file)):
            return leaf
        path = Path(file)
        return f"{path.relative_to(here) if here and path.is_relative_to(here) else path.name}{colon}{attribute}"

    return changed(tree, relative)
