"""Numbers and suggestions in messages. Standard library only."""

import difflib
from collections.abc import Iterable


def counted(number: float, singular: str, plural: str = "") -> str:
    """``1 group``, ``2 groups``, ``0.5 seconds``; the plural has an s unless it is given."""
    noun = singular if number == 1 else plural or f"{singular}s"
    return f"{number:g} {noun}" if isinstance(number, float) else f"{number} {noun}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known name; empty if none is near.

    >>> did_you_mean("keep_lst", ["keep_last", "keep_first"]), did_you_mean("zzz", ["keep_last"])
    ("Did you mean 'keep_last'? ", '')
    """
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {nearest[0]!r}? " if nearest else ""
