"""Judging code by tests. A verdict comes from values that were compared where the code never ran.

Two calls share a channel: the code runs in one, the tests in the other (``judge.py``). The tests call the code's
functions over the channel and compare what comes back, as plain values, in their own process. The code never sees the
tests nor what they expect; it can exit, print, patch Python, replace its own functions or flood the channel, and all
that it wins is a wrong answer.
"""

import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from condensegrpo.sandbox.limits import SandboxLimits
from condensegrpo.sandbox.ran import Outcome, Ran
from condensegrpo.sandbox.sandbox import Sandbox, Ticket, Work

GRACE = 1.0  # seconds that the code's process is given beyond the tests'


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests said of some code."""

    passed: tuple[bool, ...]  # one for each test, in order
    reasons: tuple[str, ...]  # why it failed; "" where it passed
    judge: Ran  # how the process of the tests ended
    code: Ran  # how the process of the code ended, with what it printed

    @property
    def all_passed(self) -> bool:
        """Whether there were tests and every one passed."""
        return bool(self.passed) and all(self.passed)


async def grade(
    sandbox: Sandbox,
    code: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    entry: Sequence[str] = (),
    limits: SandboxLimits | None = None,
) -> Verdict:
    """Judge code by tests, each a piece of Python such as ``assert add(1, 2) == 3``.

    What the tests hand over and get back are plain values (numbers, text, and lists, tuples, sets, dicts … of them);
    an object of the code's own classes stays with the code, and the tests hold a proxy that equals itself only.

    Args:
        code: runs as a module of the name ``candidate``, once for all tests.
        tests: run one after the other in one namespace; the limit on time is for all of them together.
        setup: Python that runs before them, in the same namespace.
        entry: names under test. The tests then find these in the code, also if they are called as one of Python's own
            (``sum``), and no others; without any, every name that neither they nor Python nor its library have.

    Raises:
        SandboxError: there is no sandbox to run it in.
    """
    return await sandbox.work(_work(code, tests, setup, entry, limits or sandbox.limits))


def grade_now(
    sandbox: Sandbox,
    code: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    entry: Sequence[str] = (),
    limits: SandboxLimits | None = None,
) -> Verdict:
    """``grade`` for callers without an event loop, such as a reward: it blocks."""
    return sandbox.work_now(_work(code, tests, setup, entry, limits or sandbox.limits))


def _work(code: str, tests: Sequence[str], setup: str, entry: Sequence[str], limits: SandboxLimits) -> Work[Verdict]:
    nonce = secrets.token_hex(16)
    common = {"stdin": "", "files": {}}
    asked = {
        **common,
        "kind": "callee",
        "code": code,
        "limits": asdict(replace(limits, seconds=limits.seconds + GRACE)),
    }
    judged = {
        **common,
        "kind": "judge",
        "tests": list(tests),
        "setup": setup,
        "entry": list(entry),
        "nonce": nonce,
        "limits": asdict(limits),
    }

    def work(ticket: Ticket) -> Verdict:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            code_call, judge_call = ticket.call(asked, theirs), ticket.call(judged, ours)
        judge = judge_call.result()
        code_call.finish()
        return _verdict(len(tests), nonce, judge, code_call.result())

    return work


def _verdict(count: int, nonce: str, judge: Ran, code: Ran) -> Verdict:
    """Read the judge's records: a test without one has failed."""
    unjudged = f"not judged: the tests ended as {judge.outcome}"
    if judge.outcome is Outcome.LOST:
        unjudged += f" ({judge.detail})"
    passed, reasons = [False] * count, [unjudged] * count
    for record in judge.records:
        mark, _, text = record.partition(" ")
        if mark == nonce:
            try:
                place, good, why = json.loads(text)
            except ValueError:
                continue  # cut off: the records are longer than is kept of them
            passed[place], reasons[place] = good is True, why
    return Verdict(passed=tuple(passed), reasons=tuple(reasons), judge=judge, code=code)
