"""The worker process of ``mathematics.equal``: reads pairs and their time limits as JSON lines, writes true or false.

It ends when its input closes, or by the signal of a timer when a pair exceeds its limit of CPU time.
"""

import json
import resource
import signal
import sys

from math_verify import parse, verify

MEMORY = 4 << 30  # bytes of address space
SECONDS = 120  # wall clock limit within math-verify; the timer ends this process long before


def main() -> None:
    """Report readiness after a first pair, which triggers late imports, then answer."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _send("ready" if _equal("\\frac{1}{2}", "0.5") else "broken")
    for line in sys.stdin:
        answer, truth, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal is not handled and ends the process
        result = _equal(answer, truth)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(result)


def _send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _equal(answer: str, truth: str) -> bool:
    try:
        wanted = _parsed(truth)
        return bool(wanted) and bool(verify(wanted, _parsed(answer), timeout_seconds=SECONDS))
    except (Exception, MemoryError):  # the boundary to sympy, which raises any exception for unusual expressions
        return False


def _parsed(text: str) -> list[object]:
    """The expressions that math-verify finds in a text; the whole text is one, unless it marks an expression."""
    bare = text.strip()
    marked = "\\boxed" in bare or "$" in bare or "\\(" in bare or "\\[" in bare
    expressions: list[object] = parse(
        bare if marked else f"\\boxed{{{bare}}}", parsing_timeout=SECONDS, fallback_mode="no_fallback"
    )
    return expressions or list(parse(bare, parsing_timeout=SECONDS))


if __name__ == "__main__":
    main()
