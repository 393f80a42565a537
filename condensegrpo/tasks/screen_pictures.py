"""The pictures of the task ``screens``: a grid of square cells, drawn with Pillow, each with one symbol at most."""

import io
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

Cell = tuple[int, int]  # column and row, from 0 at the top left
Symbol = tuple[str, str, str]  # its text, and the colours of the text and of the paper behind it
PAPER, LINE = "#eaeded", "#ccd1d1"


@lru_cache(maxsize=512)
def drawn(grid: int, cell: int, symbols: tuple[tuple[Cell, Symbol], ...]) -> bytes:
    """A picture of ``grid`` × ``grid`` cells as a PNG file.

    Args:
        cell: pixels of a cell's side.
        symbols: what cells show; the others are empty.
    """
    picture = _empty(grid, cell).copy()
    for (column, row), symbol in symbols:
        picture.paste(_tile(cell, symbol), (column * cell, row * cell))
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


@lru_cache(maxsize=8)
def _empty(grid: int, cell: int) -> "Image":
    from PIL import Image, ImageDraw  # here: runs of other tasks do not need it

    side = grid * cell
    picture = Image.new("RGB", (side, side), PAPER)
    draw = ImageDraw.Draw(picture)
    for line in range(0, side, cell):
        draw.line([(line, 0), (line, side)], fill=LINE)
        draw.line([(0, line), (side, line)], fill=LINE)
    return picture


@lru_cache(maxsize=512)
def _tile(cell: int, symbol: Symbol) -> "Image":
    from PIL import Image, ImageDraw, ImageFont

    text, ink, paper = symbol
    tile = Image.new("RGB", (cell, cell), paper)
    font = ImageFont.load_default(size=cell * (1.3 if len(text) == 1 else 0.7))
    ImageDraw.Draw(tile).text((cell / 2, cell / 2), text, fill=ink, font=font, anchor="mm")
    return tile
