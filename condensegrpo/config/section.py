"""``Section``, the base of all sections of a configuration, and the errors of a tree that is none."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError

from condensegrpo.config.yaml_tree import leaves
from condensegrpo.core.credentials import shown_override, without_credentials
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # what pydantic calls the fault of an unknown key
SHOULD_BE = "Input should be "
SHORTER = {
    SHOULD_BE: "",
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


def parse(kind: type[S], tree: object, *, source: str, overrides: Sequence[str] = ()) -> S:
    """The checked section of a tree, of which some values are those of ``overrides``."""
    faults, cause, section = list[tuple[Sequence[object], str, bool]](), None, None
    try:
        section = kind.model_validate(tree)
    except ValidationError as error:
        cause = error
        faults = [(fault["loc"], _fault(kind, fault), fault["type"] in UNKNOWN) for fault in error.errors()]
    else:
        read = dict(leaves(section.model_dump()))
        faults = [
            (path, f"{'.'.join(path)}: found {value}, wanted a number", False)
            for path, value in leaves(tree)
            if isinstance(value, bool) and type(read.get(path)) in (int, float)  # pydantic reads true as the number 1
        ]
    if section is None or faults:
        lines = (f"  {said}{_overridden(path, overrides, unknown=unknown)}" for path, said, unknown in faults)
        raise ConfigError("\n".join((f"reading {source}:", *lines))) from cause
    return section


def _overridden(path: Sequence[object], overrides: Sequence[str], *, unknown: bool) -> str:
    """The override that a fault is in, or that leads through the unknown key: that is not in the file."""
    key = ".".join(map(str, path)) + "."
    names = {each: each.partition("=")[0] + "." for each in overrides}
    within = [each for each, name in names.items() if key.startswith(name) or (unknown and name.startswith(key))]
    return f" (the override {shown_override(within[-1])})" if within else ""


def _fault(kind: type[BaseModel], fault: Any) -> str:  # noqa: ANN401  pydantic's ErrorDetails
    key_path = [str(part) for part in fault["loc"]]
    key, reason = ".".join(key_path) or "(the whole)", fault["type"]
    if reason in UNKNOWN:
        return f"{key}: unknown key. {nearest_keys([kind], key_path)}"
    if reason == "missing":
        return f"{key}: missing"
    value = without_credentials(fault["input"], key_path[-1] if key_path else "")
    wanted = expectation(fault["msg"])
    if reason in ("model_type", "dataclass_type", "dict_type"):
        return f"{key}: found {value!r}, wanted a mapping of keys"
    if fault["msg"].startswith(SHOULD_BE):
        return f"{key}: found {value!r}, wanted {wanted}"
    return f"{key}: found {value!r}; {wanted}" if key_path else wanted  # not all of the file


def expectation(message: str) -> str:
    """What pydantic's message asks for, shorter: "Input should be greater than or equal to 0" is "at least 0"."""
    message = message.partition(", unable to parse")[0]
    for long, short in SHORTER.items():
        message = message.replace(long, short)
    return message


def nearest_keys(sections: Sequence[type], path: Sequence[object]) -> str:
    """The key that an unknown one may stand for, or all that are known at the end of the path to it."""
    *outer, name = path
    within = sections_at(sections, outer)[:1]
    known = [key for section in within for key in keys_of(section)]
    inner = next((key for each in within for key in _nested_keys(each) if key.endswith(f".{name}")), None)
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
