"""Messages between the processes of the sandbox: a length, then JSON. Standard library only.

``encode`` keeps the exact types of plain values:

    [1, (2.5, "a")]   ─▶   ["list", [1, ["tuple", [["float", "0x1.4p+1"], "a"]]]]

Decoding runs no code of the other process: it builds numbers, texts and Python's own containers. Any other object is
encoded as a number that stands for it, its handle.
"""

import json
import os
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MOST = 64 << 20  # bytes of one message
_LENGTH = struct.Struct(">Q")


class ConnectionLost(Exception):
    """The other end has closed, or violates the protocol."""


def send(end: int, message: Any) -> None:  # noqa: ANN401  any JSON value
    """Write one message to a file descriptor."""
    body = json.dumps(message).encode("ascii")
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    try:
        while rest:
            rest = rest[os.write(end, rest) :]
    except OSError as error:
        raise ConnectionLost(f"sending {len(body)} bytes: {error}") from error


def receive(end: int, *, most: int = MOST) -> Any:  # noqa: ANN401  any JSON value
    """Read one message."""
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    if length > most:
        raise ConnectionLost(f"receiving a message: its length is {length} bytes, at most {most} are allowed")
    try:
        return json.loads(_exactly(end, length))
    except (ValueError, RecursionError) as error:
        raise ConnectionLost(f"a message is not JSON: {error}") from error


def _exactly(end: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = os.read(end, min(1 << 20, count - len(parts)))
        except OSError as error:
            raise ConnectionLost(f"receiving: {error}") from error
        if not part:
            raise ConnectionLost(f"the other end closed after {len(parts)} of {count} bytes")
        parts += part
    return bytes(parts)


HandleOf = Callable[[object], int]  # the handle of an object; raises TypeError if it cannot have one
Find = Callable[[int], object]

_SMALL = 1 << 53  # JSON readers may turn larger integers into floats, and Python refuses to parse very long ones
_SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_MAPPINGS: dict[str, Callable[[Iterable[tuple[object, Any]]], object]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_TYPES = {
    kind.__name__: kind
    for kind in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, str, tuple)
}
_ATOMS: dict[str, Callable[..., object]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": range,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "type": _TYPES.__getitem__,
}


def encode(value: object, handle_of: HandleOf) -> object:
    """The JSON form of a value; ``handle_of`` gives the handle of anything that is not a plain value."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            number = int.__int__(value)
            return number if -_SMALL < number < _SMALL else ["int", hex(number)]
        case float():
            return ["float", float.hex(value)]
        case complex():
            return ["complex", float.hex(value.real), float.hex(value.imag)]
        case bytes() | bytearray():
            return ["bytearray" if isinstance(value, bytearray) else "bytes", value.hex()]
        case range():
            return ["range", value.start, value.stop, value.step]
        case Decimal():
            return ["Decimal", str(value)]
        case Fraction():
            return ["Fraction", int(value.numerator), int(value.denominator)]
        case type() if names := [name for name, kind in _TYPES.items() if kind is value]:
            return ["type", *names]
    if isinstance(value, dict):
        name = next(kind.__name__ for kind in (OrderedDict, Counter, dict) if isinstance(value, kind))
        return [name, [[encode(key, handle_of), encode(item, handle_of)] for key, item in dict.items(value)]]
    for name, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            return [name, [encode(item, handle_of) for item in sequence.__iter__(value)]]
    if isinstance(value, deque):
        return ["deque", [encode(item, handle_of) for item in value], value.maxlen]
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return encode(value.item(), handle_of)
    return ["handle", handle_of(value)]


def decode_value(data: object, find: Find) -> object:
    """The value of a JSON form."""
    if data is None or isinstance(data, bool | int | str):
        return data
    if not isinstance(data, list):
        raise ValueError(f"decoding a value: found {type(data).__name__}, wanted a list")
    try:
        name, *rest = data
        if name in _SEQUENCES:
            return _SEQUENCES[name](decode_value(item, find) for item in rest[0])
        if name in _MAPPINGS:
            return _MAPPINGS[name]((decode_value(key, find), decode_value(item, find)) for key, item in rest[0])
        if name == "deque":
            return deque((decode_value(item, find) for item in rest[0]), rest[1])
        if name == "handle":
            return find(rest[0])
        return _ATOMS[name](*rest)
    except (TypeError, KeyError, IndexError, OverflowError, ArithmeticError) as error:
        raise ValueError(f"decoding a value: not the form of a plain value: {error}") from error
