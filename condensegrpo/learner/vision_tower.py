"""Pictures in micro-batches: the vision tower runs once on the distinct ones, its features go to their tokens.

    pixels of all pictures ─▶ tower ─▶ features (F, H) ─ by index ─▶ embeddings of the placeholders (R·L, H) ─▶ decoder

Rows and branches of trees that show the same picture share its tokens, or at least its features. Models with three
axes (Qwen2.5-VL, Qwen3-VL) get positions on each; the depth in the row stays the rule for attention.

Legend: S packed tokens, R rows of L columns as the decoder computes them, P placeholders among these, F features of all
pictures, H hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.algorithms.segments import INDEX_BITS, named_picture, with_names
from condensegrpo.core.errors import LearnerError
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.model_folder import composite
from condensegrpo.vision.features import decoder_arguments, picture_features, three_axis_positions
from condensegrpo.vision.processor import PictureProcessor

PICTURES_KEPT = 4096  # whose names and positions are kept: about 100 bytes a token


class ShownPictures(NamedTuple):
    """The pictures of a micro-batch, and where they go."""

    pixels: Mapping[str, Tensor]  # arguments of the model's ``get_image_features``, of all pictures together
    indices: Tensor  # (P,) int64, indices in R·L, ascending
    features: Tensor  # (P,) int64, indices in F
    total: int  # F

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, for an upload."""
        return [*self.pixels.values(), self.indices, self.features]

    def of_uploaded(self, *tensors: Tensor) -> "ShownPictures":
        """The same with these ``tensors``."""
        *pixels, indices, features = tensors
        return ShownPictures(dict(zip(self.pixels, pixels, strict=True)), indices, features, self.total)


class PicturePositions(NamedTuple):
    """The positions of one picture of n tokens that begins at 0."""

    axes: Tensor  # (3, n) int64
    end: int  # where the text after it goes on


class BatchPictures:
    """Names pictures in rows, and prepares those of micro-batches. One per process."""

    def __init__(self, processor: PictureProcessor, policy: PreTrainedModel) -> None:
        """Prepare pictures as the processor of the policy's model does."""
        self.processor = processor
        self._vision = policy.config.vision_config
        self._named = lru_cache(PICTURES_KEPT)(
            lambda sha256: named_picture(sha256, processor.picture_ids(sha256), placeholder_id=processor.placeholder_id)
        )
        self._positions = lru_cache(PICTURES_KEPT)(self._position)

    def named(self, rows: Sequence[Segment]) -> list[Segment]:
        """The rows with names for the tokens of pictures (``algorithms/segments.py``)."""
        return [with_names(row, self._named) if row.media else row for row in rows]

    def positions(self, batch: PackedBatch) -> Tensor:
        """The positions of a micro-batch: (1, S), or (4, 1, S) where pictures are shown to a model with three axes.

        The first of the four is the depth in the row. On each axis a token of text is at its depth less what the
        pictures before it in its row have more tokens than positions; a token of a picture is where it is in it.

            two texts, a picture of 2 × 3 cells, a text     depth 0 1 2 3 4 5 6 7 8     row 0 1 2 2 2 3 3 3 5
        """
        if not (batch.pictures and self.processor.family.three_axes):
            return batch.position_ids
        depth, (picture, index) = batch.position_ids[0], _parts(batch.token_ids[0])
        moved = torch.zeros(3, len(depth), dtype=torch.int64)  # of a token of a picture, against text in its place
        saved = torch.zeros_like(depth)  # at the last token of a picture: its tokens less its positions
        for number, sha256 in enumerate(batch.pictures):
            axes, end = self._positions(sha256)
            size, tokens = axes.shape[1], (picture == number).nonzero()[:, 0]
            moved[:, tokens] = axes[:, index[tokens]] - index[tokens]
            last = tokens[index[tokens] == size - 1]
            saved[last] = size - end
        saved_before = torch.tensor(_before(saved.tolist(), depth.tolist()))
        return torch.cat([depth[None], depth - saved_before + moved])[:, None]

    def shown(self, token_ids: Tensor, pictures: Sequence[str], *, stand_in: str | None) -> ShownPictures | None:
        """The pictures that tokens show; None: none.

        Args:
            token_ids: (R, L) as the decoder computes them, with numbers for ``pictures``.
            stand_in: a picture to compute where no token shows one, since other ranks compute some.
        """
        picture, index = _parts(token_ids.flatten())
        indices = (picture >= 0).nonzero()[:, 0]
        numbers = sorted(set(picture[indices].tolist()))
        hashes = [pictures[number] for number in numbers] or ([] if stand_in is None else [stand_in])
        if not hashes:
            return None
        first, total = torch.zeros(len(pictures), dtype=torch.int64), 0
        for number in numbers:
            first[number] = total
            total += sum(token < 0 for token in self._named(pictures[number]).named)
        pixels = self.processor.family.joined([self.processor.pixels(sha256) for sha256 in hashes])
        return ShownPictures(pixels, indices, first[picture[indices]] + index[indices], total)

    def _position(self, sha256: str) -> PicturePositions:
        placeholder_id, grid = self.processor.placeholder_id, self.processor.grid(sha256)
        ids = [placeholder_id] * sum(token < 0 for token in self._named(sha256).named)
        merge = self._vision.spatial_merge_size
        axes = torch.tensor(three_axis_positions([*ids, -1], placeholder_id=placeholder_id, grids=[grid], merge=merge))
        return PicturePositions(axes[:, :-1], int(axes[0, -1]))


def tower(policy: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of a composite model which are neither its decoder's nor its head's; none of any other model."""
    if not composite(policy.config):
        return
    head: nn.Module = policy.get_output_embeddings()
    others = {id(tensor) for part in (policy.get_decoder(), head) for tensor in part.parameters()}
    yield from ((name, tensor) for name, tensor in policy.named_parameters() if id(tensor) not in others)


def freeze_tower(policy: PreTrainedModel) -> None:
    """Let the vision tower take no gradients; a model of text is left as it is."""
    for _, tensor in tower(policy):
        tensor.requires_grad = False


def decoder_inputs(
    policy: PreTrainedModel, token_ids: Tensor, shown: ShownPictures, *, trained: bool
) -> dict[str, Any]:
    """The decoder's input in place of token ids (R, L): their embeddings, with features of pictures in place.

    Args:
        trained: whether the tower takes gradients; else it keeps nothing for backward.
    """
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        found = picture_features(policy, shown.pixels)
    if len(shown.indices) and len(found.embeddings) != shown.total:
        raise LearnerError(
            f"computing the pictures of a micro-batch: the vision tower gives {len(found.embeddings)} features and the "
            f"pictures have {shown.total} tokens. Use the image processor that the model was trained with."
        )
    levels = [level.index_select(0, shown.features) for level in (found.embeddings, *found.deepstack)]
    return decoder_arguments(policy.get_input_embeddings()(token_ids), shown.indices, levels)


def _parts(token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The number of the picture that each token shows, −1 for none, and the index of the token in it."""
    numbers = ~token_ids.clamp(max=-1)
    return torch.where(token_ids < 0, numbers >> INDEX_BITS, -1), numbers & ((1 << INDEX_BITS) - 1)


def _before(values: Sequence[int], depths: Sequence[int]) -> list[int]:
    """For each token of packed trees the sum of the values of the tokens before it in its row."""
    sums, path = list[int](), [0]  # path: by depth, of the row up to the last token
    for value, depth in zip(values, depths, strict=True):
        del path[depth + 1 :]
        sums.append(path[depth])
        path.append(path[depth] + value)
    return sums
