"""Whether code passes the tests of a problem, in the sandbox. Compares values, never exit codes or printed text."""

import re

from condensegrpo.core.protocols import Problem
from condensegrpo.sandbox.grade import grade_now
from condensegrpo.sandbox.result import CallOutcome
from condensegrpo.sandbox.sandbox import Sandbox

MAX_CODE = 100_000  # characters of an answer's code; longer code fails

_FENCED = re.compile(r"^[ \t]*```(?:python|py)?[ \t\r]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)


def passes_tests(answer: str, problem: Problem, sandbox: Sandbox) -> bool:
    """Whether an answer's code passes every test of ``problem.data``: ``tests``, ``test_setup``, ``entry``.

    Raises:
        SandboxError: no isolation backend works on this machine.
        RuntimeError: the sandbox itself failed, so the verdict is unknown.
    """
    code = code_of(answer)
    if len(code) > MAX_CODE:
        return False
    data = problem.data
    verdict = grade_now(
        sandbox, code, tuple(data["tests"]), setup=data.get("test_setup", ""), entry=tuple(data.get("entry", ()))
    )
    if CallOutcome.LOST in (verdict.judge.outcome, verdict.code.outcome):
        raise RuntimeError(f"judging problem {problem.id}: the sandbox failed: {verdict.reasons[0]}")
    return verdict.all_passed


def code_of(answer: str) -> str:
    """The code of an answer: its last fenced Python block, or the whole answer if it has none."""
    blocks = _FENCED.findall(answer)
    return str(blocks[-1]) if blocks else answer
