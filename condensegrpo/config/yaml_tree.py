"""YAML files and ``key=value`` overrides as one tree of plain values, and a tree as a checked section."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from condensegrpo.core.credentials import shown_override, without_credentials
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

INTEGER = re.compile(r"^[-+]?([0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)$")
FLOAT = re.compile(
    r"^[-+]?(([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))$|^\.nan$"
)
MAX_BITS = 1000  # of an integer
MAX_DEPTH = 50  # levels of nesting in a file or value
MAX_VALUES = 100_000  # scalars, lists and mappings in it, with those that aliases repeat
EXTENDS = "extends"  # the key of a YAML file that names the files below it
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # what pydantic calls the fault of an unknown key
WIDTH = 60  # columns of commented YAML before its comments


class Section(BaseModel):
    """The base of the sections that only the configuration knows: unknown keys are errors.

    A frozen dataclass of the core that is a field of a section is validated in the same way, and the docstring below a
    field is its description.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)
_INT_TAG, _FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_MERGE_TAG = "tag:yaml.org,2002:merge"  # of the key <<, which may stand twice
KeyPath = tuple[str, ...]  # the keys from the top of a tree to a value; of an entry of a list, its index


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, 010 is ten and 1:30 is a text: PyYAML, which is YAML 1.1, reads a text, 8 and 90.

    A key that stands twice is an error, where PyYAML drops the first one silently; so is deep nesting, and what aliases
    make too large.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node, not too deep."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MAX_DEPTH} levels of nesting", parent.start_mark if parent else None
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:  # noqa: ANN401  a YAML tree
        """The tree of a root node, not too large."""
        if _values_in(node, {}) > MAX_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {MAX_VALUES:,} values, those that aliases repeat included", node.start_mark
            )
        return super().construct_document(node)

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
        number = int(digits) if digits.lstrip("+-").replace("_", "").isdecimal() else int(digits, base=0)
        if number.bit_length() > MAX_BITS:  # Python raises where it writes a very long one, or makes a float of it
            raise ValueError(f"it has more than {MAX_BITS} bits")
        return number


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


def _values_in(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """The values at and below a node, each as often as aliases repeat it. ``counted`` are the nodes counted before."""
    if node not in counted:
        counted[node] = MAX_VALUES  # for an alias to itself, whose tree has no end
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = (each for child in children for each in (child if isinstance(child, tuple) else (child,)))
        counted[node] = 1 + sum(_values_in(each, counted) for each in nodes)
    return counted[node]


def parse_yaml(text: str) -> Any:  # noqa: ANN401  a YAML tree
    """The tree of a YAML text; raises ``yaml.YAMLError`` with one line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}" if mark else error
        raise yaml.YAMLError(" ".join(str(place).split())) from error


def dump(tree: Mapping[str, Any]) -> str:
    """A tree as YAML; ``load`` reads it back to an equal tree."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def dump_commented(tree: Mapping[str, Any], comment: Callable[[KeyPath], str]) -> str:
    """A tree as YAML with a comment behind every leaf; ``load`` reads it back to an equal tree."""
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


def read_yaml(path: Path) -> dict[str, Any]:
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
        raise ConfigError(f"reading the configuration {path}: found {type(tree).__name__}, wanted a mapping of keys.")
    return tree


def leaves(tree: object, key: str = "") -> Iterator[tuple[str, object]]:
    """The values of a tree by their dotted keys; a list is one value, and so is an empty section."""
    if isinstance(tree, dict) and tree:
        for name, part in tree.items():
            yield from leaves(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def apply_overrides(
    tree: Mapping[str, Any], overrides: Sequence[str], *, wrap: Callable[[object], object] = lambda value: value
) -> dict[str, Any]:
    """A copy of a tree with dotted ``key=value`` overrides, each value wrapped; missing branches are created."""
    result: dict[str, Any] = deepcopy(dict(tree))
    for override in overrides:
        key, equals, text = override.partition("=")
        shown = shown_override(override)
        if not equals or not key:
            raise ConfigError(f"reading the override {shown!r}: wanted key=value, such as train.steps=20.")
        if key.partition(".")[0] == EXTENDS:
            raise ConfigError(
                f"reading the override {shown!r}: {EXTENDS} is a key of YAML files only. Name that file as the "
                f"CONFIG, or write '{EXTENDS}: {text}' into a file of your own."
            )
        try:
            put(result, key.split("."), wrap(parse_yaml(text)))
        except yaml.YAMLError as error:
            raise ConfigError(f"reading the override {shown!r:.80}: the value is not YAML: {error}") from error
        except TypeError as error:  # such as rollout.tools.use.0.options.x where use is [search]
            raise ConfigError(
                f"reading the override {shown!r}: it sets a key of an entry of a list, which is a single value and "
                f"has no keys. Replace the whole entry by a mapping, such as {{name: …, options: {{…}}}}."
            ) from error
        except (IndexError, ValueError) as error:
            raise ConfigError(f"reading the override {shown!r}: no such entry of a list: {error}") from error
    return result


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


def parse(kind: type[S], tree: object, *, source: str, overrides: Sequence[str] = ()) -> S:
    """The checked section of a tree, of which some values are those of ``overrides``."""
    try:
        section = kind.model_validate(tree)
    except ValidationError as error:
        lines = "\n".join(
            f"  {_fault(kind, fault)}{_overridden(fault['loc'], overrides, unknown=fault['type'] in UNKNOWN)}"
            for fault in error.errors()
        )
        raise ConfigError(f"reading {source}:\n{lines}") from error
    if taken := dict(_taken_for_numbers(tree, section.model_dump())):
        lines = "\n".join(
            f"  {'.'.join(path)}: found {value}, wanted a number{_overridden(path, overrides)}"
            for path, value in taken.items()
        )
        raise ConfigError(f"reading {source}:\n{lines}")
    return section


def _taken_for_numbers(given: object, read: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, bool]]:
    """The values of a tree that are true or false, and that pydantic read as the number 1 or 0, by where they are."""
    if isinstance(given, bool) and isinstance(read, int | float) and not isinstance(read, bool):
        yield path, given
    elif isinstance(given, dict) and isinstance(read, dict):
        for name in filter(read.__contains__, given):
            yield from _taken_for_numbers(given[name], read[name], (*path, str(name)))
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for index, (one, other) in enumerate(zip(given, read, strict=False)):
            yield from _taken_for_numbers(one, other, (*path, str(index)))


def _overridden(path: Sequence[object], overrides: Sequence[str], *, unknown: bool = False) -> str:
    """The override that a fault is in, or that leads through the unknown key: that is not in the file."""
    key = ".".join(map(str, path)) + "."
    names = {each: each.partition("=")[0] + "." for each in overrides}
    within = [each for each, name in names.items() if key.startswith(name) or (unknown and name.startswith(key))]
    return f" (the override {shown_override(within[-1])})" if within else ""


def _fault(kind: type[BaseModel], fault: Any) -> str:  # noqa: ANN401  pydantic's ErrorDetails
    key_path = [str(part) for part in fault["loc"]]
    key, reason = ".".join(key_path) or "(the whole)", fault["type"]
    value = without_credentials(fault["input"], key_path[-1] if key_path else "")
    if reason in UNKNOWN:
        section: type = kind
        for part in key_path[:-1]:  # the index of an entry, or the name of a member of a union, leads no deeper
            section = next(sections_in(get_type_hints(section).get(part)), section)
        known = keys_of(section)
        inner = [path for path in _nested_keys(section) if path.endswith(f".{key_path[-1]}")]
        near = did_you_mean(key_path[-1], known)
        hint = f"Did you mean {inner[0]!r}?" if inner else near or f"Known here: {', '.join(known)}"
        return f"{key}: unknown key. {hint.strip()}"
    if reason == "missing":
        return f"{key}: missing"
    if reason in ("model_type", "dataclass_type", "dict_type"):
        return f"{key}: found {value!r}, wanted a mapping of keys"
    message = fault["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    if message.startswith("Input should be "):
        expected = message.removeprefix("Input should be ").replace("greater than or equal to", "at least")
        expected = expected.replace("less than or equal to", "at most").replace("a valid tuple", "a list")
        return f"{key}: found {value!r}, wanted {expected}"
    return f"{key}: found {value!r}; {message}" if key_path else message  # not all of the file


def _nested_keys(section: type) -> Iterator[str]:
    """The keys of the sections within a section: ``limits.max_turns`` in that of the rollout."""
    hints = get_type_hints(section)
    for key in keys_of(section):
        yield from (f"{key}.{name}" for inner in sections_in(hints[key]) for name in keys_of(inner))


def sections_in(annotation: object) -> Iterator[type]:
    """The sections anywhere in an annotation: of ``list[str | Plugin]`` it is ``Plugin``."""
    if isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel)):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


def keys_of(section: type) -> list[str]:
    """The keys of a section, inherited ones included; of any other class none."""
    if is_dataclass(section):
        return [field.name for field in fields(section)]
    return list(section.model_fields) if issubclass(section, BaseModel) else []
