"""The condenser that shows old pictures smaller."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Lt

from condensegrpo.condensers.old_pictures import OldPictures, with_pictures
from condensegrpo.core.messages import History, MediaPart, Message, Rewrites, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed
from condensegrpo.core.protocols.pictures import MediaStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageScale(OldPictures):
    """Shows old pictures with ``scale`` times their width and height; replies and all texts stay.

    Which are old is as in ``image_mask``. A smaller picture is a PNG file of its own, stored like any other; whether it
    has fewer tokens is up to the model: those that show every picture at one size gain nothing. In a pipeline a later
    stage may omit what is still too long.
    """

    scale: Annotated[float, Gt(0), Lt(1)] = 0.5
    drop_oldest: bool = True  # False: only scale, for a pipeline whose later stage fits the budget

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units with smaller old pictures. A picture is scaled once in an episode.

        Raises:
            ValueError: the budget has no store of pictures.
        """

        def smaller(unit: Unit, message: Message, picture: MediaPart) -> MediaPart:
            if budget.media is None:
                raise ValueError("image_scale scales pictures, and the budget has no store with their bytes")
            return _scaled(budget.media, picture, self.scale)

        scaled = history.rewrites.setdefault((ImageScale, self.scale), Rewrites())
        return self.rewritten(
            history,
            lambda units: scaled.of(units, lambda unit: with_pictures(unit, smaller)),
            budget,
            "scaled the pictures",
            drop_oldest=self.drop_oldest,
        )


def _scaled(media: MediaStore, picture: MediaPart, scale: float) -> MediaPart:
    """A smaller picture, stored; one of a single pixel stays."""
    from PIL import Image  # here: runs without pictures do not need it

    with Image.open(io.BytesIO(media.read(picture.sha256))) as image:  # decoded before, when it was shown
        size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
        if size == image.size:
            return picture
        small, file = image.convert("RGB").resize(size), io.BytesIO()
    small.save(file, format="PNG")
    return media.write(MediaPart.of(file.getvalue(), "image/png"))
