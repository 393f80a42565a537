"""``Section``, the base of all sections of a configuration, and the errors of a tree that is none."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError

from condensegrpo.config.foreign_keys import FOREIGN_KEYS
from condensegrpo.config.yaml_tree import KeyPath, Tree, is_within, key_of, leaves
from condensegrpo.core.credentials import shown_override, without_credentials
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # what pydantic calls the fault of an unknown key
NO_MAPPING, MAPPING = ("model_type", "dataclass_type", "dict_type"), "a mapping of keys"
SHORTER = {
    "Input should be ": "",
    "String should match pattern": "a match of",
    "String should have ": "",
    "Tuple should have ": "",
    "List should have ": "",
    "Keys should be strings": "a text as the key",
    " after validation, not ": " and not ",
    "Value error, ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid": "a",
    "a integer": "an integer",
}


class Section(BaseModel):
    """The base of the sections that only the configuration knows: unknown keys are errors.

    A frozen dataclass of the core that is a field of a section is validated in the same way, and the docstring below a
    field is its description.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)
Layers = Sequence[tuple[Path, Tree]]  # files with their trees, of which later ones win


def parse(kind: type[S], tree: object, *, source: str, overrides: Sequence[str] = (), files: Layers = ()) -> S:
    """The checked section of a tree.

    Args:
        source: begins the message of an error.
        overrides: those that set some of its values.
        files: those that the tree was merged from.
    """
    faults, cause, section = list[_Fault](), None, None
    try:
        section = kind.model_validate(tree)
    except ValidationError as error:
        cause, faults = error, list(_faults(kind, error.errors(), tree))
    else:
        read = dict(leaves(section.model_dump()))
        faults = [
            _Fault(path, f"{'.'.join(path)}: found {value}, wanted a number")
            for path, value in leaves(tree)
            if isinstance(value, bool) and type(read.get(path)) in (int, float)  # pydantic reads true as the number 1
        ]
    if section is None or faults:
        lines = (f"  {fault.said}{_origin(fault, overrides, files)}" for fault in faults)
        raise ConfigError("\n".join((f"reading {source}:", *lines))) from cause
    return section


class _Fault(NamedTuple):
    """A fault at a key."""

    path: KeyPath
    said: str
    of_section: bool = False  # of the values of a section together, which several files may have set


def _origin(fault: _Fault, overrides: Sequence[str], files: Layers) -> str:
    """The override that a fault is in, or that is in its section; else the file below that it is in."""
    key = ".".join(fault.path)
    within = [each for each in overrides if is_within(key, key_of(each)) or is_within(key_of(each), key)]
    if within:
        return f" (the override {shown_override(within[-1])})"
    file = next((file for file, tree in reversed(files) if _sets(tree, fault.path)), None)
    return f" (in {file})" if file and file != files[-1][0] and not fault.of_section else ""


def _sets(tree: object, path: KeyPath) -> bool:
    """Whether a file sets the value at a path, which mappings are merged to: a list replaces what is below it."""
    for part in path:
        if not isinstance(tree, dict):
            return True
        if part not in tree:
            return False
        tree = tree[part]
    return True


def _reached(tree: object, path: Sequence[object]) -> KeyPath:
    """The parts of a path that are keys or indices in a tree: pydantic also names the members of a union in between."""
    reached = []
    for part in path:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and str(part).isdigit() and int(str(part)) < len(tree):
            tree = tree[int(str(part))]
        else:
            continue
        reached.append(str(part))
    return tuple(reached)


def _faults(kind: type[BaseModel], errors: Sequence[Any], tree: object) -> Iterator[_Fault]:
    """The faults of pydantic's errors; those of one value, which no member of a union takes, are one."""
    by_place = dict[KeyPath, list[Any]]()
    for error in errors:
        *_, last = error["loc"] or ("",)
        end = [str(last)] if error["type"] in ("missing", "invalid_key") or last == "[key]" else []
        by_place.setdefault((*_reached(tree, error["loc"]), *end), []).append(error)
    for place, its in by_place.items():
        in_union = any(len(error["loc"]) > len(place) for error in its)
        # a mapping in a union is read as the member that is one: its faults are those of its keys
        if not (in_union and any(other[: len(place)] == place != other for other in by_place)):
            first = its[0]
            of_section = first["type"] == "value_error" and isinstance(first["input"], dict)
            yield _Fault(place, _said(kind, place, its), of_section=of_section)


def _said(kind: type[BaseModel], place: KeyPath, errors: Sequence[Any]) -> str:
    key, first = ".".join(place) or "(the whole)", errors[0]
    if first["type"] in UNKNOWN:
        return f"{key}: unknown key. {key_suggestion([kind], place)}"
    if first["type"] == "missing":
        return f"{key}: missing"
    value = without_credentials(first["input"], place[-1] if place else "")
    wanted = [MAPPING if each["type"] in NO_MAPPING else expectation(each["msg"]) for each in errors]
    if first["type"] == "value_error":  # a sentence of a validator
        return f"{key}: found {value!r}; {wanted[0]}" if place else wanted[0]  # not all of the file
    return f"{key}: found {value!r}, wanted {' or '.join(wanted)}"


def expectation(message: str) -> str:
    """What pydantic's message asks for, shorter: "Input should be greater than or equal to 0" is "at least 0"."""
    message = message.partition(", unable to")[0]
    for long, short in SHORTER.items():
        message = message.replace(long, short)
    return message


def key_suggestion(sections: Sequence[type], path: Sequence[object]) -> str:
    """The key that an unknown one may stand for, or all that are known at the end of the path to it."""
    *outer, name = path
    within = sections_at(sections, outer)[:1]
    known = [key for section in within for key in keys_of(section)]
    inner = next((key for each in within for key in _nested_keys(each) if key.endswith(f".{name}")), None)
    dotted = ".".join(map(str, path))
    if dotted in FOREIGN_KEYS:
        return f"It is {FOREIGN_KEYS[dotted]} here."
    if any(is_within(key, dotted) for key in FOREIGN_KEYS):
        return "It is of verl; condensegrpo explain KEY says what a key of verl is called here."
    near = f"Did you mean {inner!r}?" if inner else did_you_mean(str(name), known).strip()
    return near or (f"Known here: {', '.join(known)}." if known else "It has no keys.")


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


def sections_at(sections: Sequence[type], path: Sequence[object]) -> Sequence[type]:
    """The sections at a path below others; an index, or the name of a member of a union, leads no deeper."""
    for part in path:
        inner = [get_type_hints(section).get(str(part)) for section in sections]
        sections = [each for annotation in inner for each in sections_in(annotation)] or sections
    return sections


def keys_of(section: type) -> list[str]:
    """The keys of a section, inherited ones included; of any other class none."""
    if is_dataclass(section):
        return [field.name for field in fields(section)]
    return list(section.model_fields) if issubclass(section, BaseModel) else []
