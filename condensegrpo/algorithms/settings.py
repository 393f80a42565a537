"""Settings of the algorithm, as the configuration holds them. Standard library and ``annotated_types`` only.

The ranges are annotations: pydantic checks them when a configuration is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from condensegrpo.core.trajectory import Handling, StopReason

Aggregation = Literal["trajectory_constant", "trajectory_mean", "token_mean", "turn_mean"]
TrainedKind = Literal["all", "act", "condense"]
Level = Literal["token", "turn"]
Mode = Literal["truncate", "mask"]

FAILURES_MASKED: Mapping[StopReason, Handling] = {  # failures that the policy did not cause
    StopReason.ENVIRONMENT_ERROR: "mask",
    StopReason.SAMPLER_ERROR: "mask",
    StopReason.REWARD_ERROR: "mask",
    StopReason.ABORTED: "mask",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCredit:
    """The factors of a positive advantage of a turn, by the form of its unit in the prompt of the last reply."""

    dropped: Annotated[float, Ge(0), Le(1)] = 0.0
    """The factor of a turn whose unit is gone."""
    rewritten: Annotated[float, Ge(0), Le(1)] = 1.0
    """The factor of a turn whose unit a placeholder, a note or a summary stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """The advantage of every turn."""

    estimator: str | None = None
    """An estimator of advantages; null: efficient if reward.name is correct, else grpo."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the estimator."""
    context_anchors: tuple[float, float] | None = None
    """Context tokens with no cost and with full cost, for efficient; null: 1/16 and all of the context budget, or
    with cost=price 1/16 of a turn's largest price and max_turns times that price."""
    sources: SourceCredit | None = None
    """Factors of a positive advantage for turns whose unit was no longer in the prompt of the last reply; null: 1."""
    whiten: bool = False
    """Whether advantages get mean 0 and deviation 1 over all trained tokens of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss of a token."""

    name: str = "clipped"
    """A loss."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationSettings:
    """The weight of a token in the optimiser step."""

    mode: Aggregation = "trajectory_constant"
    """See condensegrpo.algorithms.objective.token_weights."""
    max_tokens: Annotated[int, Ge(1)] | None = None
    """L of trajectory_constant; null: max_turns · max_output_tokens."""
    turns: TrainedKind = "all"
    """The turns that train: all, only those in which the policy acts, or only those in which it writes for a
    condenser."""
    summary_share: Annotated[float, Ge(0), Le(1)] | None = None
    """Share of all token weight that the tokens of summaries get; null: the share that the mode gives them."""

    def __post_init__(self) -> None:
        if self.turns != "all" and self.summary_share is not None:
            raise ValueError(
                f"found turns={self.turns} and summary_share={self.summary_share}: a share divides the weight between "
                f"turns that act and turns that write, and only one kind of them trains. Remove summary_share"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KlSettings:
    """A term that keeps the policy near the one that GRPO started from."""

    coefficient: Annotated[float, Ge(0)] = 0.0
    """Factor of the KL term of a token; 0: no term, and no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """One of condensegrpo.algorithms.losses.KL."""
    aggregation: Aggregation | None = None
    """How the KL terms of tokens are weighed, as algorithm.aggregation.mode; null: as the loss of the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSettings:
    """Correction for sampler and learner computing different probabilities from the same weights."""

    cap: Annotated[float, Ge(0)] | None = None
    """Bound of the weight, at least 1; 0: no correction, ratios are taken against the sampler; null: 2 where sampler or
    learner compute in bfloat16, else 0."""
    level: Level = "token"
    """Whether the weight compares probabilities of tokens or of whole turns."""
    mode: Mode = "truncate"
    """truncate: min(weight, cap); mask: 0 outside 1/cap … cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """The handling of a trajectory in training, by its stop reason."""

    handling: Mapping[StopReason, Handling] = field(default_factory=dict)
    """train (the default of a stop), mask (as if never sampled; the default of failures) or penalise (wrong)."""
    penalty: Annotated[float, Ge(0)] = 1.0
    """Subtracted from the total reward of a penalised trajectory; for efficient its score is 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "handling", {**FAILURES_MASKED, **self.handling})

    def of(self, stop: StopReason) -> Handling:
        """The handling of a trajectory that stopped like this."""
        return self.handling.get(stop, "train")


DEFAULT_STOPS = StopSettings()
