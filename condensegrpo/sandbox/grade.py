"""Grades code by tests. Results are compared in a process in which the code never ran.

Two calls share a channel: the code runs in one, the tests in the other (``judge.py``). The tests call the code's
functions over the channel and compare the returned plain values in their own process. The code never sees the tests or
the expected values; whatever it does (exit, print, patch Python, replace its functions, flood the channel), it can only
return a wrong answer.
"""

import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from condensegrpo.sandbox.calls import CallOutcome, CallResult
from condensegrpo.sandbox.process import python_request
from condensegrpo.sandbox.sandbox import CallGroup, Sandbox

GRACE = 1.0  # extra seconds for the process of the code, which ends after that of the tests


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVerdict:
    """The test results of some code."""

    passed: tuple[bool, ...]  # one for each test, in order
    reasons: tuple[str, ...]  # why it failed; "" if it passed
    judge: CallResult  # how the process of the tests ended
    code: CallResult  # how the process of the code ended, with what it printed

    @property
    def all_passed(self) -> bool:
        """Whether there were tests and all of them passed."""
        return bool(self.passed) and all(self.passed)


def grade(
    sandbox: Sandbox, code: str, tests: Sequence[str], *, setup: str = "", entry: Sequence[str] = ()
) -> CodeVerdict:
    """Grade code by tests, each a piece of Python such as ``assert add(1, 2) == 3``. It blocks, as a reward may.

    Arguments and results are plain values (numbers, text, and lists, tuples, sets, dicts … of them). An object of the
    code's own classes stays in the process of the code; the tests get a proxy that equals itself only.

    Args:
        code: runs once for all tests, as a module named ``candidate``.
        tests: run one after another in one namespace; the time limit applies to all of them together.
        setup: Python that runs before them, in the same namespace.
        entry: names under test. The tests then take these names from the code, even if a builtin has the same name
            (``sum``), and no others; without ``entry``, every name that the tests, the builtins and the library lack.

    Raises:
        SandboxError: see ``Sandbox.open``.
    """
    nonce = secrets.token_hex(16)
    longer = replace(sandbox.limits, seconds=sandbox.limits.seconds + GRACE)
    candidate = {**python_request(code, longer), "kind": "candidate"}
    judged = {"tests": list(tests), "setup": setup, "entry": list(entry), "nonce": nonce}
    tester = {**python_request("", sandbox.limits), "kind": "judge", "judged": judged}

    def work(group: CallGroup) -> CodeVerdict:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            code_call, judge_call = group.call(candidate, theirs), group.call(tester, ours)
        judge = judge_call.result()
        code_call.finish()
        return _verdict(len(tests), nonce, judge, code_call.result())

    return sandbox.work(work)


def _verdict(count: int, nonce: str, judge: CallResult, code: CallResult) -> CodeVerdict:
    """Read the judge's records: a test without a record has failed."""
    unjudged = f"not judged: the tests ended with the outcome {judge.outcome}"
    if judge.outcome is CallOutcome.LOST:
        unjudged += f" ({judge.detail})"
    passed, reasons = [False] * count, [unjudged] * count
    for record in judge.records:
        mark, _, text = record.partition(" ")
        if mark == nonce:
            try:
                index, success, reason = json.loads(text)
            except ValueError:
                continue  # cut off: the records are longer than the kept part
            passed[index], reasons[index] = success is True, reason
    return CodeVerdict(passed=tuple(passed), reasons=tuple(reasons), judge=judge, code=code)
