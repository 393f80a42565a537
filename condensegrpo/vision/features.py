"""The features of pictures in a model, and their place: embeddings, and positions on three axes.

Legend: F features of all pictures, P placeholders of a micro-batch, R rows of L tokens, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFeatures:
    """The features that replace the embeddings of pictures' placeholders."""

    embeddings: Tensor  # (F, H)
    deepstack: tuple[Tensor, ...] = ()  # (F, H) each, added to the hidden states after the first layers (Qwen3-VL)


def picture_features(model: Any, pixels: Mapping[str, Tensor]) -> PictureFeatures:  # noqa: ANN401  transformers' classes are untyped
    """The features of some pictures, by the model's vision tower and projector; differentiable.

    Args:
        model: of ``AutoModelForImageTextToText``, of one of the families.
        pixels: of ``PictureProcessor.pixels``.
    """
    given = {name: value.to(model.device) for name, value in pixels.items()}
    output = model.get_image_features(**given, return_dict=True)
    deepstack = output.get("deepstack_features") or ()
    return PictureFeatures(
        embeddings=torch.cat(list(output.pooler_output)), deepstack=tuple(torch.cat(list(level)) for level in deepstack)
    )


def decoder_arguments(embeddings: Tensor, indices: Tensor, levels: Sequence[Tensor]) -> dict[str, Any]:
    """The input of a model's decoder instead of token ids: embeddings, with features of pictures in place.

    Args:
        embeddings: (R, L, H) of all tokens.
        indices: (P,) int64, of the placeholders among the R·L tokens.
        levels: (P, H) each: what takes the place of their embeddings, then what is added after the first layers.
    """
    features, *deepstack = (level.to(embeddings.dtype) for level in levels)
    placed = embeddings.flatten(0, 1).index_copy(0, indices, features).view_as(embeddings)
    if not deepstack:
        return {"inputs_embeds": placed}
    shown = torch.zeros(placed.shape[:2].numel(), dtype=torch.bool, device=indices.device)
    shown = shown.index_fill(0, indices, value=True).view(placed.shape[:2])
    return {"inputs_embeds": placed, "visual_pos_masks": shown, "deepstack_visual_embeds": deepstack}


def three_axis_positions(
    ids: Sequence[int], *, placeholder_id: int, grids: Sequence[tuple[int, int]], merge: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The positions of a row on the axes time, row and column, as ``get_rope_index`` of Qwen2.5-VL and Qwen3-VL.

    A text token has one position on all axes. A picture of r × c cells begins at the next position p: its cell (i, j)
    is at (p, p + i, p + j), and the text after it goes on at p + max(r, c).

        text text [2 × 3 cells] text   ─▶   time 0 1 2 2 2 2 2 2 5   row 0 1 2 2 2 3 3 3 5   column 0 1 2 3 4 2 3 4 5

    Args:
        ids: (L,) the row from its beginning.
        placeholder_id: the token of a picture's cells.
        grids: rows and columns of patches of each picture in order, see ``PictureProcessor.grid``.
        merge: patches of a cell along each axis (``spatial_merge_size``).
    """
    time: list[int] = []
    row: list[int] = []
    column: list[int] = []
    position, pictures = 0, iter(grids)
    for is_picture, run in groupby(ids, key=placeholder_id.__eq__):
        length = len(list(run))
        if not is_picture:
            for axis in (time, row, column):
                axis.extend(range(position, position + length))
            position += length
            continue
        grid = next(pictures, None)
        cells = (0, 0) if grid is None else (grid[0] // merge, grid[1] // merge)
        if cells[0] * cells[1] != length:
            raise ValueError(f"{length} placeholders in a row, where a picture of {cells[0]} × {cells[1]} cells is due")
        time.extend([position] * length)
        row.extend(position + i for i in range(cells[0]) for _ in range(cells[1]))
        column.extend(position + j for _ in range(cells[0]) for j in range(cells[1]))
        position += max(cells)
    if next(pictures, None) is not None:
        raise ValueError(f"{len(grids)} pictures, and fewer runs of placeholders")
    return tuple(time), tuple(row), tuple(column)
