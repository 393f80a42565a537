"""The look of everything that is shown: the console, few colours, text without control characters, typed commands.

The hues are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), green and vermilion a little lighter: each text
has a contrast of 4.5 to the background of the inspector, also as a grey. Rich markup is never parsed.
"""

import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import StringIO
from pathlib import Path
from shutil import which
from typing import TextIO

from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

HEAD = "#56b4e9"
KEPT = "#00a57d"
REWRITTEN = "#e69f00"
NEWEST = "#f0e442"
DROPPED = "#a67878"
FREE = "grey42"
GOOD = "#00a57d"
BAD = "#e06b14"
WARN = "#e69f00"
DIM = "grey58"

PLAIN_WIDTH = 160  # columns where there is no terminal to fit
PICTURE_WIDTH = 116  # columns of an SVG


class EscapingConsole(Console):
    """Prints what comes from outside without its control characters, whoever made the renderable."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable, their texts ``neutral``."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(neutral(segment.text), segment.style)


def console(stream: TextIO | None = None) -> Console:
    """The console to print on: colours on a terminal, else plain text that is wide enough for tables."""
    file = stream or sys.stdout
    width = None if file.isatty() or "COLUMNS" in os.environ else _width_beside()
    if (file.encoding or "utf-8").lower().replace("-", "") not in ("utf8", "utf16") and hasattr(file, "reconfigure"):
        file.reconfigure(errors="replace")  # a terminal without box characters gets question marks, no crash
    return EscapingConsole(file=file, width=width, markup=False, highlight=False, emoji=False)


def _width_beside() -> int:
    """The columns of the terminal that errors or the keyboard are on, where the output is not."""
    for descriptor in (2, 0):
        with suppress(OSError):
            return os.get_terminal_size(descriptor).columns
    return PLAIN_WIDTH


def show(screen: Console, parts: Callable[[int], Iterable[RenderableType]]) -> None:
    """Print the ``parts`` for a width; without blanks at the ends of lines where there is no terminal."""
    if screen.is_terminal:
        for part in parts(screen.width):
            screen.print(part)
        return
    with screen.capture() as capture:
        for part in parts(screen.width):
            screen.print(part)
    screen.out(*(f"{line.rstrip()}\n" for line in capture.get().splitlines()), sep="", end="")


class Flow:
    """Texts beside each other, as many on a line as fit whole; further lines begin at an indent."""

    def __init__(self, parts: Iterable[Text], *, gap: str = "   ", indent: int = 0) -> None:
        self._first, *self._more = parts
        self._gap, self._indent = gap, indent

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """The lines for a width."""
        line = self._first.copy()
        for part in self._more:
            if line.cell_len + len(self._gap) + part.cell_len > options.max_width:
                yield line
                line = Text(" " * self._indent)
            else:
                line.append(self._gap, DIM)
            line.append_text(part)
        yield line


def recorder() -> Console:
    """A console that shows nothing and can export what was printed as a picture."""
    return Console(
        file=StringIO(),
        width=PICTURE_WIDTH,
        record=True,
        force_terminal=True,
        color_system="truecolor",
        markup=False,
        highlight=False,
        emoji=False,
    )


def svg(recorded: Console, title: str) -> str:
    """The recording of a ``recorder`` as an SVG that needs no other file: rich's own links fonts of a server."""
    fonts = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # the first two are rich's, others could be of the text
    return fonts.sub("", recorded.export_svg(title=title), count=2)


def signed_style(value: float, scale: float, *, background: bool = False) -> str:
    """Green for positive and vermilion for negative numbers, the paler the smaller ``|value| / scale``."""
    strength = 0.0 if scale <= 0 else min(1.0, abs(value) / scale)
    if strength == 0:
        return DIM
    hue = Color.parse(GOOD if value > 0 else BAD).get_truecolor()
    if background:
        return f"#ffffff on {blend_rgb(ColorTriplet(40, 44, 52), hue, 0.7 * (0.25 + 0.75 * strength)).hex}"
    return blend_rgb(ColorTriplet(150, 150, 150), hue, 0.25 + 0.75 * strength).hex


def program(name: str = "condensegrpo", *, start: Path = Path()) -> str:
    """The command, or another of its environment, as a shell in ``start`` finds it: by its name, or by its path."""
    folder, started = os.path.split(sys.argv[0])
    if which("condensegrpo") or started != "condensegrpo" or not folder:
        return name
    path = os.path.relpath(os.path.join(folder, name), start)
    return shlex.quote(path if os.path.dirname(path) else os.path.join(os.curdir, path))


def as_typed(text: str) -> str:
    """A message whose commands a shell finds: see ``program``. One that has its path stays as it is."""
    commands = "config|doctor|eval|inspect|plugins|serve|train"
    return re.sub(rf"(?<![\w/.-])condensegrpo (?=(?:{commands})\b)", lambda _: f"{program()} ", text)


def neutral(text: str) -> str:
    """``text`` with every control and invisible character replaced by a visible sign.

    ASCII control characters become their pictures, such as ␛; others, such as marks of the direction of writing, their
    code points: ⟨U+202E⟩. Line feeds stay. Rich markup is not parsed from ``Text``.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char == "\n" else _visible(char) for char in text)


def one_line(text: str, width: int) -> str:
    """Neutral text on one line of at most ``width`` characters."""
    flat = neutral(text).replace("\n", "⏎")
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def excerpt(text: str, *, characters: int) -> str:
    """Neutral text of at most ``characters``, saying how much was left out."""
    if len(text) <= characters:
        return neutral(text)
    return f"{neutral(text[:characters])}… ({len(text) - characters} more characters: --full)"


def _visible(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return char
