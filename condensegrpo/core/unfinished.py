"""What a command has begun and undoes where it is ended at once: nothing is unwound then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_begun = list[Callable[[], None]]()


@contextmanager
def undone_at_exit(undo: Callable[[], None]) -> Iterator[None]:
    """A block at whose immediate end, as by Ctrl-C, ``undo`` is called; its ordinary end calls nothing."""
    _begun.append(undo)
    try:
        yield
    finally:
        _begun.remove(undo)


def undo_all() -> None:
    """Undo what is unfinished, the newest first. An error of one keeps none of the others from it."""
    for undo in reversed(_begun):
        with suppress(Exception):
            undo()
