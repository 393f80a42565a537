"""YAML files and overrides on top of each other as one tree in which every value names its origin.

extends: search_base          a path relative to this file, or the name of a shipped configuration; or a list,
train: {steps: 10}            of which later files win. Mappings are merged, lists and scalars replaced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from condensegrpo.algorithms.settings import LossSettings
from condensegrpo.config.schema import CondenserPlugin, RewardPlugin, SamplerPlugin
from condensegrpo.config.yaml_tree import EXTENDS, KeyPath, apply_overrides, read_yaml
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

Tree = dict[str, Any]

_SHIPPED = Path(str(files("condensegrpo.configs")))
OVERRIDE = "override"  # the origin of a value that an override set
PLUGINS: Mapping[KeyPath, tuple[str, str | None]] = {  # sections with options: the key of the plug-in, its default
    ("task",): ("name", None),
    ("condenser",): ("name", CondenserPlugin().name),
    ("reward",): ("name", RewardPlugin().name),
    ("sampler",): ("name", SamplerPlugin().name),
    ("algorithm", "advantage"): ("estimator", "default for the reward"),
    ("algorithm", "loss"): ("name", LossSettings().name),
}


@dataclass(frozen=True, slots=True)
class Sourced:
    """A leaf of a tree: a scalar, or an empty mapping or list."""

    value: object
    origin: str  # the path of a file, or ``OVERRIDE``


def with_leaves(tree: Any, change: Callable[[Any, KeyPath], object], key: KeyPath = ()) -> Any:  # noqa: ANN401  a YAML tree
    """A tree with other leaves. The key of an entry of a list is that of the list."""
    if tree and isinstance(tree, dict):
        return {name: with_leaves(value, change, (*key, str(name))) for name, value in tree.items()}
    if tree and isinstance(tree, list):
        return [with_leaves(value, change, key) for value in tree]
    return change(tree, key)


def sourced(tree: object, origin: str) -> Any:  # noqa: ANN401  a YAML tree
    """A tree whose leaves name their origin."""
    return with_leaves(tree, lambda leaf, _: Sourced(leaf, origin))


def plain(tree: object) -> Any:  # noqa: ANN401  a YAML tree
    """The tree without origins."""
    return with_leaves(tree, lambda leaf, _: leaf.value if isinstance(leaf, Sourced) else leaf)


def origins(tree: object, key_path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """The path of keys and the origin of every leaf."""
    if isinstance(tree, Sourced):
        yield key_path, tree.origin
    elif isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from origins(value, (*key_path, str(key)))


def layered(path: Path, extended_by: tuple[Path, ...] = ()) -> Tree:
    """The tree of a file on top of the files that it extends, with origins."""
    chain = (*extended_by, path)
    if path.resolve() in [each.resolve() for each in extended_by]:
        raise ConfigError(
            f"reading the configuration {chain[0]}: {EXTENDS} makes a cycle: {' → '.join(map(str, chain))}. "
            "Remove it from one of these files."
        )
    tree = read_yaml(path)
    result: Tree = {}
    for name in _names(path, tree.pop(EXTENDS, [])):
        result = merged_tree(result, layered(_base(path, name), chain))
    return merged_tree(result, {key: sourced(value, str(path)) for key, value in tree.items()})


def merged_tree(base: Tree, child: Tree, key_path: KeyPath = ()) -> Tree:
    """A tree with origins on top of another: mappings are merged, lists and scalars replaced.

    Where the child names another plug-in, the options of the base's plug-in are dropped.
    """
    result = dict(base)
    for key, value in child.items():
        old, below = base.get(key), (*key_path, str(key))
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = merged_tree(_without_other_options(old, value, below), value, below)
        elif not (isinstance(old, dict) and plain(value) == {}):
            result[key] = value
    return result


def overridden(base: Tree, overrides: Sequence[str]) -> Tree:
    """A tree with ``key=value`` overrides on top, see ``merged_tree``."""
    keys = {".".join((*key_path, key)) for key_path, (key, _) in PLUGINS.items()}
    names = apply_overrides({}, [each for each in overrides if each.partition("=")[0] in keys])
    return apply_overrides(merged_tree(base, names), overrides, wrap=lambda value: sourced(value, OVERRIDE))


def _without_other_options(base: Tree, child: Tree, key_path: KeyPath) -> Tree:
    if key_path not in PLUGINS:
        return base
    key, default = PLUGINS[key_path]
    name = plain(base.get(key)) or default
    same = name is None or plain(child.get(key, name)) == name
    return base if same else {entry: value for entry, value in base.items() if entry != "options"}


def _names(path: Path, value: object) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"reading the configuration {path}: {EXTENDS} is {value!r}, wanted the name of a file or a list of names."
        )
    return [str(name) for name in names]


def _base(path: Path, name: str) -> Path:
    base = path.parent / name
    if base.is_file():
        return base
    if shipped := shipped_file(name):
        return shipped
    known = [shipped_name(entry) for entry in shipped_files()]
    raise ConfigError(
        f"reading the configuration {path}: it extends {name}, but there is no file {base} and no shipped "
        f"configuration of this name. {did_you_mean(name, known)}Shipped: {', '.join(known)}."
    )


def shipped_files() -> list[Path]:
    """The configurations in the package, those that others extend included."""
    return sorted(_SHIPPED.rglob("*.yaml"))


def shipped_name(path: Path) -> str:
    """What a shipped configuration is called: ``quickstart``, ``methods/mem1``."""
    return path.relative_to(_SHIPPED).as_posix().removesuffix(".yaml")


def shipped_file(name: str) -> Path | None:
    """The shipped configuration of a name, with or without ``.yaml``."""
    stem = name.removesuffix(".yaml")  # a name may hold a dot of its own: qwen3_0.6b
    return next((path for path in shipped_files() if shipped_name(path) == stem), None)
