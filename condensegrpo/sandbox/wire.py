"""Messages on a socket: a length, then JSON. Used on both sides of the sandbox; standard library only."""

import json
import os
import struct
from typing import Any

MOST = 64 << 20  # bytes of one message
_LENGTH = struct.Struct(">Q")


class ConnectionLost(Exception):
    """The other end has closed, or violates the protocol."""


def send(end: int, message: Any) -> None:  # noqa: ANN401  any JSON value
    """Write one message to a file descriptor.

    Raises:
        ConnectionLost: the other end has closed.
    """
    body = json.dumps(message).encode("ascii")
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    try:
        while rest:
            rest = rest[os.write(end, rest) :]
    except OSError as error:
        raise ConnectionLost(f"sending {len(body)} bytes: {error}") from error


def receive(end: int, *, most: int = MOST) -> Any:  # noqa: ANN401  any JSON value
    """Read one message.

    Raises:
        ConnectionLost: the other end closed, or the message is longer than ``most`` bytes or not JSON.
    """
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
