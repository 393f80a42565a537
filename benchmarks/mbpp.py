"""The solutions of MBPP, judged: in plain Python, in the sandbox, and in the sandbox with their bodies removed.

    python benchmarks/mbpp.py mbpp.jsonl [--isolation landlock]

Every solution that passes all of its tests (the challenge tests too) in plain Python must pass in the sandbox, and none
may pass once the body of the function under test is ``pass``. Exceptions are listed, and the exit status is then 1.
Plain Python runs the file's code with your rights: for files that you trust.
"""

import argparse
import ast
import asyncio
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from condensegrpo.sandbox.calls import SandboxLimits
from condensegrpo.sandbox.grade import CodeVerdict, grade
from condensegrpo.sandbox.sandbox import Sandbox
from condensegrpo.storage.rows import read_rows
from condensegrpo.tasks.mbpp import entry_points

SECONDS = 60  # of the wall clock; the slowest takes 2.5 s of CPU time


@dataclass(frozen=True)
class Solution:
    """One row."""

    number: int
    code: str
    tests: tuple[str, ...]
    setup: str
    entry: tuple[str, ...]


def read_solution(row: Mapping[str, Any]) -> Solution:
    """A row with all its tests."""
    tests = (*row["test_list"], *(row.get("challenge_test_list") or ()))
    setup = row.get("test_setup_code") or ""
    return Solution(row["task_id"], row["code"], tests, setup, entry_points(row["code"], [*tests, setup]))


def passes_plainly(solution: Solution) -> bool:
    """Whether code and tests run to their end in a fork of this process."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        nothing = os.open(os.devnull, os.O_RDWR)
        for end in range(3):
            os.dup2(nothing, end)
        status = 1
        try:
            exec(
                compile("\n".join((solution.code, solution.setup, *solution.tests)), "solution", "exec"),
                {"__name__": "solution"},
            )
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def without_body(solution: Solution) -> str:
    """The code with ``pass`` in place of what the functions under test do."""
    tree = ast.parse(solution.code)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in solution.entry:
            node.body = [ast.Pass()]
    return ast.unparse(tree)


async def judged(sandbox: Sandbox, solutions: Sequence[Solution], codes: Sequence[str]) -> list[CodeVerdict]:
    """The verdict of each."""
    calls = zip(solutions, codes, strict=True)
    grading = partial(asyncio.to_thread, grade, sandbox)
    return await asyncio.gather(
        *(grading(code, solution.tests, setup=solution.setup, entry=solution.entry) for solution, code in calls)
    )


async def main() -> int:
    """Judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--isolation", default="auto")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of solutions that write '\w'
    solutions = [read_solution(row) for row in read_rows(given.data, split="train")]
    plain = [passes_plainly(solution) for solution in solutions]
    tests = sum(len(solution.tests) for solution in solutions)
    failing = [solution.number for solution, passed in zip(solutions, plain, strict=True) if not passed]
    print(f"{sum(plain)} of {len(solutions)} solutions pass in plain Python, {tests} tests; not: {failing}")
    bad = []
    with Sandbox(isolation=given.isolation, limits=SandboxLimits(seconds=SECONDS)) as sandbox:
        print(f"the sandbox uses {sandbox.open()}; load of the machine {os.getloadavg()[0]:.1f}")
        begin = time.perf_counter()
        verdicts = await judged(sandbox, solutions, [solution.code for solution in solutions])
        seconds = time.perf_counter() - begin
        empty = await judged(sandbox, solutions, [without_body(solution) for solution in solutions])
    for solution, plainly, verdict in zip(solutions, plain, verdicts, strict=True):
        if plainly and not verdict.all_passed:
            bad.append(solution.number)
            print(f"  {solution.number} passes in plain Python only: {next(filter(None, verdict.reasons))}")
        if verdict.all_passed and not plainly:
            print(f"  {solution.number} passes in the sandbox only")
    in_both = sum(verdict.all_passed and plainly for verdict, plainly in zip(verdicts, plain, strict=True))
    print(
        f"{sum(verdict.all_passed for verdict in verdicts)} pass in the sandbox, of those that pass in plain Python "
        f"{in_both}; {seconds:.0f} s for all"
    )
    hollow = [solution.number for solution, verdict in zip(solutions, empty, strict=True) if verdict.all_passed]
    print(f"{len(hollow)} pass with their bodies removed {hollow or ''}")
    return 1 if bad or hollow else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
