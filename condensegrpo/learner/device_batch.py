"""A micro-batch on the device: what its lengths decide is computed in main memory, and uploaded by one copy."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.learner.devices import upload
from condensegrpo.learner.pictures import ShownPictures
from condensegrpo.learner.tree_attention import AttentionPattern, HostPattern


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceBatch:
    """A micro-batch as the decoder computes it, and the columns of its trained tokens.

    Where ranks compute rows together, the decoder's input is this rank's part, and ``columns`` are those of all ranks.
    """

    token_ids: Tensor  # (R, L) int64, with padding
    position_ids: Tensor  # (R, L) int64, or (4, R, L) where pictures are shown to a model with three axes
    source: Tensor  # (T',) int64, the index in R·L whose logits predict each trained token of this rank
    pattern: AttentionPattern | None  # of prefix trees; None: plain rows
    columns: PackedBatch  # of all T trained tokens
    which: Tensor | None  # (T',) int64, those of this rank; None: all T
    pictures: ShownPictures | None  # that its tokens show; None: it is text

    @property
    def predicted_here(self) -> PackedBatch:
        """The columns of the trained tokens that this rank predicts."""
        return self.columns if self.which is None else self.columns.trained(self.which)


class Layout(NamedTuple):
    """A micro-batch as the decoder computes it, in main memory; the fields are those of ``DeviceBatch``."""

    token_ids: Tensor
    position_ids: Tensor
    source: Tensor
    pattern: HostPattern | None = None
    which: Tensor | None = None


def on_device(
    batch: PackedBatch, layout: Layout, device: torch.device, pictures: ShownPictures | None = None
) -> DeviceBatch:
    """A micro-batch on a device, with the pictures that it shows."""
    token_ids, position_ids, source, pattern, which = layout
    given = [token_ids, position_ids, source, source if which is None else which]
    columns, indices = batch.columns, () if pattern is None else pattern.indices
    shown = () if pictures is None else pictures.tensors
    uploaded = upload([*given, *shown, *columns.values(), *indices], device)
    first = len(given) + len(shown)
    last = first + len(columns)
    of_trained: dict[str, Any] = dict(zip(columns, uploaded[first:last], strict=True))
    return DeviceBatch(
        token_ids=uploaded[0],
        position_ids=uploaded[1],
        source=uploaded[2],
        which=None if which is None else uploaded[3],
        pattern=None if pattern is None else pattern.of_uploaded(*uploaded[last:]),
        pictures=None if pictures is None else pictures.of_uploaded(*uploaded[len(given) : first]),
        columns=PackedBatch(**of_trained),
    )
