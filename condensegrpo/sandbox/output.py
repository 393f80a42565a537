"""The output of a call: read to its end, of any length, and kept in part. Standard library only."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class OutputBuffer:
    """The first and the last bytes of a stream, at most ``limit`` together."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """Append bytes of the stream."""
        self._total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """The kept bytes as readable text, with a mark where bytes were omitted."""
        omitted = self._total - len(self._head) - len(self._tail)
        if not omitted:
            return readable(bytes(self._head + self._tail))
        return f"{readable(bytes(self._head))}\n[… {omitted} bytes omitted …]\n{readable(bytes(self._tail))}"


def readable(data: bytes) -> str:
    r"""Decode bytes for a terminal and a model: ESC becomes ``\x1b``; tabs and line ends stay."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
