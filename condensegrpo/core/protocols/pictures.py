"""Pictures: where their bytes are, and what stands for one in a prompt. Standard library only."""

from typing import Protocol

from condensegrpo.core.messages import MediaPart


class MediaStore(Protocol):
    """Where the bytes of pictures are: messages, workers, servers and files hold hashes."""

    def write(self, part: MediaPart) -> MediaPart:
        """Store the bytes of a part, if it has any; the part without them."""

    def read(self, sha256: str) -> bytes:
        """The bytes that were stored under a hash; ``DataError`` if there are none."""


class ExpandsPictures(Protocol):
    """What a picture is in a prompt: the chat template writes a placeholder, and the model's processor expands it."""

    @property
    def media(self) -> MediaStore:
        """Where the bytes of pictures are; an episode stores those of every message that it takes up."""

    @property
    def placeholder(self) -> str:
        """The token that the chat template writes for every picture."""

    @property
    def placeholder_id(self) -> int:
        """The token at whose positions the picture's embeddings are placed."""

    def expansion(self, sha256: str) -> str:
        """The text that takes the place of the placeholder; its tokens depend on the size of the picture.

        Raises ``DataError`` if the picture cannot be shown.
        """
