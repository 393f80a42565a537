"""The daemon thread: order, results and errors, calls that are skipped, and its end."""

import subprocess
import sys
import threading

import pytest

from condensegrpo.core.threads import DaemonThread


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


def test_the_outcome_of_a_call_is_awaited_within_a_time_limit() -> None:
    release, worker = threading.Event(), DaemonThread("mine")
    error = TimeoutError("of the call")

    def fail() -> None:
        raise error

    assert worker.outcome(lambda: 5, 60) == (5, None)
    assert worker.outcome(fail, 60) == (None, error)
    with pytest.raises(TimeoutError):
        worker.outcome(lambda: release.wait(60), 0.02)
    release.set()
    assert worker.outcome(lambda: 6, 60) == (6, None)
    worker.close()
    assert worker.join(60)


EXITS = """
import os
from condensegrpo.core.threads import DaemonThread

def fork():
    child = os.fork()
    if child == 0:
        os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

worker = DaemonThread("mine")
print(worker.submit(lambda: os._exit(7)).exception(60))
print(worker.submit(fork).result(60), flush=True)
os._exit(3)
"""


def test_os_exit_of_a_call_raises_and_ends_a_fork_or_another_thread_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, check=False, timeout=240)
    raised = "os._exit(7) would end the process without a message. Raise an exception instead."
    assert (done.returncode, done.stdout.splitlines()) == (3, [raised, "5"]), done.stderr
