"""Waits for what another thread or process is about to do: `from waiting import eventually`."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether a condition holds, now or soon; so many seconds pass only where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
