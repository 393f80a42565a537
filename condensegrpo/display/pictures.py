"""A picture on a terminal: two pixels a character."""

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from condensegrpo.inspection.pictures import thumbnail
from condensegrpo.storage.media import MediaFolder

COLUMNS = 32


class TerminalPicture:
    """Half blocks in the colours of a stored picture; nothing where the terminal has no colours, or it is missing."""

    def __init__(self, media: MediaFolder, sha256: str) -> None:
        """The picture is read when it is drawn."""
        self._media, self._sha256 = media, sha256

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as it is drawn."""
        return Measurement(1, COLUMNS)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines of characters, of which each has its upper pixel as text and its lower one as background."""
        picture = thumbnail(self._media, self._sha256, COLUMNS) if console.color_system else None
        if picture is None:
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
