"""Frozen dataclasses to JSON, and back from the values that columns of a file have. Standard library only.

A field with ``metadata={"stored": False}`` is not written.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def dump_line(value: object) -> str:
    """One line of ASCII JSON without its newline; numbers read back equal to the last bit, text whatever it holds."""
    return _ENCODER.encode(value)


def fields_of(value: object) -> dict[str, object]:
    """The fields of a dataclass by name."""
    names, values = _fields(cast(Any, type(value)))
    return dict(zip(names, values(value), strict=True))


def decode(kind: type[T], value: object) -> T:
    """The value of type ``kind`` that a row stands for: lists for tuples, names with values for mappings.

    The types of numbers and texts are those of the file's schema: they are not looked at.
    """
    return cast(T, _decoder(cast(Any, kind))(value))


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


@cache
def _fields(kind: Any) -> tuple[tuple[str, ...], Callable[[object], Sequence[object]]]:  # noqa: ANN401  a dataclass
    """The names of the fields, and what takes their values, all at once."""
    names = tuple(field.name for field in fields(kind) if field.metadata.get("stored", True))
    return names, attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]


def _same(value: object) -> object:
    return value


@cache
def _decoder(kind: Any) -> Callable[[Any], object]:  # noqa: ANN401  a type or a typing construct
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        known = _decoder(next(each for each in arguments if each is not NoneType))
        return known if known is _same else lambda value: None if value is None else known(value)
    if origin in (tuple, Sequence):
        item = _decoder(arguments[0])
        # what is no list was decoded before
        return lambda value: tuple(value if item is _same else map(item, value)) if isinstance(value, list) else value
    if origin is Mapping:
        part = _decoder(arguments[1])
        return lambda value: {each["name"]: part(each["value"]) for each in value}
    if is_dataclass(kind):
        made, hints = cast(type, kind), get_type_hints(kind)
        of_field = {name: _decoder(hints[name]) for name in _fields(cast(Any, kind))[0]}
        optional = {name for name in of_field if NoneType in get_args(hints[name])}

        def built(value: Any) -> object:  # noqa: ANN401  the dataclass, or its fields
            if isinstance(value, made):
                return value
            if empty := [name for name, each in value.items() if each is None and name not in optional]:
                raise ValueError(f"{empty[0]} has no value")
            return made(**{name: of_field[name](each) for name, each in value.items()})

        return built
    return kind if isinstance(kind, type) and issubclass(kind, StrEnum) else _same


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"), check_circular=False)
