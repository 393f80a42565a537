"""The process behind ``mathematics.equal``: pairs as JSON lines in, true or false out. It ends with its input."""

import json
import resource
import sys
from typing import Any

from math_verify import parse, verify

MEMORY = 4 << 30  # bytes of address space
SECONDS = 30  # of one attempt within math-verify; the parent kills this process long before


def main() -> None:
    """Say that it is ready, then answer."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say("ready")
    for line in sys.stdin:
        answer, truth = json.loads(line)
        _say(_equal(answer, truth))


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
