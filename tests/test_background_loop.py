"""The background loop: results and errors reach the caller, cancellation reaches the work, closing never hangs."""

import asyncio
import threading
import time

import pytest

from condensegrpo.core.background_loop import BackgroundLoop, Watch
from condensegrpo.core.errors import RolloutError


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def fail() -> None:
    raise LookupError("no such key")


async def run_until_cancelled(started: threading.Event, cancelled: threading.Event) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()


def test_results_reach_threads_and_other_event_loops() -> None:
    with BackgroundLoop("test") as loop:
        futures = [loop.submit(double(number)) for number in range(3)]
        assert [future.result() for future in futures] == [0, 2, 4]
        assert loop.run(double(4)) == 8
        assert asyncio.run(loop.call(double(5))) == 10
        assert asyncio.run(loop.call(double(6))) == 12  # a second event loop, one after another


def test_an_exception_of_the_work_is_raised_to_its_caller_and_the_loop_goes_on() -> None:
    with BackgroundLoop("test") as loop:
        with pytest.raises(LookupError, match="no such key"):
            loop.submit(fail()).result()
        with pytest.raises(LookupError, match="no such key"):
            loop.run(fail())
        with pytest.raises(LookupError, match="no such key"):
            asyncio.run(loop.call(fail()))
        assert loop.run(double(1)) == 2


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_ends_an_event_loop_ends_its_caller_alone(error: type[BaseException]) -> None:
    async def leave() -> None:
        raise error

    async def leave_in_a_task() -> None:
        await asyncio.gather(leave(), double(1))

    with BackgroundLoop("test") as loop:
        waiting = loop.submit(asyncio.sleep(0.05, "done"))
        for work in (leave, leave_in_a_task):
            with pytest.raises(error):
                loop.submit(work()).result(60)
        assert loop.submit(double(1)).result(60) == 2
        assert waiting.result(60) == "done"


def test_cancelling_a_caller_cancels_its_work() -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def cancel_the_call(loop: BackgroundLoop) -> None:
        call = asyncio.create_task(loop.call(run_until_cancelled(started, cancelled)))
        await asyncio.to_thread(started.wait, 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with BackgroundLoop("test") as loop:
        asyncio.run(cancel_the_call(loop))
        assert cancelled.wait(60)
        assert loop.run(double(1)) == 2


def test_closing_cancels_running_work_and_waits_for_its_cleanup() -> None:
    started, cancelled = threading.Event(), threading.Event()
    with BackgroundLoop("test") as loop:
        future = loop.submit(run_until_cancelled(started, cancelled))
        assert started.wait(60)
    assert cancelled.is_set()
    assert future.cancelled()
    assert "test" not in [thread.name for thread in threading.enumerate()]
    loop.close()  # a second time


def test_closing_a_blocked_loop_returns_after_its_time_limit() -> None:
    release = threading.Event()
    started = threading.Event()

    async def block() -> None:
        started.set()
        release.wait(30)

    loop = BackgroundLoop("test", close_seconds=0.05)
    loop.submit(block())
    assert started.wait(60)
    begin = time.monotonic()
    loop.close()
    assert time.monotonic() - begin < 10
    release.set()


def test_a_loop_that_was_finished_may_be_finished_again() -> None:
    results = list[int]()

    async def last() -> None:
        results.append(await double(4))

    loop = BackgroundLoop("test")
    loop.finish(last())
    loop.finish(last())
    assert results == [8]


def test_a_closed_loop_refuses_work() -> None:
    loop = BackgroundLoop("test")
    loop.close()
    with pytest.raises(RuntimeError, match="starting a coroutine: the background loop 'test' was closed"):
        loop.submit(double(1))


# --- the watchdog


async def hold(release: threading.Event, seconds: float = 60) -> str:
    release.wait(seconds)
    return "done"


def test_what_blocks_the_loop_is_reported_and_a_loop_that_goes_on_is_left_alone() -> None:
    reports, release = list[str](), threading.Event()

    def report(text: str) -> None:
        reports.append(text)
        release.set()

    with BackgroundLoop("test", watch=Watch(0.2, report)) as loop:
        assert loop.run(hold(release)) == "done"
        assert loop.run(double(1)) == 2
    (text,) = reports
    where = f"tests/test_background_loop.py:{hold.__code__.co_firstlineno + 1}"
    assert text.startswith(f"the event loop 'test' has been blocked by {where} for 0.2 seconds.")
    assert "release.wait(seconds)" in text  # of the stack


def test_a_loop_that_stays_blocked_fails_what_runs_on_it_and_what_is_started_on_it() -> None:
    reports, release = list[str](), threading.Event()
    with BackgroundLoop("test", close_seconds=0.1, watch=Watch(0.1, reports.append)) as loop:
        with pytest.raises(RolloutError, match=r"has been blocked by tests/test_background_loop.py:\d+ for 0.5 sec"):
            loop.run(hold(release))
        with pytest.raises(RolloutError, match=r"Put blocking code into asyncio.to_thread, or raise rollout.limits"):
            loop.run(double(1))
    release.set()
    assert len(reports) == 1
