"""Media of messages, as files named by their content: ``media/<sha256>`` in a run folder.

A trajectory line holds hash and type; the bytes are written once, however many messages show them.
"""

import hashlib
from pathlib import Path

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import MediaPart
from condensegrpo.storage.files import write_atomically


def write_media(folder: Path, data: bytes, kind: str) -> MediaPart:
    """Store a picture, unless it is stored; returns the part of a message that shows it.

    Args:
        folder: of the media.
        data: the bytes of the file.
        kind: its type, such as ``image/png``.
    """
    part = MediaPart(sha256=hashlib.sha256(data).hexdigest(), type=kind)
    file = folder / part.sha256
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data)
    return part


def read_media(folder: Path, part: MediaPart) -> bytes:
    """The bytes of a stored picture.

    Raises:
        DataError: it is not there, or its bytes are others.
    """
    file = folder / part.sha256
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"reading {part.text}: {file}: {error.strerror}.") from error
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise DataError(f"reading {part.text}: {file} has other bytes than when it was stored. Remove it.")
    return data
