"""What a process of its own does with its process group."""

import atexit
import os
from collections.abc import Callable

from forked import main
from torch import distributed

from condensegrpo.learner import ranks
from condensegrpo.samplers.vllm.engine import _join_alone


def learner() -> None:
    _joined(ranks.join)


def sampler() -> None:
    _joined(_join_alone)


def command() -> None:
    """The command line, which fails if it leaves a group behind."""
    atexit.register(lambda: distributed.is_initialized() and os._exit(3))
    main()


def _joined(join: Callable[[], None]) -> None:
    """Whether there is a group, after joining and when everything registered later has run."""
    atexit.register(lambda: print(f"at the end: {distributed.is_initialized()}", flush=True))
    join()
    print(f"joined: {distributed.is_initialized()}", flush=True)
