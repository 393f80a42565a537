"""The pictures of stored trajectories, small: as an inspector shows them. A picture that is not there is not shown."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.core.errors import DataError
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.image_files import open_picture, png_data_url

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 192  # pixels of the longer side on a page
NAMED = re.compile(r"\[image/[a-z]+ ([0-9a-f]{12})\]")  # ``MediaPart.text``


def media_of(file: Path) -> MediaFolder:
    """The media of a trajectory file: of its run, or of the folder that the evaluation was saved in."""
    return MediaFolder(next((folder / "media" for folder in file.parents[:4] if (folder / "media").is_dir()), file))


def thumbnail(media: MediaFolder, sha256: str, side: int) -> "Image | None":
    """A picture with ``side`` pixels at most; None: it is not stored, or is no picture."""
    try:
        picture = open_picture(media.read(sha256), sha256[:12])
    except DataError:
        return None
    picture.thumbnail((side, side))
    return picture


def pictures_named(texts: Iterable[str], media: MediaFolder, *, most: int | None = None) -> dict[str, str]:
    """The first pictures that texts name, or all, as data URIs, by what stands for them in a text."""
    found = [match for text in texts for match in NAMED.finditer(text)]
    if not found or not media.folder.is_dir():
        return {}
    hashes = {name[:12]: name for name in os.listdir(media.folder)}
    uris = dict[str, str]()
    for match in found:
        picture = thumbnail(media, hashes.get(match[1], match[1]), SIDE) if match[0] not in uris else None
        if picture is not None:
            uris[match[0]] = png_data_url(picture)
            if len(uris) == most:
                break
    return uris
