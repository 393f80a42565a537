"""Encodes plain values as JSON with their exact types, to pass them between processes. Standard library only.

    [1, (2.5, "a")]   ─▶   ["list", [1, ["tuple", [["float", "0x1.4p+1"], "a"]]]]

Decoding runs no code of the other process: it builds numbers, texts and Python's own containers. Any other object is
encoded as a number that stands for it, its handle.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

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
    atom = _atom(value)
    if atom is not None or value is None:
        return atom
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
    """The value of a JSON form.

    Raises:
        ValueError: ``encode`` does not produce this form.
    """
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


def _atom(value: object) -> object:
    """The JSON form of a value without parts; None for other values."""
    match value:
        case bool() | str():
            return bool(value) if isinstance(value, bool) else str.__str__(value)
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
        case type():
            names = [name for name, kind in _TYPES.items() if kind is value]
            return ["type", *names] if names else None
    return None
