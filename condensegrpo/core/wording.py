"""Numbers and suggestions in messages. Standard library only."""

import difflib
from collections.abc import Collection, Iterable


def plural(number: float, singular: str, several: str = "") -> str:
    """``1 group``, ``2 groups``, ``0.5 seconds``; the plural has an s unless it is given."""
    noun = singular if number == 1 else several or f"{singular}s"
    return f"{number:g} {noun}" if isinstance(number, float) else f"{number} {noun}"


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """A sentence with the nearest known name, or as many as ``most``; empty if none is near.

    >>> did_you_mean("keep_lst", ["keep_last", "keep_first"]), did_you_mean("zzz", ["keep_last"])
    ("Did you mean 'keep_last'? ", '')
    """
    nearest = [repr(each) for each in difflib.get_close_matches(name, list(known), n=most)]
    listed = " or ".join(filter(None, (", ".join(nearest[:-1]), *nearest[-1:])))
    return f"Did you mean {listed}? " if listed else ""


def ranges(numbers: Collection[int]) -> str:
    """``1–4, 6`` for 1, 2, 3, 4, 6, in any order."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
