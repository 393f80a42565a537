"""A tool that is an object, as a partial function is."""

from functools import partial


def _counted(word: str, start: int) -> int:
    """Counts.

    Args:
        word: what to count.
        start: from here.
    """
    return start + len(word)


counted = partial(_counted, start=1)
