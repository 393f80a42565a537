"""What a rank and its rollout workers send each other, as pickles. Named tuples: thousands of them are sent a second.

rank ─▶ worker    Play · Answer
worker ─▶ rank    SamplerRequest · Withdraw · a ScoredTrajectory · PlayReport, or the CondenseError that ends the batch
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from condensegrpo.core.failures import PluginFailure
from condensegrpo.episodes.group import ProblemGroup

PLAIN_DATA = "Make Problem.data of plain values, or set rollout.workers.processes=0"

Method = Literal["sample", "measure", "attend"]


class Setup(NamedTuple):
    """How a player is built. A worker that has a player with this key keeps it."""

    key: int
    settings: object  # for the function that makes players in the worker


class Play(NamedTuple):
    """Play some groups of a batch; see ``LocalPlayer.play``."""

    setup: Setup
    batch: tuple[ProblemGroup, ...]
    samples: int
    run_seed: int
    step: int
    version: int  # of the policy


class SamplerRequest(NamedTuple):
    """A call of a method of the sampler."""

    number: int
    model: str  # folder or Hub id of a frozen model that is called instead; empty: the sampler
    method: Method
    arguments: tuple[Any, ...]


class Withdraw(NamedTuple):
    """A request whose answer is of no use any more."""

    number: int


class Answer(NamedTuple):
    """The answer to a request."""

    number: int
    value: object  # a Failure: the sampler failed


class PlayReport(NamedTuple):
    """All trajectories of a play are scored."""

    condensing: float  # seconds that its condenser was at work
    counts: Mapping[str, float] | PluginFailure  # of its condenser
