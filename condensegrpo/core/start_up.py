"""No search for garbage while a command loads its libraries: they are half a million objects, and all of them stay."""

import atexit
import gc

NEVER = 1_000_000  # collections of younger objects before the oldest are looked at


def postpone_collections() -> None:
    """Look at no object that has survived two collections until `resume_collections`.

    Python looks at all of them whenever they are a quarter more: a fifth of the time of importing DeepSpeed.
    """
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, NEVER)


def resume_collections() -> None:
    """Collect as usual, and leave out what is loaded. Does nothing unless collections were postponed."""
    youngest, middle, oldest = gc.get_threshold()
    if oldest == NEVER:
        gc.freeze()  # DeepSpeed looks at everything at several places, 0.3 s each time
        atexit.register(gc.unfreeze)  # else libraries such as Triton print at the exit that their objects leaked
        gc.set_threshold(youngest, middle, 10)
