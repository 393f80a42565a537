"""State of the whole process: working directory, garbage collection at its start, clean-up at its exit.

The working directory may be removed while a run goes on: a clone that is deleted, the folder of a job. While a command
loads its libraries no garbage is searched: they are half a million objects, and all of them stay.
"""

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Lock

GARBAGE_THRESHOLDS = (20_000, 50, 100)  # as in ``gc.set_threshold``
NEVER = 1_000_000  # collections of younger objects before the oldest are looked at
_clean_ups = list[Callable[[], None]]()  # for a process that exits without unwinding (second Ctrl-C)


def working_directory() -> Path | None:
    """The folder that relative paths begin at; None: it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


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


_blocks = list[tuple[int, int, int]]()  # the usual thresholds, once for every block that runs in any thread
_blocks_change = Lock()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for garbage less often in a block whose objects mostly stay, such as turns and their rows.

    Python looks at all objects again whenever they are a quarter more: with 2,000 trajectories a third of the time of
    a rollout. A collector that is disabled, or set to be rarer still, stays so.
    """
    with _blocks_change:
        usual = _blocks[0] if _blocks else gc.get_threshold()
        if not _blocks and usual[0]:  # 0: it never looks
            gc.set_threshold(*map(max, GARBAGE_THRESHOLDS, usual))
        _blocks.append(usual)
    try:
        yield
    finally:
        with _blocks_change:
            _blocks.pop()
            if not _blocks:
                gc.set_threshold(*usual)


@contextmanager
def cleaned_up_at_exit(clean_up: Callable[[], None]) -> Iterator[None]:
    """Call ``clean_up`` if the process exits without unwinding this block; its ordinary end calls nothing."""
    _clean_ups.append(clean_up)
    try:
        yield
    finally:
        _clean_ups.remove(clean_up)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A folder among the temporary files, named by what it holds and removed at the end, an immediate one included."""
    folder = Path(mkdtemp(prefix=f"condensegrpo-{kind}-"))
    remove = partial(rmtree, folder, ignore_errors=True)
    try:
        with cleaned_up_at_exit(remove):
            yield folder
    finally:
        remove()


def run_clean_ups() -> None:
    """Clean up after all unfinished blocks, the newest first; an error of one does not stop the others."""
    for clean_up in reversed(_clean_ups):
        with suppress(Exception):
            clean_up()
