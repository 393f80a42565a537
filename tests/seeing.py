"""Rows that show pictures, and what plain transformers makes of them, for the learner's tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tiny import segment
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from vision_models import FamilyName, picture, vision_model

from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.model_folder import load_policy
from condensegrpo.learner.vision_tower import BatchPictures, tower
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.processor import PictureProcessor, load_picture_processor

WORDS = range(20, 40)  # ids of ordinary tokens
PICTURES = {"red": (24, 40), "blue": (24, 40), "wide": (40, 24), "large": (48, 48)}  # the first two have equal ids


@dataclass(frozen=True, slots=True)
class World:
    """A tiny model that sees, in a folder, and stored pictures."""

    source: str
    processor: PictureProcessor
    hashes: dict[str, str]  # by name

    def policy(self, *, frozen: bool = False) -> PreTrainedModel:
        policy = load_policy(self.source, dtype="float32")
        for _, tensor in tower(policy):
            tensor.requires_grad_(not frozen)
        return policy

    def learner(self, policy: PreTrainedModel) -> TrainedLogprobs:
        module = TrainedLogprobs(policy)
        module.check()
        module.pictures = BatchPictures(self.processor, policy)
        return module

    def row(self, *parts: int | str, trained: int = 2, weight: float = 1.0) -> Segment:
        """A row of token ids and names of pictures, whose last tokens are trained."""
        ids: list[int] = []
        for part in parts:
            ids.extend([part] if isinstance(part, int) else self.processor.picture_ids(self.hashes[part]))
        row = segment(ids, range(len(ids) - trained, len(ids)), weight=weight)
        return replace(row, media=tuple(self.hashes[part] for part in parts if isinstance(part, str)))

    @property
    def longest(self) -> int:
        """Tokens of the longest row: micro-batches of so many are several."""
        return max(len(row.token_ids) for row in self.rows())

    def rows(self) -> list[Segment]:
        """Rows that share text, pictures and nothing; equal ids of different pictures; text alone."""
        return [
            self.row(20, 21, "red", 22, 23, 24),
            self.row(20, 21, "red", 22, 25, 26, weight=0.5),
            self.row(20, 21, "blue", 22, 23, 24, weight=-0.25),
            self.row(20, 21, "red", 22, 23, 24, 27, "large", 28, 29, 30),
            self.row(20, 21, "red", 22, 23, 24, 27, "wide", 28, 29, 30, weight=2.0),
            self.row(20, 31, "wide", 22, "red", 33, "red", 23, 24, trained=1),
            self.row(20, 21, 34, 35, 36),
        ]


def world(family: FamilyName, folder: Path) -> World:
    """A model of a family and pictures, made in a folder."""
    vision_model(family, folder / "model")
    for number, (name, size) in enumerate(PICTURES.items()):
        part = picture(*size, color=(60 * number, 200 - 50 * number, 90))
        (folder / name).write_text(MediaFolder(folder / "media").write(part).sha256)
    return opened_world(folder)


def opened_world(folder: Path) -> World:
    """What ``world`` made in a folder."""
    processor = load_picture_processor(str(folder / "model"), MediaFolder(folder / "media"))
    assert processor is not None
    return World(str(folder / "model"), processor, {name: (folder / name).read_text() for name in PICTURES})


def plain_logprobs(model: PreTrainedModel, rows: Sequence[Segment], processor: PictureProcessor) -> list[Tensor]:
    """Log-probabilities of the trained tokens of each row: transformers' own forward pass of a padded batch."""
    longest = max(len(row.token_ids) for row in rows)
    input_ids = torch.stack([pad(torch.tensor(row.token_ids), (0, longest - len(row.token_ids))) for row in rows])
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    attention_mask = (torch.arange(longest) < lengths[:, None]).long()
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    if processor.family.three_axes:
        inputs["mm_token_type_ids"] = (input_ids == processor.placeholder_id).int()
    logits = model(**inputs, **_pixels(rows, processor), use_cache=False).logits.log_softmax(dim=-1)
    return [
        torch.stack([logits[number, place - 1, row.token_ids[place]] for turn in row.turns for place in turn.positions])
        for number, row in enumerate(rows)
    ]


def _pixels(rows: Sequence[Segment], processor: PictureProcessor) -> dict[str, Tensor]:
    """The pictures of a batch as the processors of the families pass them."""
    of_rows = [[processor.pixels(sha256) for sha256 in row.media] for row in rows]
    if not processor.family.joined_along:
        together = [pixels for of_row in of_rows for pixels in of_row]
        return {name: torch.cat([pixels[name] for pixels in together]) for name in together[0]} if together else {}
    names = next(pixels for of_row in of_rows for pixels in of_row)
    tiles = [
        {name: torch.cat([pixels[name] for pixels in of_row], dim=1)[0] for name in names}
        for of_row in of_rows
        if of_row
    ]
    most = max(len(of_row["pixel_values"]) for of_row in tiles)
    return {
        name: torch.stack(
            [pad(of_row[name], (0, 0) * (of_row[name].dim() - 1) + (0, most - len(of_row[name]))) for of_row in tiles]
        )
        for name in names
    }
