"""Pictures in sampling: their features, and where they are placed in a pass.

The vision tower runs once for each picture and version of the weights, on that picture alone: its features do not
depend on what else is sampled. Legend: P tokens of a prompt, N of a pass, H the hidden size.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from condensegrpo.core.errors import DataError, SamplerError
from condensegrpo.samplers.packed_attention import Chunk, Pass
from condensegrpo.vision.features import PictureFeatures, decoder_arguments, picture_features, three_axis_positions
from condensegrpo.vision.processor import PictureProcessor

KEPT = 1 << 16  # cells of pictures whose features are kept: of 50 screens in Qwen2.5-VL


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPrompt:
    """A prompt with pictures."""

    key: tuple[int, ...]  # (P,) its ids; the placeholders of a picture are a negative number that only it has
    axes: Tensor | None  # (3, P) positions; None: the model has one axis, on which they are 0, 1, 2, …
    media: tuple[str, ...]  # the hashes of the pictures

    def placeholders(self, start: int, end: int) -> list[int]:
        """The indices of the placeholders between two indices."""
        return [index for index in range(start, min(end, len(self.key))) if self.key[index] < 0]


class Sight:
    """The pictures of a model's prompts and their features."""

    def __init__(self, model: Any, processor: PictureProcessor) -> None:  # noqa: ANN401  transformers' classes are untyped
        self._model = model
        self._processor = processor
        self._features = OrderedDict[str, PictureFeatures]()  # by hash, the last used at the end

    def prompt(self, ids: Sequence[int], media: tuple[str, ...]) -> SeenPrompt:
        """A prompt with the pictures that it shows, which are read and prepared."""
        placeholder = self._processor.placeholder_id
        try:
            counts = [self._processor.picture_ids(picture).count(placeholder) for picture in media]
            grids = [self._processor.grid(picture) for picture in media]
            axes = None
            if self._processor.family.three_axes:
                merge = self._model.config.vision_config.spatial_merge_size
                axes = torch.tensor(three_axis_positions(ids, placeholder_id=placeholder, grids=grids, merge=merge))
            names = [
                -1 - int(picture[:15], 16) for picture, count in zip(media, counts, strict=True) for _ in range(count)
            ]
            if ids.count(placeholder) != len(names):
                raise ValueError(f"{ids.count(placeholder)} placeholders, where its pictures have {len(names)}")
        except (DataError, ValueError) as error:
            raise SamplerError(f"sampling a reply to a prompt with {len(media)} pictures: {error}") from error
        pictures = iter(names)
        key = tuple(next(pictures) if token == placeholder else token for token in ids)
        return SeenPrompt(key=key, axes=axes, media=media)

    def forward(self, packed: Pass, chunks: Sequence[tuple[SeenPrompt | None, Chunk]]) -> Tensor:
        """The logits behind the last token of every chunk (B, V); see ``ContinuousBatch``."""
        runs = [(seen, chunk.start, len(chunk.ids)) for seen, chunk in chunks]
        hidden = self._model.get_decoder()(
            **self.inputs(packed.ids, packed.position, runs),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.ids.device),
            use_cache=False,
            packed=packed,
        ).last_hidden_state
        logits: Tensor = self._model.get_output_embeddings()(hidden[0, packed.last])
        return logits

    def inputs(
        self, ids: Tensor, position: Tensor, runs: Sequence[tuple[SeenPrompt | None, int, int]]
    ) -> dict[str, Any]:
        """The decoder's arguments for ids (R, L) at their positions, with the features of pictures in place.

        Args:
            runs: of consecutive tokens: their prompt, the index of the first in it, and how many they are.
        """
        axes = position.repeat(3, 1, 1) if self._processor.family.three_axes else None  # (3, R, L)
        where, shown, first = list[int](), list[PictureFeatures](), 0
        for seen, start, count in runs:
            if seen is not None:
                cells = seen.placeholders(start, start + count)
                where += [first + index - start for index in cells]
                shown += self._of(seen, before=len(seen.placeholders(0, start)), count=len(cells))
                if axes is not None and seen.axes is not None:
                    run = slice(first, first + count)
                    axes.view(3, -1)[:, run] = _axes(seen.axes.to(axes.device), position.flatten()[run])
            first += count
        embeddings = self._model.get_input_embeddings()(ids)
        positions = {"position_ids": position if axes is None else axes}
        if not where:
            return {"inputs_embeds": embeddings, **positions}
        levels = map(torch.cat, zip(*((each.embeddings, *each.deepstack) for each in shown), strict=True))
        return decoder_arguments(embeddings, torch.tensor(where, device=ids.device), [*levels]) | positions

    def clear(self) -> None:
        """Forget all features: the weights change."""
        self._features.clear()

    def _of(self, seen: SeenPrompt, *, before: int, count: int) -> list[PictureFeatures]:
        """The features of ``count`` placeholders of a prompt, after the first ``before``."""
        parts = []
        for picture in seen.media if count else ():
            features = self._kept(picture)
            cells = len(features.embeddings)
            inside = slice(min(before, cells), min(before + count, cells))
            if inside.start < inside.stop:
                deepstack = tuple(level[inside] for level in features.deepstack)
                parts.append(PictureFeatures(embeddings=features.embeddings[inside], deepstack=deepstack))
                count -= inside.stop - inside.start
            before = max(before - cells, 0)
            if not count:
                break
        return parts

    def _kept(self, picture: str) -> PictureFeatures:
        if picture not in self._features:
            self._features[picture] = picture_features(self._model, self._processor.pixels(picture))
            total = sum(len(features.embeddings) for features in self._features.values())
            while total > KEPT and len(self._features) > 1:
                total -= len(self._features.popitem(last=False)[1].embeddings)
        self._features.move_to_end(picture)
        return self._features[picture]


def _axes(axes: Tensor, position: Tensor) -> Tensor:
    """The positions (3, N) of tokens on three axes, of those on one: what follows a prompt follows its last one."""
    known = axes.shape[1]
    return torch.where(position < known, axes[:, position.clamp(max=known - 1)], position + axes.max() + 1 - known)
