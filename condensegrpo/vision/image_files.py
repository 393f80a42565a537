"""The bytes of a picture to pixels, of whatever origin: users' files, web pages, environments."""

import base64
import io
import warnings
from typing import TYPE_CHECKING

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import MediaPart

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
TYPES = {  # by the first bytes of a file
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}
MAX_BYTES = 64 * 2**20
MAX_PIXELS = 50_000_000  # a screen of 8k has 33 million; checked before a pixel is decoded


def part_of_file(data: bytes, doing: str) -> MediaPart:
    """The part that shows the picture in the bytes of a file, whose type its first bytes say."""
    kind = next((kind for start, kind in TYPES.items() if data.startswith(start)), None)
    if kind is None:
        raise DataError(f"{doing} begins with {data[:8]!r}, wanted one of {', '.join(TYPES.values())}")
    return MediaPart.of(data, kind)


def from_base64(text: str, doing: str) -> bytes:
    """The bytes in base64, or in a data URI."""
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except ValueError as error:  # binascii.Error, or of characters that are not ASCII
        raise DataError(f"{doing} has a picture that is no base64: {error}. It begins with {text[:40]!r}") from error


def as_png(picture: "Image") -> bytes:
    """The bytes of a PNG file of a picture."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def png_data_url(picture: "Image") -> str:
    """A PNG file of a picture as a ``data:`` URL."""
    return f"data:image/png;base64,{base64.b64encode(as_png(picture)).decode()}"


def open_picture(data: bytes, name: str) -> "Image":
    """The picture in RGB, turned as its EXIF orientation says. Transparency is dropped, as transformers does.

    Args:
        data: the bytes of a file in one of ``FORMATS``.
        name: of the picture in errors, such as its file or hash.
    """
    from PIL import Image, ImageOps

    doing = f"opening the picture {name}"
    if len(data) > MAX_BYTES:
        raise DataError(f"{doing}: it has {len(data):,} bytes, at most {MAX_BYTES:,} are read. Scale it down.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise DataError(
                f"{doing}: it has {width} × {height} pixels, at most {MAX_PIXELS:,} are decoded. Scale it down."
            )
        if getattr(picture, "is_animated", False):  # only some formats have the attribute
            raise DataError(f"{doing}: it is animated. Show its frames as single pictures.")
        return ImageOps.exif_transpose(picture).convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"{doing}: {error} At most {MAX_PIXELS:,} pixels are decoded. Scale it down.") from error
    except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, LookupError) as error:
        raise DataError(
            f"{doing}: {type(error).__name__}: {error}. Wanted a whole file of one of the formats {', '.join(FORMATS)}."
        ) from error
