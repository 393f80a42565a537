"""YAML files and ``key=value`` overrides as trees of plain values, and trees as YAML."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from condensegrpo.core.credentials import shown_override
from condensegrpo.core.errors import ConfigError

INTEGER = re.compile(r"^[-+]?([0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)$")
FLOAT = re.compile(
    r"^[-+]?(([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))$|^\.nan$"
)
EXTENDS = "extends"  # the key of a YAML file that names the files below it
WIDTH = 60  # columns of commented YAML before its comments
Tree = dict[str, Any]
KeyPath = tuple[str, ...]  # the keys from the top of a tree to a value; of an entry of a list, its index
_INT_TAG, _FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_MERGE_TAG = "tag:yaml.org,2002:merge"  # of the key <<, which may stand twice


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, 010 is ten and 1:30 is a text: PyYAML, which is YAML 1.1, reads a text, 8 and 90.

    A key that stands twice is an error, where PyYAML drops the first one silently.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401  of PyYAML
        """The value of a node; an error with its place where PyYAML raises what Python's own functions do."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:  # of int(), of date(), of a tag that does not fit
            shown, why = str(node.value), f": {error}" if isinstance(error, ValueError) else ""
            said = f"{shown[:40]}{'…' * (len(shown) > 40)} is no {node.tag.rpartition(':')[2]}{why}"
            raise yaml.constructor.ConstructorError(None, None, said, node.start_mark) from error

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401  its type stub is wrong
        """A mapping whose keys are all different, before those of others are merged into it."""
        node = super().compose_mapping_node(anchor)
        seen = set[object]()
        for named, _ in node.value:
            if not isinstance(named, yaml.ScalarNode) or named.tag == _MERGE_TAG:
                continue
            if (key := self.construct_object(named)) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
            seen.add(key)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A whole number: decimal, also with leading zeros, or with the prefix 0x, 0o or 0b."""
        digits = self.construct_scalar(node)
        return int(digits) if digits.lstrip("+-").replace("_", "").isdecimal() else int(digits, base=0)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that ``_Loader``, or any other reader of YAML, would read as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (_INT_TAG, _FLOAT_TAG)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(_INT_TAG, _Loader.construct_yaml_int)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_INT_TAG, INTEGER, list("-+0123456789"))
    _kind.add_implicit_resolver(_FLOAT_TAG, FLOAT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:  # noqa: ANN401  a YAML tree
    """The tree of a YAML text; raises ``yaml.YAMLError`` with one line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}" if mark else error
        raise yaml.YAMLError(" ".join(str(place).split())) from error


def dump(tree: Mapping[str, Any]) -> str:
    """A tree as YAML; ``parse_yaml`` reads it back to an equal tree."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def dump_commented(tree: Mapping[str, Any], comment: Callable[[KeyPath], str]) -> str:
    """A tree as YAML with a comment after every leaf; ``parse_yaml`` reads it back to an equal tree."""
    text = yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)
    root = yaml.compose(text, Loader=_Loader)
    ends = list(_ends(root)) if root else []
    column = max((mark.column for _, mark in ends if mark.column <= WIDTH), default=0)
    parts, position = [], 0
    for key_path, mark in ends:
        parts.append(f"{text[position : mark.index]}{' ' * (column - mark.column)}  # {comment(key_path)}")
        position = mark.index
    return "".join([*parts, text[position:]])


def _ends(node: yaml.Node, key_path: KeyPath = ()) -> Iterator[tuple[KeyPath, yaml.Mark]]:
    """The path of keys of every leaf and where its text ends."""
    if node.value and isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _ends(value, (*key_path, key.value))
    elif node.value and isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _ends(value, (*key_path, str(index)))
    else:
        yield key_path, node.end_mark


def read_yaml(path: Path) -> Tree:
    """The tree of a YAML file."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"reading the configuration {path}: {error.strerror}. Give the path of a YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"reading the configuration {path}: it is not YAML: {error}") from error
    if not isinstance(tree, dict):
        found = "it is empty" if tree is None else f"found {tree!r:.40}"
        raise ConfigError(f"reading the configuration {path}: {found}, wanted a mapping of keys, such as name: value.")
    return tree


def leaves(tree: object, path: KeyPath = (), *, lists: bool = True) -> Iterator[tuple[KeyPath, Any]]:
    """The values of a tree with their paths; empty mappings and lists are values too.

    Args:
        lists: whether the entries of a list are values; else the list is one.
    """
    if tree and (isinstance(tree, dict) or (lists and isinstance(tree, list | tuple))):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, str(key)), lists=lists)
    else:
        yield path, tree


def changed(tree: Any, change: Callable[[Any, KeyPath], object], path: KeyPath = ()) -> Any:  # noqa: ANN401  a YAML tree
    """A tree with other values; the path of an entry of a list is that of the list."""
    if isinstance(tree, dict):
        return {key: changed(value, change, (*path, str(key))) for key, value in tree.items()}
    if isinstance(tree, list):
        return [changed(value, change, path) for value in tree]
    return change(tree, path)


def apply_overrides(
    tree: Mapping[str, Any], overrides: Sequence[str], change: Callable[[Any, KeyPath], object] = lambda value, _: value
) -> Tree:
    """A copy of a tree with dotted ``key=value`` overrides, whose values are changed; missing branches are created."""
    result: Tree = deepcopy(dict(tree))
    for given in overrides:
        key, equals, text = given.partition("=")
        shown = shown_override(given)
        if not equals or not key:
            raise ConfigError(f"reading the override {shown!r}: wanted key=value, such as train.steps=20.")
        if key.partition(".")[0] == EXTENDS:
            raise ConfigError(
                f"reading the override {shown!r}: {EXTENDS} is a key of YAML files only. Name that file as the "
                f"CONFIG, or write '{EXTENDS}: {text}' into a file of your own."
            )
        try:
            path = tuple(key.split("."))
            section = tuple(part for part in path if not part.isdigit())  # the path of an entry is that of its list
            put(result, path, changed(parse_yaml(text), change, section))
        except yaml.YAMLError as error:
            raise ConfigError(f"reading the override {shown!r:.80}: the value is not YAML: {error}") from error
        except TypeError as error:  # such as rollout.tools.use.0.options.x where use is [search]
            raise ConfigError(
                f"reading the override {shown!r}: it sets a key of an entry of a list, which is a single value and "
                f"has no keys. Replace the whole entry by a mapping, such as {{name: …, options: {{…}}}}."
            ) from error
        except (IndexError, ValueError) as error:
            raise ConfigError(
                f"reading the override {shown!r}: no such entry of a list. Set the whole list, as key=[…]."
            ) from error
    return result


def key_of(override: str) -> str:
    """The dotted key of a ``key=value`` override."""
    return override.partition("=")[0]


def is_within(key: str, section: str) -> bool:
    """Whether a dotted key is that of a section, or of something in it."""
    return f"{key}.".startswith(f"{section}.")


def override(key: str, text: str) -> str:
    """``key=value`` that gives a text, quoted where YAML would read something else: ``name='2024'``."""
    line = yaml.dump({key: text}, Dumper=_Dumper, allow_unicode=True, width=float("inf"))
    return "=".join(line.rstrip().split(": ", maxsplit=1))


def put(tree: Any, path: Sequence[str], value: object) -> None:  # noqa: ANN401  a YAML tree
    """Set the value at a path and create the mappings on the way; a number is the index of an entry of a list."""
    first, *rest = path
    key: Any = int(first) if isinstance(tree, list) else first
    if not rest:
        tree[key] = value
        return
    if isinstance(tree, dict) and not isinstance(tree.get(key), (dict, list)):
        tree[key] = {}
    put(tree[key], rest, value)
