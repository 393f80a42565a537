"""Media of messages, as files named by their content: ``media/<sha256>`` in a run folder.

A trajectory holds hash and type; the bytes are written once, however many messages show them.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import MediaPart
from condensegrpo.storage.files import write_atomically


@dataclass(frozen=True, slots=True)
class MediaFolder:
    """A ``MediaStore`` in a folder, which is made with its first file. Several processes may use it at once."""

    folder: Path

    def write(self, part: MediaPart) -> MediaPart:
        """Store the bytes of a part, unless they are stored; the part without them."""
        if part.data is None:
            return part
        if hashlib.sha256(part.data).hexdigest() != part.sha256:
            raise DataError(f"storing {part.text}: its bytes have another hash. Make the part with MediaPart.of.")
        if not self.path(part.sha256).exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path(part.sha256), part.data)
        return replace(part, data=None)

    def read(self, sha256: str) -> bytes:
        """The bytes of a stored picture."""
        file = self.path(sha256)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(f"reading the picture {sha256[:12]}: {file}: {error.strerror}.") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DataError(f"reading the picture {sha256[:12]}: {file} has other bytes than when it was stored.")
        return data

    def path(self, sha256: str) -> Path:
        """The file of a picture."""
        return self.folder / sha256
