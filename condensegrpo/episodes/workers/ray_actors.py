"""Workers as Ray actors, on any machine of a Ray cluster. Ray starts them, carries the messages and sees them end.

Every machine needs this package, the plug-ins and the files of the configuration at the same places.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.episodes.workers.worker import Worker

START_SECONDS = 600.0  # a cluster may start machines for the first actors
REPLACE_SECONDS = 20.0  # that a batch waits for actors in place of lost ones; it goes on without those that need longer


def check_ray_installed() -> None:
    """Raise ``ConfigError`` where Ray is missing."""
    if find_spec("ray") is None:
        raise ConfigError(
            "setting up rollout.workers.ray: Ray is not installed. In a clone of the repository: "
            "pip install -e '.[ray]'; or set rollout.workers.processes instead."
        )


class _Actor:
    """A worker as Ray runs it."""

    def __init__(self, opener: str, path: Sequence[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]
        self._messages = asyncio.Queue[bytes]()
        self._worker = Worker(resolve_name(opener)(), self._messages.put_nowait)

    async def receive(self, data: bytes) -> None:
        """Receive a pickled message of the rank."""
        self._worker.receive(data)

    async def messages(self) -> list[bytes]:
        """Pickled messages to the rank, as soon as there are some."""
        messages = [await self._messages.get()]
        while not self._messages.empty():
            messages.append(self._messages.get_nowait())
        return messages


class _RayHandle:
    """A ``WorkerHandle`` of an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:  # noqa: ANN401  Ray is untyped
        self._ray, self._actor = ray, actor
        self._requested = actor.messages.remote()
        self._how = "by request"

    async def messages(self, play: bytes) -> AsyncGenerator[bytes, None]:
        self.send(play)
        while True:
            try:
                messages = await self._requested
            except self._ray.exceptions.RayError as error:
                self._how = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
                return
            self._requested = self._actor.messages.remote()
            for data in messages:
                yield data

    def send(self, data: bytes) -> None:
        self._actor.receive.remote(data)

    def is_idle(self) -> bool:
        return not self._ray.wait([self._requested], timeout=0)[0]

    def end(self) -> str:
        self._ray.kill(self._actor)
        lost = "its unfinished trajectories are lost. Ray's log has the exit code"
        return f"a Ray actor ended: {self._how}; {lost}"


class RayHost:
    """Starts workers as Ray actors."""

    def __init__(self, opener: str) -> None:
        """Join the cluster that ``RAY_ADDRESS`` names, or start one on this machine.

        Args:
            opener: a function as ``module:name``, called in each actor; returns what opens players there.
        """
        check_ray_installed()
        import ray

        self._ray, self._opener = ray, opener
        self._actors: list[Any] = []
        self._waiting: list[Any] = []  # those of them that are not up yet
        self._started = False
        try:
            self._joined = not ray.is_initialized()
            ray.init(include_dashboard=False, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"setting up rollout.workers.ray: {error}. Correct RAY_ADDRESS, or leave it out."
            ) from error

    def start(self, number: int) -> Sequence[_RayHandle]:
        """Start some workers. The first call waits until all of them are up.

        Later calls replace workers that were lost, perhaps with their machine. Actors that find no free CPU soon stay
        requested: a later call returns them if the cluster has room by then.
        """
        actor = self._ray.remote(num_cpus=1)(_Actor)
        added = [actor.remote(self._opener, sys.path) for _ in range(number - len(self._waiting))]
        self._actors += added
        self._waiting += added
        up = {each.__ray_ready__.remote(): each for each in self._waiting[:number]}
        seconds = REPLACE_SECONDS if self._started else START_SECONDS
        ready, missing = self._ray.wait(list(up), num_returns=number, timeout=seconds)
        try:
            self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            raise RolloutError(f"starting {number} Ray actors: {error}.") from error
        if missing and not self._started:
            raise RolloutError(
                f"starting {number} Ray actors: {len(missing)} of them found no free CPU within {seconds:g} seconds. "
                f"Lower rollout.workers.ray to the CPUs of the cluster."
            )
        self._started = True
        for each in ready:
            self._waiting.remove(up[each])
        return [_RayHandle(self._ray, up[each]) for each in ready]

    def close(self) -> None:
        """End all workers, and leave the cluster if ``__init__`` joined it. May be called twice."""
        actors, self._actors, self._waiting = self._actors, [], []
        for actor in actors:
            self._ray.kill(actor)
        if self._joined:
            self._joined = False
            self._ray.shutdown()
