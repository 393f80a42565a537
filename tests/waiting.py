"""Waits for what another thread or process is about to do: `from waiting import eventually`."""

import socket
import time
from collections.abc import Callable
from typing import Any

import psutil


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether a condition holds, now or soon; so many seconds pass only where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    """A port at which nothing listens yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Wait until a server listens."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    assert eventually(listens)


def connections(port: int) -> list[Any]:
    """Sockets of this process to a port of a server."""
    return [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port]
