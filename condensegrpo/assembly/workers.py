"""Plays the groups of a run or an evaluation: in this process, or for samplers that are reached by URL in workers.

    rank ── WorkerBatch: configuration, client of the sampler, groups ─▶ worker: components and HTTP client of its own
         ◀── each ScoredTrajectory, then WorkerReport, or the CondenseError that ends the batch ──

Messages are pickles. Trajectories do not depend on the number of workers: their random streams are named by what they
are. A worker that dies ends the batch. Workers start when a batch first needs them and end with the rank.
"""

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

from condensegrpo.assembly.build import build_components
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.runtime import renderer_for, trajectory_engine
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop, Watch
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import CondenseError, RolloutError
from condensegrpo.core.failures import failure_of
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.wording import plural
from condensegrpo.episodes.group import ProblemGroup
from condensegrpo.episodes.player import LocalPlayer, OnScored
from condensegrpo.storage.media import MediaFolder

_LOG = logging.getLogger(__name__)
# A fresh interpreter: ``multiprocessing`` would import the main module of the rank, and a script would run again.
PROGRAM = "import sys; sys.path[:] = {path!r}; from condensegrpo.assembly.workers import work; work({end})"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # many workers
PLAIN_DATA = "Make Problem.data of plain values, or set rollout.workers.processes=0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerSettings:
    """The settings that a player is built from."""

    config: RunConfig
    source: str  # folder or Hub id of the policy's tokenizer and chat template
    temperature: float
    media: MediaFolder | None = None  # of the pictures of prompts


def local_player(
    components: Components,
    settings: PlayerSettings,
    sampler: Sampler,
    *,
    writers: Mapping[str, Sampler] = {},
) -> LocalPlayer:
    """The player of this process; ``writers`` as of ``trajectory_engine``."""
    renderer = renderer_for(components, settings.source, settings.media)
    engine = trajectory_engine(
        components, renderer=renderer, sampler=sampler, temperature=settings.temperature, writers=writers
    )
    return LocalPlayer(environment=components.task.environment, engine=engine, reward=components.reward)


class WorkerBatch(NamedTuple):
    """The groups that a worker plays; see ``LocalPlayer.play``."""

    settings: PlayerSettings
    client: Callable[[], Sampler]  # of ``Sampler.client``
    groups: tuple[ProblemGroup, ...]
    samples: int
    run_seed: int
    step: int


class WorkerReport(NamedTuple):
    """The end of a batch."""

    condensing_seconds: float  # seconds that the condenser was at work
    counts: Mapping[str, float]  # of the condenser


class RolloutPlayers:
    """Makes the players of a process that holds a sampler. Its workers are started when a batch first needs them."""

    def __init__(
        self,
        sampler: Sampler,
        source: str,
        media: MediaFolder | None = None,
        *,
        writers: Mapping[str, Sampler] = {},
    ) -> None:
        """Start nothing yet.

        Args:
            source: the folder or Hub id whose tokenizer and chat template the policy has.
            media: where the pictures of prompts are stored; the sampler reads them there.
            writers: as of ``trajectory_engine``; they are closed with the workers.
        """
        self.sampler, self.source, self._media, self._writers = sampler, source, media, writers
        self._pool = WorkerPool()

    def player(self, components: Components, *, temperature: float) -> "GroupPlayer":
        """A player of some components."""
        settings = PlayerSettings(
            config=components.config, source=self.source, temperature=temperature, media=self._media
        )
        if components.config.rollout.workers.processes and overrides(self.sampler, Sampler.client):
            return SharingPlayer(pool=self._pool, sampler=self.sampler, settings=settings)
        return local_player(components, settings, self.sampler, writers=self._writers)

    def close(self) -> None:
        """End the workers and the writers. May be called twice."""
        self._pool.close()
        for writer in self._writers.values():
            writer.close()


@dataclass(slots=True, kw_only=True)
class SharingPlayer:
    """Plays batches in worker processes."""

    pool: "WorkerPool"
    sampler: Sampler  # reached by URL
    settings: PlayerSettings
    condensing_seconds: float = 0.0  # that the condensers were at work; of several workers those of the longest
    counted: Counter[str] = field(default_factory=Counter)  # by the condensers of the workers

    async def play(
        self, batch: Sequence[ProblemGroup], *, samples: int, run_seed: int, step: int, on_scored: OnScored
    ) -> tuple[ScoredTrajectory, ...]:
        """``samples`` scored trajectories of every group of a batch; see ``LocalPlayer.play``."""
        sent = WorkerBatch(self.settings, self.sampler.client(), tuple(batch), samples, run_seed, step)
        scored, reports = await self.pool.play(sent, on_scored)
        # they condense at the same time
        self.condensing_seconds += max((report.condensing_seconds for report in reports), default=0.0)
        for report in reports:
            self.counted.update(report.counts)
        return scored

    def counts(self) -> Mapping[str, float]:
        """The counts of the condensers since the last call."""
        counted, self.counted = self.counted, Counter()
        return counted


GroupPlayer = LocalPlayer | SharingPlayer  # plays and scores groups


class WorkerPool:
    """The workers of a rank. It plays one batch at a time."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._workers: list[_Worker] = []
        self._playing = asyncio.Lock()

    async def play(
        self, batch: WorkerBatch, on_scored: OnScored
    ) -> tuple[tuple[ScoredTrajectory, ...], tuple[WorkerReport, ...]]:
        """Play a batch after those that are played; returns the trajectories in its order.

        Workers that still play are ended if it fails or is cancelled.
        """
        if not batch.groups:  # of an evaluation with fewer problems than ranks
            return (), ()
        scored: dict[str, ScoredTrajectory] = {}
        workers, recording = min(batch.settings.config.rollout.workers.processes, len(batch.groups)), Lock()

        def record(each: ScoredTrajectory) -> None:
            with recording:
                scored[each.trajectory.id] = each
                on_scored(each)

        async with self._playing:
            self._workers = [worker for worker in self._workers if worker.process.poll() is None]
            self._workers += [_Worker() for _ in range(workers - len(self._workers))]
            threads, run = ThreadPoolExecutor(workers), asyncio.get_running_loop().run_in_executor
            shares = [batch._replace(groups=batch.groups[index::workers]) for index in range(workers)]
            playing = zip(self._workers, shares, strict=False)  # an earlier batch may have had more workers
            try:
                reports = await asyncio.gather(*(run(threads, worker.play, share, record) for worker, share in playing))
            finally:
                for worker in self._workers:
                    if worker.playing:
                        worker.end()
                threads.shutdown()
        ids = (f"{group.id}/{sample}" for group in batch.groups for sample in range(batch.samples))
        return tuple(scored[each] for each in ids), tuple(reports)

    def close(self) -> None:
        """End all workers. May be called twice."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()


class _Worker:
    """A worker process, as the rank sees it."""

    def __init__(self) -> None:
        self.playing = False
        self._connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(path=sys.path, end=theirs.fileno())],
                env={**os.environ, **THREADS},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal reaches the rank alone
            )

    def play(self, batch: WorkerBatch, record: OnScored) -> WorkerReport:
        """Play a batch: called in a thread, which ``end`` ends."""
        try:
            data = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # the boundary to a task's data
            sending = f"sending problems to a rollout worker: {failure_of('', error)}"
            raise RolloutError(f"{sending}. {PLAIN_DATA}.") from error
        self.playing = True
        try:
            self._connection.send_bytes(data)
            while isinstance(message := pickle.loads(self._connection.recv_bytes()), ScoredTrajectory):
                record(message)
        except (EOFError, OSError) as error:
            raise RolloutError(f"playing {plural(len(batch.groups), 'group')} in a worker: {self.end()}") from error
        self.playing = False
        if isinstance(message, CondenseError):
            raise message
        assert isinstance(message, WorkerReport)
        return message

    def end(self) -> str:
        """End the process, with those that it started; returns how it ended, and what to do."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        process = f"process {self.process.pid}"
        if code >= 0:
            return f"{process} ended itself with exit code {code}: a plug-in did it. Raise an exception there instead."
        why = "the kernel does when memory runs out" if code == -signal.SIGKILL else "a fault in C code does"
        cure = "Lower rollout.workers.processes or set it to 0, and resume the run"
        return f"{process} was killed by signal {-code} ({signal.strsignal(-code)}), as {why}. {cure}."


def work(end: int) -> None:
    """The program of a worker: play batches until the rank ends.

    Args:
        end: the descriptor of its end of the connection.
    """
    os.set_inheritable(end, False)
    for number in (signal.SIGINT, signal.SIGTERM):  # SLURM sends it to all processes: the rank decides when to end
        signal.signal(number, lambda *_: None)
    connection, batches = Connection(end), SimpleQueue[bytes]()
    Thread(target=_receive, args=(connection, batches), daemon=True).start()
    player = _BatchPlayer(connection)
    while True:
        connection.send_bytes(pickle.dumps(player.outcome(batches.get())))


def _receive(connection: Connection, batches: "SimpleQueue[bytes]") -> None:
    """Receive batches; the worker ends with the rank, and with it the processes of its tools."""
    with suppress(EOFError, OSError):
        while True:
            batches.put(connection.recv_bytes())
    os.killpg(0, signal.SIGKILL)


class _BatchPlayer:
    """Plays batches in a worker. It keeps the player of each configuration; a new one shares parts with the last."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._players: list[tuple[PlayerSettings, Components, LocalPlayer]] = []

    def outcome(self, data: bytes) -> WorkerReport | CondenseError:
        """Play a pickled batch and send its trajectories."""
        doing = "reading problems in"
        try:
            batch: WorkerBatch = pickle.loads(data)
            doing = "setting up"
            watch = Watch(batch.settings.config.rollout.limits.turn_seconds, _LOG.warning)
            opening = BackgroundLoop("rollout", close_seconds=PLUGIN_SECONDS, watch=watch)
            with closing(batch.client()) as sampler, opening as loop:
                player = self._player(batch.settings, sampler)
                doing = "playing in"
                before = player.condensing_seconds
                loop.run(
                    player.play(
                        batch.groups,
                        samples=batch.samples,
                        run_seed=batch.run_seed,
                        step=batch.step,
                        on_scored=lambda each: self._connection.send_bytes(pickle.dumps(each, pickle.HIGHEST_PROTOCOL)),
                    )
                )
            return WorkerReport(player.condensing_seconds - before, player.counts())
        except CondenseError as error:
            return error
        except BaseException as error:  # the boundary to plug-ins, which may call sys.exit()
            advice = f" {PLAIN_DATA}." if doing == "reading problems in" else ""
            return RolloutError(f"{doing} a rollout worker: {failure_of('', error)}.{advice}")

    def _player(self, settings: PlayerSettings, sampler: Sampler) -> LocalPlayer:
        for known, _, player in self._players:
            if known == settings:
                return replace(player, engine=replace(player.engine, sampler=sampler))
        components = _components(settings.config, self._players[-1][1] if self._players else None)
        player = local_player(components, settings, sampler)
        self._players.append((settings, components, player))
        return player


def _components(config: RunConfig, last: Components | None) -> Components:
    """The components of a worker, with its share of the sandbox's calls; see ``build_components`` for ``last``."""
    share = -(-(config.sandbox.parallel or 2 * len(os.sched_getaffinity(0))) // config.rollout.workers.processes)
    sandbox = config.sandbox.model_copy(update={"parallel": share})
    components = build_components(config.model_copy(update={"sandbox": sandbox}), last)
    is_new = last is None or last.task is not components.task
    if is_new and not type(components.task).__module__.startswith("condensegrpo."):
        components.problems("train")  # a user's environments may need what its task keeps of them
        components.problems("eval")
    return components
