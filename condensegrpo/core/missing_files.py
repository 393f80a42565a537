"""Where a file that a relative path names was looked for and not found, for the error that says so later."""

from collections.abc import Iterable
from pathlib import Path

_looked_in = dict[str, tuple[Path, ...]]()  # by the text that names the file


def looked_for(name: str, folders: Iterable[Path]) -> None:
    """Note that what a name means is in none of some folders."""
    _looked_in[name] = tuple(dict.fromkeys(folders))


def looked_in(name: str) -> tuple[Path, ...]:
    """The folders in which it was looked for; none: nowhere but in the working directory."""
    return _looked_in.get(name, ())
