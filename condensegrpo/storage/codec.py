"""Frozen dataclasses to one line of JSON and back, checked. Standard library only.

Not pydantic: its JSON parser refuses lone surrogates, which a byte-level tokenizer can produce, and its strict mode
refuses the lists that JSON has for tuples, while its lax mode reads ``"5"`` as 5.

A field that is absent takes its default if it has one, so a later version may add fields; an unknown field is an error.
A field with ``metadata={"stored": False}`` is not written.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from condensegrpo.core.shared_sequence import SharedSequence

T = TypeVar("T")


def dump_line(value: object) -> str:
    """One line of ASCII JSON without its newline; numbers read back equal to the last bit, text whatever it holds."""
    return _ENCODER.encode(value)


def fields_of(value: object) -> dict[str, object]:
    """The fields of a dataclass by name."""
    names, values = _fields(cast(Any, type(value)))
    return dict(zip(names, values(value), strict=True))


def decode(kind: type[T], value: object, path: str = "") -> T:
    """The value of type ``kind`` (a dataclass or a type that its fields have) that parsed JSON stands for."""
    return cast(T, _decode(kind, value, path))


def _plain(value: object) -> dict[str, object] | list[object] | str:
    if is_dataclass(value):
        return fields_of(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON")


def _decode(kind: Any, value: object, path: str) -> object:  # noqa: ANN401  a type or a typing construct
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return None if value is None else _decode(_member_of(get_args(kind), value), value, path)
    if origin is Literal:
        return _member(get_args(kind), value, path)
    if origin in (tuple, Sequence):
        return _items(get_args(kind)[0], value, path)
    if origin is not None:  # the one mapping that the data has: Mapping[str, X]
        if isinstance(value, list):  # as a column has it
            value = {each["name"]: each["value"] for each in value}
        if not isinstance(value, dict):
            raise _fault(path, "an object", value)
        return {key: _decode(get_args(kind)[1], item, _inside(path, key)) for key, item in value.items()}
    if is_dataclass(kind):
        known = cast(type, kind)
        return value if isinstance(value, known) else _record(known, value, path)
    if issubclass(kind, StrEnum):
        return kind(_member(tuple(kind), value, path))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _fault(path, _WORDS[kind], value)
    return value


def _member_of(kinds: Sequence[Any], value: object) -> Any:  # noqa: ANN401  as _decode
    """The kind of a union that a value has by its shape: a list, an object with these fields, or another value."""
    known = [kind for kind in kinds if kind is not NoneType]
    for kind in known if len(known) > 1 else ():
        is_list = get_origin(kind) in (tuple, Sequence)
        if isinstance(value, list) and is_list:
            return kind
        if isinstance(value, dict) and is_dataclass(kind) and set(value) <= set(_decoders(cast(Any, kind))):
            return kind
        if not isinstance(value, list | dict) and not is_list and type(value) is kind:
            return kind
    return known[0]


def _items(kind: Any, value: object, path: str) -> Sequence[object]:  # noqa: ANN401  as _decode
    if isinstance(value, tuple | SharedSequence):  # decoded before
        return value
    if not isinstance(value, list):
        raise _fault(path, "a list", value)
    if kind in (int, float, str) and all(type(item) is kind for item in value):
        return tuple(value)  # token ids and log-probabilities: nearly all there is
    return tuple(_decode(kind, item, f"{path}[{index}]") for index, item in enumerate(value))


def _record(kind: type[T], value: object, path: str) -> T:
    if not isinstance(value, dict):
        raise _fault(path, "an object", value)
    known = _decoders(cast(Any, kind))
    for key in value:
        if key not in known:
            raise ValueError(f"{_named(path)}: unknown field {key!r}; {kind.__name__} has {', '.join(known)}")
    missing = [name for name, (_, required) in known.items() if required and name not in value]
    if missing:
        raise ValueError(f"{_named(path)}: {kind.__name__} misses {', '.join(missing)}")
    values = {key: known[key][0](item, _inside(path, key)) for key, item in value.items()}
    try:
        return kind(**values)
    except ValueError as error:  # what a constructor checks beyond types
        raise ValueError(f"{_named(path)}: {error}") from error


def _member(members: tuple[str, ...], value: object, path: str) -> str:
    if not isinstance(value, str) or value not in members:
        raise _fault(path, f"one of {', '.join(members)}", value)
    return value


@cache
def _fields(kind: Any) -> tuple[tuple[str, ...], Callable[[object], Sequence[object]]]:  # noqa: ANN401  a dataclass
    """The names of the fields, and what takes their values, all at once."""
    names = tuple(field.name for field in fields(kind) if field.metadata.get("stored", True))
    return names, attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]


@cache
def _decoders(kind: Any) -> dict[str, tuple[Callable[[object, str], object], bool]]:  # noqa: ANN401  a dataclass
    """The decoder of each field, and whether the field must be there."""
    hints = get_type_hints(kind)
    return {
        field.name: (partial(_decode, hints[field.name]), field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
        if field.metadata.get("stored", True)
    }


def _inside(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _named(path: str) -> str:
    return path or "the whole"


def _fault(path: str, expected: str, value: object) -> ValueError:
    text = repr(value)
    return ValueError(f"{_named(path)}: wanted {expected}, found {text if len(text) <= 60 else text[:57] + '...'}")


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"), check_circular=False)
_WORDS: Mapping[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
