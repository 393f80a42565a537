"""The instruction that requests a summary: a text file, which an option can replace."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

FIELDS = {"tokens": "0", "kept": "0"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """A text in which ``$tokens`` and ``$kept`` are replaced by the maximum length and the number of kept units."""

    text: str

    @classmethod
    def read(cls, path: str | None) -> "Instruction":
        """The text of a file; by default that of the package, with the sections facts, done, pending, failed, next.

        Raises:
            ValueError: the file cannot be read, or it has a field other than ``$tokens`` and ``$kept``.
        """
        source = Path(path) if path else Path(str(files("condensegrpo.condensers"))) / "summary.txt"
        try:
            text = source.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(f"reading the template {source}: {error.strerror}") from error
        try:
            Template(text).substitute(FIELDS)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"reading the template {source}: {error}; its fields are $tokens and $kept, and a dollar is $$"
            ) from error
        return cls(text)

    def filled(self, *, tokens: int, kept: int) -> str:
        """The text for a summary of at most so many tokens, with so many kept units."""
        return Template(self.text).substitute(tokens=tokens, kept=kept)
