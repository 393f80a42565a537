"""JSON as a model writes it inside other text: read strictly, together with the written form of every member.

Stricter than ``json.loads`` (NaN, Infinity and a key that stands twice are refused), and every fault, too deep a
nesting included, is a ``ValueError`` of one line. Standard library only.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

MAX_DEPTH = 200  # of arrays and objects; how deep Python itself reads and writes them depends on its version


def loads(text: str) -> object:
    """The value of a JSON text."""
    with _faults_in_one_line(0):
        return _bounded(_DECODER.decode(text))


def members(text: str, start: int) -> tuple[dict[str, str], int]:
    """The members of the JSON object that begins at ``start``, their values as written, and where the object ends.

    members('call {"a": [1,  2], "b": "x"} now', 5)  →  ({"a": '[1,  2]', "b": '"x"'}, 29)
    """
    values: dict[str, str] = {}
    with _faults_in_one_line(start):
        position = _after(text, "{", start)
        while not text.startswith("}", position):
            if values:
                position = _after(text, ",", position)
            key, position = _DECODER.raw_decode(text, position)
            if not isinstance(key, str) or key in values:
                raise ValueError(f"a key of the JSON object is no string or stands twice: {str(key)[:40]!r}")
            begin = _after(text, ":", position)
            value, end = _DECODER.raw_decode(text, begin)
            _bounded(value)
            values[key], position = text[begin:end], after_space(text, end)
    return values, position + 1


def after_space(text: str, position: int) -> int:
    """The first position from ``position`` on that holds no JSON white space."""
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _after(text: str, sign: str, position: int) -> int:
    """The position of what follows a sign, white space aside."""
    position = after_space(text, position)
    if not text.startswith(sign, position):
        raise json.JSONDecodeError(f"Expecting {sign!r}", text, position)
    return after_space(text, position + 1)


@contextmanager
def _faults_in_one_line(start: int) -> Iterator[None]:
    try:
        yield
    except json.JSONDecodeError as error:
        position = max(error.pos - start, 0)
        raise ValueError(f"the JSON breaks off or is wrong at its character {position} ({error.msg})") from error
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _bounded(value: object) -> object:
    level = [value]
    for _ in range(MAX_DEPTH):
        rows = [
            outer.values() if isinstance(outer, dict) else outer for outer in level if isinstance(outer, dict | list)
        ]
        level = [inner for row in rows for inner in row]
        if not level:
            return value
    raise RecursionError


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise ValueError("a JSON object holds a key twice")
    return read


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
