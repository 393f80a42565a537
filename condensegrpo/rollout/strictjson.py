"""JSON as a model writes it inside other text: read strictly, and with the written form of every member at hand.

Stricter than ``json.loads`` (NaN, Infinity and a key that stands twice are refused), and every fault, too deep a
nesting included, is a ``ValueError`` of one line. Standard library only.
"""

import json
import re
from typing import Any, NoReturn


def loads(text: str) -> Any:  # noqa: ANN401  JSON is anything
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON; the message is one line and says where.
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(_where(error, 0)) from error
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def members(text: str, start: int) -> tuple[dict[str, str], int]:
    """The members of the JSON object that begins at ``start``, their values as written, and where the object ends.

        members('call {"a": [1,  2], "b": "x"} now', 5)  →  ({"a": '[1,  2]', "b": '"x"'}, 29)

    Raises:
        ValueError: no whole object stands there; the message is one line and counts characters from ``start``.
    """
    try:
        return _members(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(_where(error, start)) from error
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def after_space(text: str, position: int) -> int:
    """The first position from ``position`` on that holds no JSON white space."""
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _members(text: str, start: int) -> tuple[dict[str, str], int]:
    found: dict[str, str] = {}
    position = after_space(text, _after(text, "{", start))
    if text.startswith("}", position):
        return found, position + 1
    while True:
        key, position = _DECODER.raw_decode(text, position)
        if not isinstance(key, str) or key in found:
            raise ValueError(f"a key of the JSON object is no string or stands twice: {str(key)[:40]!r}")
        begin = after_space(text, _after(text, ":", position))
        _, position = _DECODER.raw_decode(text, begin)
        found[key] = text[begin:position]
        position = after_space(text, position)
        if text.startswith("}", position):
            return found, position + 1
        position = after_space(text, _after(text, ",", position))


def _after(text: str, sign: str, position: int) -> int:
    position = after_space(text, position)
    if not text.startswith(sign, position):
        raise json.JSONDecodeError(f"Expecting {sign!r}", text, position)
    return position + 1


def _where(error: json.JSONDecodeError, start: int) -> str:
    return f"the JSON breaks off or is wrong at its character {max(error.pos - start, 0)} ({error.msg})"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a JSON object holds a key twice")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
