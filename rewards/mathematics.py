"""Whether two mathematical expressions are equal, by math-verify in a worker process that can be killed.

Simplifying an expression may not terminate, and a thread cannot be stopped. The worker compares one pair at a time; a
signal ends it when a pair has used ``SECONDS`` of CPU time, the pair counts as unequal, and the next pair starts a new
worker. CPU time, so that a reward does not depend on the load of the machine. The comparison has no settings, so all
rewards of a program share one worker. It ends with the program, however that ends: its input closes.

The worker runs this file: ``main`` reads pairs and their time limits as JSON lines and writes true or false. It alone
imports math-verify.
"""

import atexit
import json
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import unicodedata

SECONDS = 5.0  # of CPU time for one pair
PATIENCE = 24  # wall-clock seconds per second of CPU time before this process kills the worker
START_SECONDS = 120.0  # for the process to import sympy
MAX_CHARS = 2000  # of an expression; longer answers are unequal to anything
MEMORY = 4 << 30  # bytes of address space of the worker
LIBRARY_SECONDS = 120  # wall clock limit within math-verify; the timer ends the worker long before

_UNREADABLE = "unreadable"  # reply of the worker: it finds no expression in the ground truth
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_DIGITS = str.maketrans(_RAISED, "0123456789+-")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}


class _Worker:
    """The worker process; compares one pair at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "condensegrpo.rewards.mathematics"],
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
                f"antlr4-python3-runtime==4.13.2 are installed: python -m condensegrpo.rewards.mathematics"
            )

    def compare(self, answer: str, truth: str, seconds: float) -> bool | str | None:
        """Whether the two are equal, or ``_UNREADABLE``; None: no reply within ``seconds`` of its CPU time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([answer, truth, seconds]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._line(seconds * PATIENCE)
        return None if line is None else json.loads(line)

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
    r"""Whether an answer is mathematically equal to the ground truth: ``\frac12``, ``0.5`` and ``½`` are.

    Raises:
        ValueError: the ground truth is no expression that math-verify reads, or has more than ``MAX_CHARS``.
    """
    global _worker
    if len(answer) > MAX_CHARS >= len(truth):
        return False
    with _lock:
        if _worker is None:
            _worker = _Worker()
        verdict: bool | str | None = _UNREADABLE
        if len(truth) <= MAX_CHARS:
            verdict = _worker.compare(_clean(answer), _clean(truth), seconds)
        if verdict is None:
            _stop()
    if verdict == _UNREADABLE:
        raise ValueError(f"the ground truth {truth!r:.80} cannot be read as mathematics: no answer can equal it")
    return bool(verdict)


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


def main() -> None:
    """The worker process: reports readiness after a first pair, which triggers late imports, then answers.

    It ends when its input closes, or by the signal of a timer when a pair exceeds its limit of CPU time.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _send("ready" if _verified("\\frac{1}{2}", "0.5") is True else "broken")
    for line in sys.stdin:
        answer, truth, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal is not handled and ends the process
        result = _verified(answer, truth)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(result)


def _send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _verified(answer: str, truth: str) -> bool | str:
    from math_verify import verify

    expected: list[object] = []
    try:
        expected = _parsed(truth)
        return bool(verify(expected, _parsed(answer), timeout_seconds=LIBRARY_SECONDS)) if expected else _UNREADABLE
    except (Exception, MemoryError):  # the boundary to sympy, which raises any exception for unusual expressions
        return False if expected else _UNREADABLE


def _parsed(text: str) -> list[object]:
    """The expressions that math-verify finds in a text; the whole text is one, unless it marks an expression."""
    from math_verify import parse

    bare = _latex(text.strip())
    marked = "\\boxed" in bare or "$" in bare or "\\(" in bare or "\\[" in bare
    expressions: list[object] = parse(
        bare if marked else f"\\boxed{{{bare}}}", parsing_timeout=LIBRARY_SECONDS, fallback_mode="no_fallback"
    )
    return expressions or list(parse(bare, parsing_timeout=LIBRARY_SECONDS))


def _latex(text: str) -> str:
    r"""Mathematics in Unicode, and TeX's signs of currency and spacing, as math-verify reads them.

    √2  →  \sqrt{2}      3½  →  3\frac{1}{2}      x⁻²  →  x^{-2}      \$32,\!348  →  32,348
    """
    text = text.replace(r"\$", "").replace(r"\!", "").replace("∞", r"\infty ")
    text = re.sub(f"[{_RAISED}]+", lambda found: f"^{{{found[0].translate(_DIGITS)}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda found: _fraction(found[0]), text)
    operand = r"\s*(\d+(?:\.\d+)?|[^\W\d_]|\([^()]*\)|\{[^{}]*\})"
    return re.sub(f"([{''.join(_ROOTS)}]){operand}", lambda found: f"{_ROOTS[found[1]]}{{{found[2]}}}", text)


def _fraction(character: str) -> str:
    above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


if __name__ == "__main__":
    main()
