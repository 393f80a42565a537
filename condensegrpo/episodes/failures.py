"""The trajectories of a batch that failed: counted by kind, reported, and an error if they are too many."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from condensegrpo.core.errors import TooManyFailed
from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.observer import Observer
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import StopReason
from condensegrpo.core.wording import plural

# stops by an error, not by a decision
FAILURES = frozenset({StopReason.SAMPLER_ERROR, StopReason.ENVIRONMENT_ERROR, StopReason.REWARD_ERROR})
KINDS_SHOWN = 3  # in an error


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Failures of one kind: of one plug-in, exception and line."""

    stop: StopReason
    first: PluginFailure
    trajectory: str  # id of the first
    count: int


class Failures(NamedTuple):
    """The trajectories that ended with an error."""

    trajectories: int  # sampled in all
    kinds: tuple[FailureKind, ...]  # the most frequent first

    @property
    def failed(self) -> int:
        """How many trajectories failed."""
        return sum(kind.count for kind in self.kinds)

    def exceed(self, max_failed: float) -> bool:
        """Whether all trajectories failed, or more than this fraction of them."""
        return bool(self.kinds) and (self.failed == self.trajectories or self.failed > max_failed * self.trajectories)

    def described(self, rank: str = "") -> str:
        """How many failed, and how, without a full stop: ``62 of 64 trajectories failed, 60 of them like this: …``."""
        if self.trajectories == 1:
            return f"the trajectory{rank} failed: {self.kinds[0].first}"
        number = f"all {self.failed}" if self.failed == self.trajectories else f"{self.failed} of {self.trajectories}"
        kinds = "; ".join(f"{kind.count} of them like this: {kind.first}" for kind in self.kinds[:KINDS_SHOWN])
        return f"{number} trajectories{rank} failed, {kinds}"


@dataclass(slots=True)
class FailureWatch:
    """Stops a run in which most trajectories fail: in one step by chance, but not in two steps in a row."""

    max_failed: float  # fraction of a step's trajectories
    _exceeded: bool = field(default=False, init=False)  # in the step before

    def check(self, ranks: Sequence[Failures], observer: Observer) -> None:
        """Report the failures of the next step.

        Args:
            ranks: of every rank, so that all ranks raise, or none does and no rank waits for another that has left.
        """
        check_failures(ranks, observer, max_failed=self.max_failed if self._exceeded else 1.0)
        self._exceeded = _together(ranks).exceed(self.max_failed)
        for number, rank in enumerate(ranks):
            if rank.exceed(1.0):  # its device or machine is broken
                raise TooManyFailed(
                    f"{rank.described(f' of rank {number}')}. Compare its device, files and packages with those of "
                    f"the other ranks."
                )


def failures_of(scored: Sequence[ScoredTrajectory]) -> Failures:
    """The failures among some trajectories: each rank counts its own."""
    failed = [member.trajectory for member in scored if member.trajectory.stop in FAILURES]
    kinds = [
        FailureKind(each.stop, each.failure or PluginFailure(source="", error="", message=each.detail), each.id, 1)
        for each in failed
    ]
    return Failures(trajectories=len(scored), kinds=_merged(kinds))


def check_failures(ranks: Sequence[Failures], observer: Observer, *, max_failed: float = 1.0) -> None:
    """Report the failures of each kind, if any: a single failure is data, but if most fail, something is broken.

    Args:
        ranks: of every rank.
    """
    failures = _together(ranks)
    for kind in failures.kinds:
        text = f"{kind.count} of {failures.trajectories} trajectories failed ({kind.stop}): {kind.first}"
        observer.trajectories_failed(f"{text}; first in {kind.trajectory}", kind.first.traceback)
    if failures.exceed(max_failed):
        limit = f" That is more than train.max_failed={max_failed:g} of them: fix the cause, or raise the key."
        raise TooManyFailed(f"{failures.described()}.{limit if failures.failed < failures.trajectories else ''}")


def mostly_cut(ends: Sequence[tuple[StopReason, str]]) -> str:
    """A sentence if more than half of the trajectories ended for a lack of tokens, so that little is learned; or "".

    Args:
        ends: stop and detail of the trajectories of all ranks.
    """
    for wanting in (StopReason.CONTEXT_OVERFLOW, StopReason.OUTPUT_LENGTH):
        cut = [detail for stop, detail in ends if stop is wanting]
        if 2 * len(cut) > len(ends):
            return f"{len(cut)} of {plural(len(ends), 'trajectory', 'trajectories')} ended as {wanting}: {cut[0]}"
    return ""


def _together(ranks: Sequence[Failures]) -> Failures:
    return Failures(sum(rank.trajectories for rank in ranks), _merged(kind for rank in ranks for kind in rank.kinds))


def _merged(kinds: Iterable[FailureKind]) -> tuple[FailureKind, ...]:
    """Failures of the same plug-in, exception and line as one kind."""
    merged: dict[tuple[str, ...], FailureKind] = {}
    for kind in kinds:
        key = (kind.stop, kind.first.source, kind.first.error, kind.first.location)
        known = merged.get(key)
        merged[key] = kind if known is None else replace(known, count=known.count + kind.count)
    return tuple(sorted(merged.values(), key=lambda kind: -kind.count))
