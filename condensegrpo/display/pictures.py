"""A picture on a terminal: by the protocol of the terminal, or two pixels a character."""

import base64
import os
import sys
from collections.abc import Mapping
from enum import StrEnum

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import ControlType, Segment
from rich.text import Text

from condensegrpo.inspection.pictures import thumbnail
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.pictures import as_png

COLUMNS = 32
SIDE = 512  # pixels of the longer side, by a protocol
CHUNK = 4096  # characters of base64 in one command of kitty's protocol


class PictureProtocol(StrEnum):
    """How a terminal is sent a PNG file."""

    KITTY = "kitty"  # https://sw.kovidgoyal.net/kitty/graphics-protocol/
    ITERM = "iterm"  # https://iterm2.com/documentation-images.html


def protocol_of(environment: Mapping[str, str]) -> PictureProtocol | None:
    """What the terminal of these variables shows pictures by; None: it does not say that it does."""
    program, term = environment.get("TERM_PROGRAM"), environment.get("TERM", "")
    if "TMUX" in environment or term.startswith(("screen", "tmux")):
        return None
    if term in ("xterm-kitty", "xterm-ghostty"):
        return PictureProtocol.KITTY
    return PictureProtocol.ITERM if program in ("iTerm.app", "WezTerm") else None


def command(png: bytes, protocol: PictureProtocol, *, columns: int, rows: int) -> str:
    """What makes a terminal draw a PNG file from the cursor on; the cursor may be elsewhere afterwards."""
    data = base64.b64encode(png).decode()
    if protocol is PictureProtocol.ITERM:
        return f"\x1b]1337;File=inline=1;size={len(png)};width={columns};height={rows}:{data}\a"
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    heads = [f"a=T,f=100,q=2,c={columns},r={rows},", *[""] * (len(chunks) - 1)]
    more = [1] * (len(chunks) - 1) + [0]
    return "".join(f"\x1b_G{head}m={m};{chunk}\x1b\\" for head, m, chunk in zip(heads, more, chunks, strict=True))


class TerminalPicture:
    """A stored picture, or half blocks in its colours; nothing where the terminal has no colours, or it is missing."""

    def __init__(self, media: MediaFolder, sha256: str) -> None:
        """The picture is read when it is drawn."""
        self._media, self._sha256 = media, sha256

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as it is drawn."""
        return Measurement(1, COLUMNS)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines of characters, of which each has its upper pixel as text and its lower one as background.

        By a protocol the lines are empty first: the terminal has scrolled when the picture is drawn over them.
        """
        picture = thumbnail(self._media, self._sha256, COLUMNS) if console.color_system else None
        if picture is None:
            return
        protocol = protocol_of(os.environ) if console.file is sys.stdout and console.is_terminal else None
        whole = thumbnail(self._media, self._sha256, SIDE) if protocol else None
        if protocol and whole is not None:
            rows = (picture.height + 1) // 2
            drawn = command(as_png(whole), protocol, columns=picture.width, rows=rows)
            yield from [Text(" ")] * rows
            yield Segment(f"\x1b7\x1b[{rows}A{drawn}\x1b8", None, [(ControlType.CURSOR_UP, rows)])
            return
        for row in range(0, picture.height, 2):
            line = Text(no_wrap=True, overflow="crop")
            for column in range(picture.width):
                upper = picture.getpixel((column, row))
                lower = picture.getpixel((column, min(row + 1, picture.height - 1)))
                line.append("▀", f"rgb{_plain(upper)} on rgb{_plain(lower)}")
            yield line


def _plain(pixel: object) -> str:
    """``(1,2,3)``, as rich reads colours."""
    return str(pixel).replace(" ", "")
