"""Workers as Ray actors, on any machine of a Ray cluster. Ray starts them and sees them end; messages travel over TCP.

Every machine needs this package, the plug-ins and the files of the configuration at the same places. Whoever connects
must know a secret, which an actor gets through Ray: what is received is unpickled.
"""

import hmac
import secrets
import socket
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.episodes.workers.worker import StartedWorker

SECRET_BYTES = 32
START_SECONDS = 600.0  # a cluster may start machines for the actors
END_SECONDS = 5.0


def check_ray_installed() -> None:
    """Raise ``ConfigError`` where Ray is missing."""
    if find_spec("ray") is None:
        raise ConfigError(
            "setting up rollout.workers.ray: Ray is not installed. In a clone of the repository: "
            "pip install -e '.[ray]'; or set rollout.workers.processes instead."
        )


class RayHost:
    """Starts workers by a function that serves one end of a connection."""

    def __init__(self, work: str) -> None:
        """Join the cluster that ``RAY_ADDRESS`` names, or start one on this machine.

        Args:
            work: the function, as ``module:name``.

        Raises:
            ConfigError: Ray is not installed, or there is no such cluster.
        """
        check_ray_installed()
        import ray

        self._ray, self._work = ray, work
        self._actors: list[Any] = []
        try:
            self._joined = not ray.is_initialized()
            ray.init(include_dashboard=False, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"setting up rollout.workers.ray: {error}. Correct RAY_ADDRESS, or leave it out."
            ) from error

    def start(self, number: int) -> Sequence[StartedWorker]:
        """Start some workers, and wait until they have connected.

        Raises:
            RolloutError: the cluster has no room for one, or it cannot reach this machine.
        """
        secret = secrets.token_bytes(SECRET_BYTES)
        actor = self._ray.remote(num_cpus=1)(_Actor)
        with socket.create_server(("", 0)) as server:
            address = (self._ray.util.get_node_ip_address(), server.getsockname()[1])
            actors = [actor.remote() for _ in range(number)]
            self._actors += actors
            results = [
                each.work.remote(self._work, address, secret, number, sys.path) for number, each in enumerate(actors)
            ]
            server.settimeout(START_SECONDS)
            ends = dict[int, socket.socket]()
            while len(ends) < number:
                try:
                    place, end = _accepted(server, secret)
                except TimeoutError as error:
                    raise RolloutError(
                        f"starting {number} Ray actors: {len(ends)} of them connected to {address[0]}:{address[1]} in "
                        f"{START_SECONDS:g} seconds. Lower rollout.workers.ray to the CPUs of the cluster, and let its "
                        f"machines connect to this one."
                    ) from error
                ends |= {} if end is None else {place: end}
        return [
            StartedWorker(ends[place], partial(self._ended, each, results[place])) for place, each in enumerate(actors)
        ]

    def close(self) -> None:
        """End all workers at once, and leave the cluster if ``__init__`` joined it. May be called twice."""
        actors, self._actors = self._actors, []
        for actor in actors:
            self._ray.kill(actor)
        if self._joined:
            self._joined = False
            self._ray.shutdown()

    def _ended(self, actor: Any, result: Any) -> str:  # noqa: ANN401  Ray's handles are untyped
        """End a worker, and say how it ended."""
        try:
            self._ray.get(result, timeout=END_SECONDS)
            how = "it returned"
        except self._ray.exceptions.RayError as error:
            how = next(iter(str(error).strip().splitlines()), type(error).__name__)
        self._ray.kill(actor)
        return (
            f"a Ray actor ended: {how.rstrip('.')}; its unfinished trajectories are lost. Ray's log has the exit code"
        )


def _accepted(server: socket.socket, secret: bytes) -> tuple[int, socket.socket | None]:
    """The place of the actor that connects, and its connection; None if it does not know the secret."""
    end, _ = server.accept()
    end.settimeout(END_SECONDS)
    try:
        hello = end.recv(SECRET_BYTES + 4, socket.MSG_WAITALL)
    except OSError:
        hello = b""
    if not hmac.compare_digest(hello[:SECRET_BYTES], secret):
        end.close()
        return 0, None
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return int.from_bytes(hello[SECRET_BYTES:]), end


class _Actor:
    """What Ray runs."""

    def work(self, work: str, address: tuple[str, int], secret: bytes, place: int, path: Sequence[str]) -> None:
        """Connect to the rank and serve it."""
        sys.path += [folder for folder in path if folder not in sys.path]
        module, _, name = work.partition(":")
        function = getattr(import_module(module), name)
        end = socket.create_connection(address)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(secret + place.to_bytes(4))
        function(end)
