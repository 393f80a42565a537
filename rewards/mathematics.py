"""Whether two mathematical expressions are equal, by math-verify in a worker process that can be killed.

Simplifying an expression may not terminate, and a thread cannot be stopped. The worker compares one pair at a time; a
signal ends it when a pair has used ``SECONDS`` of CPU time, the pair counts as unequal, and the next pair starts a new
worker. CPU time, so that a reward does not depend on the load of the machine. The comparison has no settings, so all
rewards of a program share one worker. It ends with the program, however that ends: its input closes.
"""

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time

SECONDS = 5.0  # of CPU time for one pair
PATIENCE = 24  # wall-clock seconds per second of CPU time before this process kills the worker
START_SECONDS = 120.0  # for the process to import sympy
MAX_CHARS = 2000  # of an expression; longer ones are unequal to anything


class _Worker:
    """The worker process; compares one pair at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "condensegrpo.rewards.mathematics_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the run only, which closes the worker
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        reply = self._line(START_SECONDS)
        if reply is None or json.loads(reply) != "ready":
            self.close()
            raise RuntimeError(
                f"starting the comparison of mathematics: found the reply {reply!r} of its process (None: it ended, or "
                f"did not reply within {START_SECONDS:g} s), wanted 'ready'. Check that math-verify and "
                f"antlr4-python3-runtime==4.13.2 are installed: python -m condensegrpo.rewards.mathematics_worker"
            )

    def ask(self, answer: str, truth: str, seconds: float) -> bool | None:
        """Whether the two are equal; None if the worker did not reply within ``seconds`` of its CPU time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([answer, truth, seconds]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._line(seconds * PATIENCE)
        return None if line is None else bool(json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self, seconds: float) -> bytes | None:
        """The next line of its output; lines are short."""
        assert self._process.stdout is not None
        deadline, data = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    return None
                piece = os.read(self._process.stdout.fileno(), 4096)
                if not piece:
                    return None
                data += piece
        return data


_lock = threading.Lock()
_worker: _Worker | None = None


def equal(answer: str, truth: str, *, seconds: float = SECONDS) -> bool:
    r"""Whether an answer is mathematically equal to the ground truth: ``\frac12``, ``0.5`` and ``1/2`` are.

    Raises:
        RuntimeError: the process cannot be started.
    """
    global _worker
    if max(len(answer), len(truth)) > MAX_CHARS:
        return False
    with _lock:
        if _worker is None:
            _worker = _Worker()
        equal_values = _worker.ask(_clean(answer), _clean(truth), seconds)
        if equal_values is None:
            _stop()
        return bool(equal_values)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written


def _stop() -> None:
    global _worker
    if _worker is not None:
        _worker.close()
        _worker = None


def _stop_in(owner: int) -> None:
    if os.getpid() == owner:  # the worker belongs to the process that started it, not to its forks
        _stop()


atexit.register(_stop_in, os.getpid())
