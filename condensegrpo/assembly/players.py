"""Plays the groups of a run or an evaluation: in this process, or in workers, as ``rollout.workers`` says."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.runtime import renderer_for, trajectory_engine
from condensegrpo.assembly.scorers import frozen_model
from condensegrpo.attention.scorer import VersionedAttention
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.protocols.condenser import any_holds_model
from condensegrpo.core.protocols.sampler import RepliesToMessages, Sampler
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.wording import plural
from condensegrpo.episodes.group import ProblemGroup
from condensegrpo.episodes.player import LocalPlayer, OnScored
from condensegrpo.episodes.settings import Workers
from condensegrpo.episodes.workers.messages import Setup
from condensegrpo.episodes.workers.pool import WorkerHost, WorkerPool
from condensegrpo.episodes.workers.processes import ProcessHost
from condensegrpo.storage.media import MediaFolder

OPENER = "condensegrpo.assembly.worker:open_players"  # called in each worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerSettings:
    """What a worker builds its player from."""

    config: RunConfig
    source: str  # folder or Hub id of the policy's tokenizer and chat template
    temperature: float
    workers: int = 1  # among which the calls of the sandbox are divided
    media: MediaFolder | None = None  # of the pictures of prompts


def local_player(
    components: Components,
    settings: PlayerSettings,
    sampler: Sampler,
    *,
    writer: Sampler | None = None,
    model: Callable[[str], VersionedAttention] | None = None,
) -> LocalPlayer:
    """The player of this process; ``writer`` and ``model`` as of ``trajectory_engine``."""
    renderer = renderer_for(components, settings.source, settings.media)
    engine = trajectory_engine(
        components, renderer=renderer, sampler=sampler, temperature=settings.temperature, writer=writer, model=model
    )
    return LocalPlayer(environment=components.task.environment, engine=engine, reward=components.reward)


class RolloutPlayers:
    """Makes the players of a process that holds a sampler. Its workers are started when a batch first needs them."""

    def __init__(
        self,
        config: RunConfig,
        sampler: Sampler,
        source: str,
        media: MediaFolder | None = None,
        *,
        writer: Sampler | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            source: the folder or Hub id whose tokenizer and chat template the policy has.
            media: where the pictures of prompts are stored; the sampler reads them there.
            writer: as of ``trajectory_engine``; it is closed with the workers.
        """
        self.sampler, self.source, self._media, self._writer = sampler, source, media, writer
        self._pool = WorkerPool(_host(config.rollout.workers), sampler, partial(frozen_model, dtype=config.model.dtype))
        self._keys: dict[tuple[int, float], int] = {}  # of players, by the identity of their components
        self._known = list[Components]()  # kept, so that no other has the identity of one

    def player(self, components: Components, *, temperature: float) -> "SharingPlayer":
        """A player of some components."""
        self._known.append(components)
        settings = PlayerSettings(
            config=components.config, source=self.source, temperature=temperature, media=self._media
        )
        return SharingPlayer(
            local=local_player(components, settings, self.sampler, writer=self._writer),
            pool=self._pool,
            key=self._keys.setdefault((id(components), temperature), len(self._keys)),
            settings=settings,
            workers=partial(self._workers_of(components).number, cpus=rank_cpus()),
        )

    def _workers_of(self, components: Components) -> Workers:
        """Where trajectories are played. Workers ask for replies by token ids."""
        return Workers(processes=0) if isinstance(self.sampler, RepliesToMessages) else _workers_of(components)

    def close(self) -> None:
        """End the workers and the writer. May be called twice."""
        self._pool.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(slots=True, kw_only=True)
class SharingPlayer:
    """Plays a batch in as many workers as it is worth, or by itself."""

    local: LocalPlayer
    pool: WorkerPool
    key: int
    settings: PlayerSettings
    workers: Callable[..., int]  # of a batch of so many groups and trajectories
    condensing: float = 0.0  # of the workers
    counted: Counter[str] = field(default_factory=Counter)  # by the condensers of the workers
    failed: list[PluginFailure] = field(default_factory=list)  # to count

    async def play(
        self, batch: Sequence[ProblemGroup], *, samples: int, run_seed: int, step: int, on_scored: OnScored
    ) -> tuple[ScoredTrajectory, ...]:
        """``samples`` scored trajectories of every group of a batch; see ``collect``."""
        workers = self.workers(groups=len(batch), trajectories=len(batch) * samples)
        if not workers:
            return await self.local.play(batch, samples=samples, run_seed=run_seed, step=step, on_scored=on_scored)
        scored, reports = await self.pool.play(
            Setup(self.key, replace(self.settings, workers=workers)),
            batch,
            workers=workers,
            samples=samples,
            stream=(run_seed, step),
            turn_seconds=self.local.engine.limits.turn_seconds,
            on_scored=on_scored,
        )
        self.condensing += max((report.condensing for report in reports), default=0.0)  # they condense at the same time
        for report in reports:
            if isinstance(report.counts, PluginFailure):
                self.failed.append(report.counts)
            else:
                self.counted.update(report.counts)
        return scored

    def counts(self) -> Mapping[str, float]:
        """What the condensers counted since the last call."""
        local, (counted, failed) = self.local.counts(), (self.counted, self.failed)
        self.counted, self.failed = Counter(), []
        if failed:
            raise RuntimeError(f"in a rollout worker: {failed[0]}")
        return {name: local.get(name, 0.0) + counted.get(name, 0.0) for name in {**local, **counted}}

    @property
    def condensing_seconds(self) -> float:
        """Seconds that the condensers were at work; of several workers those of the longest."""
        return self.local.condensing_seconds + self.condensing


GroupPlayer = LocalPlayer | SharingPlayer  # plays and scores groups


def _host(workers: Workers) -> WorkerHost:
    if not workers.ray:
        return ProcessHost(OPENER)
    from condensegrpo.episodes.workers.ray_actors import RayHost  # Ray is an extra

    return RayHost(OPENER)


def _workers_of(components: Components) -> Workers:
    """The setting; by default no worker loads a model once more or needs an object of this process."""
    workers = components.config.rollout.workers
    objects = components.objects.keys() - {components.config.sampler.name}  # no other process can build them
    frozen = components.config.rollout.condense.writer == "initial"  # a copy of the policy in this process
    stays = bool(objects) or frozen or any_holds_model(components.condenser, components.reward)
    return Workers(processes=0) if stays and workers == Workers() else workers


def rank_cpus() -> int:
    """The CPUs of this rank: those that it may use, shared with the other ranks of its machine.

    A task of srun is bound to CPUs of its own (--cpus-per-task), which it shares with no other.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")  # set by torchrun, by deepspeed
    ranks = local or ("1" if "SLURM_STEP_ID" in os.environ else os.environ.get("WORLD_SIZE", "1"))
    return max(len(os.sched_getaffinity(0)) // int(ranks), 1)


def described_workers(components: Components) -> str:
    """Where the trajectories of a training step are played, as one line."""
    workers, schedule, cpus = components.config.rollout.workers, components.config.train, rank_cpus()
    groups = schedule.problems_per_step // int(os.environ.get("WORLD_SIZE", "1"))
    trajectories = groups * schedule.samples_per_problem
    number = _workers_of(components).number(groups=groups, trajectories=trajectories, cpus=cpus)
    kind = "Ray actor" if workers.ray else "worker process"
    where = f"in {plural(number, kind, f'{kind}s' if workers.ray else f'{kind}es')}" if number else "in this process"
    chosen = workers == Workers()
    why = f"{plural(trajectories, 'trajectory', 'trajectories')} a step, {plural(cpus, 'CPU')}"
    if chosen and _workers_of(components) != workers:
        why = "a part is an object" if components.objects else "condenser or reward holds a model"
    return f"rollouts {where}{' of each rank' if number else ''}: {why if chosen else 'set by rollout.workers'}"
