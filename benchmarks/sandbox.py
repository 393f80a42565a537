"""What the sandbox costs: the time of one call, 64 calls at once against their CPU time, and a grading.

    python benchmarks/sandbox.py [ISOLATION]

Wall clock beside the CPU time of the calls themselves; on a busy machine the wall clock is the less reliable figure.
"""

import asyncio
import os
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

from tables import show

from condensegrpo.sandbox.grade import grade
from condensegrpo.sandbox.sandbox import Sandbox

CALLS, AT_ONCE, WORK = 200, 64, 1_000_000
CODE = f"x = 0\nfor n in range({WORK}): x += n * n\nprint(x)"


async def median(call: Callable[[], Awaitable[object]], count: int) -> tuple[float, float]:
    """Median and 95th percentile of the time of a call, in milliseconds, one after the other."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times), statistics.quantiles(times, n=20)[-1]


def cpu_of_the_code() -> float:
    """CPU seconds of the same code in this process."""
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    exec(compile(CODE.replace("print(x)", ""), "<work>", "exec"), {})
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - begin


async def main() -> None:
    """Measure and print."""
    isolation = sys.argv[1] if len(sys.argv) > 1 else "auto"
    cores = len(os.sched_getaffinity(0))
    with Sandbox(isolation=isolation) as sandbox:
        begin = time.perf_counter()
        backend = sandbox.open()
        opened = 1000 * (time.perf_counter() - begin)
        lines = [("open, probing included", f"{opened:.0f} ms", "")]
        middle, late = await median(lambda: sandbox.run_python("print(1)"), CALLS)
        lines.append((f"print(1), {CALLS} calls", f"{middle:.1f} ms", f"{late:.1f} ms"))
        test = ["assert add(1, 2) == 3"]
        grading = partial(asyncio.to_thread, grade, sandbox, "def add(a, b): return a + b", test)
        middle, late = await median(grading, CALLS // 4)
        lines.append((f"grading by one assert, {CALLS // 4} times", f"{middle:.1f} ms", f"{late:.1f} ms"))
        show(f"{backend}, load of the machine {os.getloadavg()[0]:.1f}", ("", "median", "95 % within"), lines)
        plain = cpu_of_the_code()
        begin = time.perf_counter()
        results = await asyncio.gather(*(sandbox.run_python(CODE) for _ in range(AT_ONCE)))
        wall = time.perf_counter() - begin
        cpu = sum(result.cpu_seconds for result in results)
        assert all(result.outcome == "finished" for result in results)
        print(
            f"{AT_ONCE} calls at once on {cores} cores: {wall:.2f} s, {wall / cpu:.2f} times the {cpu:.2f} s of CPU "
            f"time that they took; the same code outside takes {AT_ONCE * plain:.2f} s of CPU time"
        )


if __name__ == "__main__":
    asyncio.run(main())
