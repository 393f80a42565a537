"""The pictures of the task ``screens``: a grid of square cells, drawn with Pillow, each with one symbol at most."""

import io
from functools import lru_cache

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
    from PIL import Image, ImageDraw, ImageFont  # here: runs of other tasks do not need it

    side = grid * cell
    picture = Image.new("RGB", (side, side), PAPER)
    draw = ImageDraw.Draw(picture)
    for line in range(0, side, cell):
        draw.line([(line, 0), (line, side)], fill=LINE)
        draw.line([(0, line), (side, line)], fill=LINE)
    for (column, row), (text, ink, paper) in symbols:
        left, top = column * cell, row * cell
        draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill=paper)
        font = ImageFont.load_default(size=cell * (1.3 if len(text) == 1 else 0.7))
        draw.text((left + cell / 2, top + cell / 2), text, fill=ink, font=font, anchor="mm")
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()
