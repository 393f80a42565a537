"""What a call printed: read to the end, however much it is, and kept in part. Standard library only."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Captured:
    """The first and the last bytes of a stream, at most ``most`` together."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """Take what was read."""
        self._total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """As text: what is no UTF-8 replaced, control characters written out, a mark where something was left out."""
        omitted = self._total - len(self._head) - len(self._tail)
        if not omitted:
            return readable(bytes(self._head + self._tail))
        return f"{readable(bytes(self._head))}\n[… {omitted} bytes omitted …]\n{readable(bytes(self._tail))}"


def readable(data: bytes) -> str:
    r"""Text of bytes, fit for a terminal and a model: ESC becomes ``\x1b``, tabs and line ends stay."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
