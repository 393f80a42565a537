"""Plays the groups of a run or an evaluation: in this process, or in workers, as ``rollout.workers`` says."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.workers import PlayerSettings, WorkerBatch, WorkerPool, local_player
from condensegrpo.core.defaults import overrides
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.group import ProblemGroup
from condensegrpo.episodes.player import LocalPlayer, OnScored
from condensegrpo.storage.media import MediaFolder


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

    pool: WorkerPool
    sampler: Sampler  # reached by URL
    settings: PlayerSettings
    condensing_seconds: float = 0.0  # that the condensers were at work; of several workers those of the longest
    counted: Counter[str] = field(default_factory=Counter)  # by the condensers of the workers

    async def play(
        self, batch: Sequence[ProblemGroup], *, samples: int, run_seed: int, step: int, on_scored: OnScored
    ) -> tuple[ScoredTrajectory, ...]:
        """``samples`` scored trajectories of every group of a batch; see ``collect``."""
        sent = WorkerBatch(self.settings, self.sampler.client(), tuple(batch), samples, run_seed, step)
        scored, reports = await self.pool.play(sent, on_scored)
        self.condensing_seconds += max(report.condensing for report in reports)  # they condense at the same time
        for report in reports:
            self.counted.update(report.counts)
        return scored

    def counts(self) -> Mapping[str, float]:
        """What the condensers counted since the last call."""
        counted, self.counted = self.counted, Counter()
        return counted


GroupPlayer = LocalPlayer | SharingPlayer  # plays and scores groups
