"""Messages on a socket: a length, then JSON. Both ends of the sandbox use it; standard library only."""

import json
import os
import struct
from typing import Any

MOST = 64 << 20  # bytes of one message
_LENGTH = struct.Struct(">Q")


class Lost(Exception):
    """The other end is gone, or does not keep to the form."""


def send(end: int, message: Any) -> None:  # noqa: ANN401  whatever JSON can say
    """Write one message to a file descriptor.

    Raises:
        Lost: nobody reads any more.
    """
    body = json.dumps(message).encode("ascii")
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    try:
        while rest:
            rest = rest[os.write(end, rest) :]
    except OSError as error:
        raise Lost(f"sending {len(body)} bytes: {error}") from error


def receive(end: int, *, most: int = MOST) -> Any:  # noqa: ANN401  whatever JSON can say
    """Read one message.

    Raises:
        Lost: the end of the file came first, the message is longer than ``most`` bytes or is not JSON.
    """
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    if length > most:
        raise Lost(f"a message of {length} bytes is announced, at most {most} are read")
    try:
        return json.loads(_exactly(end, length))
    except (ValueError, RecursionError) as error:
        raise Lost(f"a message is not JSON: {error}") from error


def _exactly(end: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = os.read(end, min(1 << 20, count - len(parts)))
        except OSError as error:
            raise Lost(f"receiving: {error}") from error
        if not part:
            raise Lost(f"the other end closed after {len(parts)} of {count} bytes")
        parts += part
    return bytes(parts)
