"""The worker's side: builds players as the rank asks for them, and plays the groups that it is sent."""

import asyncio
import os
import select
import socket
import threading
from collections.abc import Callable
from functools import partial

from condensegrpo.core.errors import CondenseError, RolloutError
from condensegrpo.core.failures import failure_of
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.thread_call import awaited_in_thread
from condensegrpo.episodes.player import COUNT_SECONDS, GroupPlayer
from condensegrpo.episodes.workers.connection import Connection
from condensegrpo.episodes.workers.messages import (
    PLAIN_DATA,
    Answer,
    Broken,
    Cancel,
    Close,
    Finished,
    Message,
    Play,
    PlayReport,
    Setup,
)
from condensegrpo.episodes.workers.remote_sampler import RemoteSampler

OpenPlayer = Callable[[object, RemoteSampler], GroupPlayer]


def serve(end: socket.socket, open_player: OpenPlayer) -> None:
    """Serve a rank until it says ``Close``. If it ends without, this process ends at once.

    Args:
        open_player: makes a player of the settings of a ``Setup``.
    """
    threading.Thread(target=_end_with_rank, args=(end,), daemon=True).start()
    asyncio.run(_Worker(end, open_player).run())


def _end_with_rank(end: socket.socket) -> None:
    """Wait until the other end is closed. A thread of its own: a plug-in may block the event loop."""
    poll = select.poll()
    poll.register(end, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


class _Worker:
    """What a worker holds: its players by key, and the plays under way."""

    def __init__(self, end: socket.socket, open_player: OpenPlayer) -> None:
        self._connection = Connection(end)
        self._open_player = open_player
        self._sampler = RemoteSampler(self._connection.send)
        self._players: dict[int, GroupPlayer] = {}
        self._plays: dict[int, asyncio.Task[None]] = {}
        self._closing = asyncio.Event()

    async def run(self) -> None:
        self._connection.attach(self._received, on_unreadable=self._unreadable, on_end=self._closing.set)
        await self._closing.wait()

    def _received(self, message: Message) -> None:
        match message:
            case Answer(number, value):
                self._sampler.answered(number, value)
            case Setup(key, settings):
                self._set_up(key, settings)
            case Play():
                self._sampler.version = message.version
                self._plays[message.number] = asyncio.create_task(self._play(message))
            case Cancel(number) if number in self._plays:
                self._plays.pop(number).cancel()
            case Close():
                self._closing.set()

    def _unreadable(self, error: Exception) -> None:
        reading = f"reading problems in a rollout worker: {failure_of('', error)}"
        self._connection.send(Broken(RolloutError(f"{reading}. {PLAIN_DATA}.")))

    def _set_up(self, key: int, settings: object) -> None:
        try:
            self._players[key] = self._open_player(settings, self._sampler)
        except CondenseError as error:
            self._connection.send(Broken(error))
        except BaseException as error:  # the boundary to the constructors of plug-ins, which may call sys.exit()
            self._connection.send(Broken(RolloutError(f"setting up a rollout worker: {failure_of('', error)}.")))

    async def _play(self, play: Play) -> None:
        if play.key not in self._players:  # it could not be set up
            return
        player = self._players[play.key]
        before = player.condensing_seconds
        try:
            await player.play(
                play.batch,
                samples=play.samples,
                run_seed=play.run_seed,
                step=play.step,
                on_scored=partial(self._finished, play.number),
            )
            counts = await awaited_in_thread(player.counts, name="the counts of the condenser", seconds=COUNT_SECONDS)
            self._connection.send(PlayReport(play.number, player.condensing_seconds - before, counts))
        except Exception as error:  # a fault of the engine, or a trajectory that cannot be pickled
            self._connection.send(Broken(RolloutError(f"playing in a rollout worker: {failure_of('', error)}.")))
        finally:
            self._plays.pop(play.number, None)

    def _finished(self, play: int, scored: ScoredTrajectory) -> None:
        self._connection.send(Finished(play, scored))
        self._sampler.forget(scored.trajectory.id)
