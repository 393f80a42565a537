"""A YAML file and ``key=value`` overrides as one tree of plain values, not yet checked against anything."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from condensegrpo.core.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error: the first one would be dropped without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are all different."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The tree of a YAML file."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # a SafeLoader
    except OSError as error:
        raise ConfigError(
            f"reading the configuration {path}: {error.strerror}. Give the path of a YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"reading the configuration {path}: it is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"reading the configuration {path}: found {type(tree).__name__}, wanted a mapping of keys.")
    return tree


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A tree with dotted ``key=value`` overrides; missing branches are made, the given tree is left alone."""
    result: dict[str, Any] = yaml.safe_load(yaml.safe_dump(dict(tree)))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"reading the override {override!r}: wanted key=value, such as train.steps=20.")
        try:
            _put(result, key.split("."), yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ConfigError(f"reading the override {override!r}: the value is not YAML: {error}") from error
        except (IndexError, ValueError) as error:
            raise ConfigError(f"reading the override {override!r}: no such entry of a list: {error}") from error
    return result


def _put(tree: Any, path: Sequence[str], value: object) -> None:  # noqa: ANN401  a YAML tree
    """Set the value at a path, making the mappings on the way; a number picks the entry of a list."""
    first, *rest = path
    key: Any = int(first) if isinstance(tree, list) else first
    if not rest:
        tree[key] = value
        return
    if isinstance(tree, dict) and not isinstance(tree.get(key), (dict, list)):
        tree[key] = {}
    _put(tree[key], rest, value)


def numbers(tree: Any) -> Any:  # noqa: ANN401  a YAML tree
    """YAML 1.1 reads ``1e-3`` as text; make it the number that its writer meant."""
    if isinstance(tree, Mapping):
        return {key: numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [numbers(value) for value in tree]
    if isinstance(tree, str) and tree[:1] in "0123456789.-" and "e" in tree.lower():
        try:
            return float(tree)
        except ValueError:
            return tree
    return tree
