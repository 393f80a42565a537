"""The daemon thread: order, results and errors, calls that are skipped, its end, and calls that never return."""

import asyncio
import threading

import pytest

from condensegrpo.core.threads import DaemonThread, to_thread


def test_calls_run_in_order_and_an_error_concerns_its_own_call() -> None:
    made: list[int] = []
    worker = DaemonThread("mine")

    def leave() -> None:
        raise SystemExit(3)

    first, second, third = (
        worker.submit(lambda: made.append(1)),
        worker.submit(leave),
        worker.submit(lambda: (made.append(3), "done")[1]),
    )
    worker.close()
    assert first.result(60) is None
    with pytest.raises(SystemExit):
        second.result(60)
    assert third.result(60) == "done"
    assert made == [1, 3]
    assert worker.join(60)


def test_a_cancelled_call_is_skipped_and_close_lets_those_that_wait_run() -> None:
    begun, go_on, made = threading.Event(), threading.Event(), list[str]()
    worker = DaemonThread("mine")

    def wait() -> None:
        begun.set()
        go_on.wait(60)

    worker.submit(wait)
    assert begun.wait(60)
    skipped, last = worker.submit(lambda: made.append("skipped")), worker.submit(lambda: made.append("last"))
    assert skipped.cancel()
    worker.close()
    assert worker.waiting == 2
    assert not worker.join(0.01)
    go_on.set()
    last.result(60)
    assert worker.join(60)
    assert made == ["last"]
    with pytest.raises(RuntimeError, match="the thread 'mine' was closed"):
        worker.submit(lambda: None)


def test_threads_serve_one_call_after_another_and_one_whose_call_is_late_serves_no_more() -> None:
    release, served = threading.Event(), list[threading.Thread]()

    def wait() -> None:
        served.append(threading.current_thread())
        release.wait(60)

    def fail() -> None:
        served.append(threading.current_thread())
        raise StopIteration(5)  # which no coroutine may raise

    async def run() -> str:
        with pytest.raises(RuntimeError, match=r"it raised StopIteration\(5,\)"):
            await to_thread(fail)
        with pytest.raises(TimeoutError) as late:
            async with asyncio.timeout(0.5):
                await to_thread(wait)
        served.append(await to_thread(threading.current_thread))
        return str(late.value.__cause__)

    where = asyncio.run(run())
    release.set()
    assert served[0] is served[1] is not served[2]
    assert where == f"tests/test_daemon_thread.py:{wait.__code__.co_firstlineno + 2}"
