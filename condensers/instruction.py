"""What a summary is asked for with: a text file that anybody can replace."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

FIELDS = {"tokens": "0", "kept": "0"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """A text in which ``$tokens`` and ``$kept`` stand for the length allowed and the units that stay."""

    text: str

    @classmethod
    def read(cls, path: str | None) -> "Instruction":
        """The text of a file; without one, that of the package: facts, done, pending, failed, next.

        Raises:
            ValueError: there is no such file, or it has a field that nothing is known for.
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
        """The text for a summary of at most so many tokens, with so many units that stay."""
        return Template(self.text).substitute(tokens=tokens, kept=kept)
