"""Runs the collected tests in forks of this process, a file at a time (``pytest --workers 4``).

A fork finds imported what was collected, and all forks share the process in which commands start (``forked.py``):
pytest-xdist imports torch, transformers and DeepSpeed in each worker twice.
"""

import multiprocessing
import os
from collections.abc import Sequence
from itertools import groupby, pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import pytest


def start_the_process_of_commands() -> None:
    """Start it beside the collection, and keep forks from starting one: they ask whether *their* child runs."""
    from command import ENVIRONMENT
    from forked import command_server

    command_server(tuple(sorted(ENVIRONMENT.items())))
    servers = (multiprocessing.forkserver, multiprocessing.forkserver._forkserver)  # type: ignore[attr-defined]  # private
    for asked in servers:
        asked.ensure_running = lambda: None


def run(session: pytest.Session, workers: int) -> None:
    """Run the items of the session in so many forks, each of which takes the next file when it has run one.

    If this process is interrupted or killed, each fork ends after its test.
    """
    if workers < 1:
        raise pytest.UsageError(f"--workers: found {workers}, give at least 1, or 0 to run the files in this process")
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one, which this process removes
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    todo, numbers = os.pipe()
    for number in range(len(files)):
        os.write(numbers, number.to_bytes(2))
    os.close(numbers)
    context, running = multiprocessing.get_context("fork"), dict[Connection, BaseProcess]()
    try:
        for _ in range(min(workers, len(files))):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(session, files, todo, sender, (*running, receiver)))
            process.start()
            sender.close()
            running[receiver] = process
        _listen(session, running, todo)
    finally:
        os.read(todo, 1 << 16)  # no further file
        for receiver in running:
            receiver.close()
        os.close(todo)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


def _listen(session: pytest.Session, running: dict[Connection, BaseProcess], todo: int) -> None:
    """Hand on the reports of the workers until all have ended; a worker that has ended is removed from ``running``."""
    began, left = dict.fromkeys(running, "its first test"), len(session.items)
    while running:
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            try:
                kind, value = ready.recv()
            except (EOFError, OSError):  # OSError: within a message
                process = running.pop(ready)
                process.join()
                session.shouldfail = f"a worker ended with exit code {process.exitcode} in {began[ready]}"
                continue
            if kind == "report":
                report = session.config.hook.pytest_report_from_serializable(config=session.config, data=value)
                session.config.hook.pytest_runtest_logreport(report=report)
            elif kind == "began":
                began[ready] = value
                left -= 1
            else:
                running.pop(ready).join()
        if session.shouldfail:
            os.read(todo, 1 << 16)  # no further file
    if session.shouldfail:
        session.shouldfail = f"{session.shouldfail}; {left} of {len(session.items)} tests did not run"


class _Sender:
    """Sends to the process that prints what a worker's tests report."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._connection.send(("began", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def _work(
    session: pytest.Session,
    files: Sequence[Sequence[pytest.Item]],
    todo: int,
    connection: Connection,
    receivers: Sequence[Connection],
) -> None:
    """Run files until there are none; ``receivers`` are the ends that the process that prints alone keeps open."""
    for receiver in receivers:
        receiver.close()
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Sender(session.config, connection))
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files have one position in all forks
    capture.start_global_capturing()
    try:
        while not session.shouldfail and (number := os.read(todo, 2)):
            for item, following in pairwise([*files[int.from_bytes(number)], None]):
                assert item is not None
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    break
        connection.send(("ended", None))
    except (KeyboardInterrupt, BrokenPipeError):  # BrokenPipeError: the process that prints was interrupted or killed
        session._setupstate.teardown_exact(None)  # the fixtures of the test that ran, such as servers
    finally:
        capture.stop_global_capturing()
