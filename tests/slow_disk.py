"""A disk on which every sync, rename and write waits: `trackers=[{name: tests/slow_disk.py:SlowDisk}]` in a run."""

import os
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

SECONDS = 0.02
_P, _R = ParamSpec("_P"), TypeVar("_R")


def _slow(function: Callable[_P, _R]) -> Callable[_P, _R]:
    def wait(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        time.sleep(SECONDS)
        return function(*args, **kwargs)

    return wait


class SlowDisk:
    """A tracker that makes the disk slow when it is opened and records nothing."""

    def __init__(self) -> None:
        os.fsync, os.rename, os.replace, os.write = (
            _slow(os.fsync),
            _slow(os.rename),
            _slow(os.replace),
            _slow(os.write),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
