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
    assert decode(Outer, json.loads(LINE)) == VALUE


def test_enums_and_tuples_come_back_as_what_they_were() -> None:
    back = decode(Outer, json.loads(LINE))
    assert back.colour is Colour.BLUE
    assert isinstance(back.inner, tuple)
    assert isinstance(back.inner[0], Inner)


def test_any_mapping_can_be_stored() -> None:
    assert dump_line(MappingProxyType({"a": 1})) == '{"a":1}'


def test_a_whole_number_will_do_for_a_float_and_stays_equal() -> None:
    back = decode(Outer, {**json.loads(LINE), "numbers": [1, 2.5], "shares": {"x": 3}})
    assert back.numbers == (1.0, 2.5)
    assert all(type(number) is float for number in (*back.numbers, back.shares["x"]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": 1}, "name: wanted text, found 1"),
        ({"numbers": [0.1, "x"]}, "numbers[1]: wanted a number, found 'x'"),
        ({"numbers": 5}, "numbers: wanted a list, found 5"),
        ({"inner": [{"size": 1.5}]}, "inner[0].size: wanted a whole number, found 1.5"),
        ({"inner": [{"size": True}]}, "inner[0].size: wanted a whole number, found True"),
        ({"inner": [{}]}, "inner[0]: Inner misses size"),
        ({"inner": [[]]}, "inner[0]: wanted an object, found []"),
        ({"maybe": {"size": 1, "weight": 2}}, "maybe: unknown field 'weight'; Inner has size"),
        ({"colour": "green"}, "colour: wanted one of red, blue, found 'green'"),
        ({"colour": ["red"]}, "colour: wanted one of red, blue, found ['red']"),
        ({"kind": "c"}, "kind: wanted one of a, b, found 'c'"),
        ({"flag": 1}, "flag: wanted true or false, found 1"),
        ({"shares": {"x": None}}, "shares.x: wanted a number, found None"),
        ({"name": ["y" * 100]}, "name: wanted text, found ['" + "y" * 55 + "..."),
    ],
)
def test_the_first_fault_is_named_by_its_place(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is compared whole
        decode(Outer, {**json.loads(LINE), **changed})
    assert str(caught.value) == said


def test_the_whole_can_be_wrong() -> None:
    with pytest.raises(ValueError, match="the whole: wanted an object, found 3"):
        decode(Outer, 3)
    with pytest.raises(ValueError, match="the whole: Inner misses size"):
        decode(Inner, {})
