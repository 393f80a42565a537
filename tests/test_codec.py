import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

import pytest

from condensegrpo.storage.codec import decode, dump_line


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """One field of every type that the data has."""

    name: str
    numbers: tuple[float, ...]
    inner: tuple[Inner, ...]
    maybe: Inner | None
    colour: Colour
    kind: Literal["a", "b"]
    flag: bool
    shares: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


VALUE = Outer(
    name="ü",
    numbers=(0.1, 1.0),
    inner=(Inner(size=1), Inner(size=2)),
    maybe=None,
    colour=Colour.BLUE,
    kind="a",
    flag=True,
    shares={"x": 0.5},
)
LINE = (
    '{"name":"\\u00fc","numbers":[0.1,1.0],"inner":[{"size":1},{"size":2}],"maybe":null,"colour":"blue","kind":"a",'
    '"flag":true,"shares":{"x":0.5},"note":""}'
)


def test_a_value_is_one_line_with_its_fields_in_order() -> None:
    assert dump_line(VALUE) == LINE


def test_a_row_of_columns_comes_back_as_what_it_was() -> None:
    row = json.loads(LINE)
    back = decode(Outer, {**row, "shares": [{"name": "x", "value": 0.5}]})
    assert back == VALUE
    assert back.colour is Colour.BLUE
    assert decode(Outer, {**row, "shares": [], "maybe": {"size": 3}}).maybe == Inner(size=3)
    with pytest.raises(ValueError, match="'green' is not a valid Colour"):
        decode(Outer, {**row, "colour": "green"})


def test_any_mapping_can_be_written() -> None:
    assert dump_line(MappingProxyType({"a": 1})) == '{"a":1}'
