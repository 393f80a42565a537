"""The estimators and losses for ``algorithm.advantage.estimator`` and ``algorithm.loss.name``, and the traits of each.

Standard library only, so that ``--help`` lists them without importing torch. The functions of the same names are in
``advantages`` and ``losses``; a test compares the tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorTraits:
    """What distinguishes an estimator of advantages from the others, besides its formula."""

    summary: str  # one line for tables and --help
    learns_from: Literal["total", "score"] = "total"  # total less penalties, or a score in [0, 1]
    sees_turn_rewards: bool = False  # False: R^T is only logged
    columns: tuple[str, ...] = ()  # fields of credit.Scores that it takes besides the five of every estimator
    context_anchors: bool = False  # takes the options context_low and context_high


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """What distinguishes a policy loss from the others, besides its formula."""

    summary: str  # one line for tables and --help
    whole_turns: bool = False  # the loss of a token depends on the other tokens of its turn


ESTIMATORS: Mapping[str, EstimatorTraits] = {
    "efficient": EstimatorTraits(
        summary="accuracy, then shorter contexts among correct trajectories (default for the reward correct)",
        learns_from="score",
        columns=("context_N", "truncated_N"),
        context_anchors=True,
    ),
    "grpo": EstimatorTraits(summary="the reward against its group (default for every other reward)"),
    "grpo_merged": EstimatorTraits(summary="turn and outcome rewards added, against the group", sees_turn_rewards=True),
    "ms_grpo": EstimatorTraits(
        summary="outcome, plus turn rewards on the turns up to the first tool result", sees_turn_rewards=True
    ),
    "mt_grpo": EstimatorTraits(
        summary="as ms_grpo; without a tool result turn and outcome rewards added", sees_turn_rewards=True
    ),
    "ms_po": EstimatorTraits(
        summary="turn rewards and outcome up to the first tool result, the outcome alone after it",
        sees_turn_rewards=True,
    ),
    "rloo": EstimatorTraits(summary="the reward against the mean of the others"),
    "reinforce": EstimatorTraits(summary="the clamped reward against its group"),
    "turn_discounted": EstimatorTraits(summary="grpo, later turns weighing more"),
    "gigpo": EstimatorTraits(
        summary="grpo, plus a comparison of turns sampled from the same context", columns=("state_NK",)
    ),
}
LOSSES: Mapping[str, LossTraits] = {
    "clipped": LossTraits(summary="PPO's surrogate, clipped per token (default)"),
    "gspo": LossTraits(summary="clipped per turn, by the turn's mean ratio", whole_turns=True),
    "cispo": LossTraits(summary="the ratio bounded as a constant weight, no token without gradient"),
    "reinforce": LossTraits(summary="−A·logp, for one update a batch"),
}


def turn_reward_estimators() -> str:
    """The names of the estimators that use turn rewards, in alphabetical order."""
    return ", ".join(sorted(name for name, traits in ESTIMATORS.items() if traits.sees_turn_rewards))
