"""The process behind ``mathematics.equal``: pairs with their seconds as JSON lines in, true or false out.

It ends with its input, or by the signal of a timer when a pair has taken its seconds of CPU time.
"""

import json
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify

MEMORY = 4 << 30  # bytes of address space
SECONDS = 120  # wall clock of one attempt within math-verify; the timer ends this process long before


def main() -> None:
    """Say that it is ready, after a first pair that loads what is loaded late, then answer."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _say("ready" if _equal("\\frac{1}{2}", "0.5") else "broken")
    for line in sys.stdin:
        answer, truth, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nothing handles its signal, which ends the process
        said = _equal(answer, truth)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(said)


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _equal(answer: str, truth: str) -> bool:
    try:
        wanted = _parsed(truth)
        return bool(wanted) and bool(verify(wanted, _parsed(answer), timeout_seconds=SECONDS))
    except (Exception, MemoryError):  # the boundary to sympy, which raises whatever it likes for strange mathematics
        return False


def _parsed(text: str) -> list[Any]:
    """What math-verify makes of a text, which is one expression unless it says itself where the expression is."""
    bare = text.strip()
    marked = "\\boxed" in bare or "$" in bare or "\\(" in bare or "\\[" in bare
    found: list[Any] = parse(
        bare if marked else f"\\boxed{{{bare}}}", parsing_timeout=SECONDS, fallback_mode="no_fallback"
    )
    return found or list(parse(bare, parsing_timeout=SECONDS))


if __name__ == "__main__":
    main()
