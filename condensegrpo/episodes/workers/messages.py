"""What a rank and its rollout workers send each other. Named tuples: they are pickled thousands of times a second."""

from array import array
from collections.abc import Mapping
from typing import NamedTuple

from condensegrpo.core.errors import CondenseError
from condensegrpo.core.failures import Failure
from condensegrpo.core.protocols import AttentionQuery
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Finish, SamplingParams
from condensegrpo.episodes.group import ProblemGroup

PLAIN_DATA = "Make Problem.data of plain values, or set rollout.workers.processes=0"

# --- to a worker ------------------------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """Build a player; plays name it by its key."""

    key: int
    settings: object  # for the function that the worker was started with


class Play(NamedTuple):
    """Play some groups of a batch; see ``GroupPlayer.play``."""

    number: int
    key: int  # of the player
    batch: tuple[ProblemGroup, ...]
    samples: int
    run_seed: int
    step: int
    version: int  # of the policy


class Cancel(NamedTuple):
    """Cancel a play."""

    number: int


class Close(NamedTuple):
    """End: every play is cancelled."""


class Answer(NamedTuple):
    """The answer to a request of the worker."""

    number: int
    value: object  # a Failure: the sampler failed


class SampledIds(NamedTuple):
    """A ``Generation``, in the form in which it is sent."""

    token_ids: "array[int]"
    logprobs: "array[float]"
    finish: Finish


# --- from a worker ----------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Sample a reply to a prompt that keeps the first ids of the trajectory's last prompt."""

    kept: int  # how many of them: all, or 0
    new: "array[int]"  # the ids behind them
    params: SamplingParams


class Measure(NamedTuple):
    """Measure a reply."""

    prompt_ids: "array[int]"
    output_ids: "array[int]"


class Attend(NamedTuple):
    """Capture attention."""

    model: str  # folder or Hub id; empty: the sampler's
    query: AttentionQuery


class SamplerRequest(NamedTuple):
    """A call of the sampler."""

    number: int
    call: Sample | Measure | Attend


class Withdraw(NamedTuple):
    """A request whose answer is of no use any more."""

    number: int


class Finished(NamedTuple):
    """A trajectory of a play is scored."""

    play: int
    scored: ScoredTrajectory


class PlayReport(NamedTuple):
    """All trajectories of a play are scored."""

    play: int
    condensing: float  # seconds that its condenser was at work
    counts: Mapping[str, float] | Failure  # of its condenser


class Broken(NamedTuple):
    """A worker cannot go on: the run ends."""

    error: CondenseError


Message = Setup | Play | Cancel | Close | Answer | SamplerRequest | Withdraw | Finished | PlayReport | Broken
