"""Whether two pieces of mathematics are equal, by math-verify in a process of its own that can be killed.

Simplifying an expression may take for ever, and no thread can be stopped: the process answers one pair at a time, ends
by a signal once that has taken ``SECONDS`` of its CPU time, and the pair counts as unequal. The next pair starts
another. The limit is CPU time so that a reward does not depend on what else the machine does.
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
PATIENCE = 24  # wall-clock seconds for each of them before the process is killed from here
START_SECONDS = 120.0  # for the process to import sympy
MAX_CHARS = 2000  # of an expression; a longer one is unequal to anything


class _Worker:
    """The process, and one question at a time to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "condensegrpo.rewards.mathematics_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run, which closes it
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        said = self._line(START_SECONDS)
        if said is None or json.loads(said) != "ready":
            self.close()
            raise RuntimeError(
                f"starting the comparison of mathematics: its process said {said!r} (None: it ended, or did not answer "
                f"in {START_SECONDS:g} s), wanted 'ready'. Check that math-verify and antlr4-python3-runtime==4.13.2 "
                f"are installed: python -m condensegrpo.rewards.mathematics_worker"
            )

    def ask(self, answer: str, truth: str, seconds: float) -> bool | None:
        """Whether they are equal; None if the process did not say so in ``seconds`` of its CPU time."""
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
        """The next line that it writes; lines are short and come whole."""
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
        said = _worker.ask(_clean(answer), _clean(truth), seconds)
        if said is None:
            _stop()
        return bool(said)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written


def _stop() -> None:
    global _worker
    if _worker is not None:
        _worker.close()
        _worker = None


atexit.register(_stop)
