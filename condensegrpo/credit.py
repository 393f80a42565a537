"""From scored trajectories to weighted training rows. Floor 4: pure functions over the data of a batch.

scores ─▶ advantage of every turn ─▶ weight of every turn's tokens ─▶ segments
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condensegrpo.advantages import efficient
from condensegrpo.rollout.scoring import turn_sums
from condensegrpo.segments import segments
from condensegrpo.trajectory import ScoredTrajectory, Segment

Estimator = Callable[
    ..., Tensor
]  # condensegrpo.advantages.ESTIMATORS: (outcome_N, turn_N, group_N, turns_N, result_turn_N, *, …)


class Scores(NamedTuple):
    """What the estimators see of a batch of N trajectories."""

    total_N: Tensor  # float, Score.total
    correct_N: Tensor  # float in [0, 1]
    context_N: Tensor  # float, tokens of the largest context
    turn_N: Tensor  # float, sum of the turn rewards
    group_N: Tensor  # int, labels of the groups
    turns_N: Tensor  # int
    result_turn_N: Tensor  # int, first turn with a tool result; −1: none


def scores_of(scored: Sequence[ScoredTrajectory]) -> Scores:
    """The columns of a batch, one entry a trajectory, in order."""
    labels = {group: label for label, group in enumerate(dict.fromkeys(one.trajectory.group_id for one in scored))}
    turn_rewards = [turn_sums(one.trajectory) for one in scored]
    return Scores(
        total_N=torch.tensor([one.score.total for one in scored], dtype=torch.float64),
        correct_N=torch.tensor([one.score.correct for one in scored], dtype=torch.float64),
        context_N=torch.tensor([one.score.context_tokens for one in scored], dtype=torch.float64),
        turn_N=torch.tensor([sums.total for sums in turn_rewards], dtype=torch.float64),
        group_N=torch.tensor([labels[one.trajectory.group_id] for one in scored]),
        turns_N=torch.tensor([len(one.trajectory.turns) for one in scored]),
        result_turn_N=torch.tensor([sums.result_turn for sums in turn_rewards]),
    )


def advantages_of(scores: Scores, estimator: Estimator, options: Mapping[str, Any]) -> Tensor:
    """The advantage of every turn, (N, K).

    ``efficient`` separates correctness from context and takes both; every other estimator takes the total reward.
    """
    rest = (scores.turn_N, scores.group_N, scores.turns_N, scores.result_turn_N)
    if estimator is efficient:
        return efficient(scores.correct_N, *rest, context_N=scores.context_N, **options)
    return estimator(scores.total_N, *rest, **options)


def turn_tokens(scored: Sequence[ScoredTrajectory]) -> Tensor:
    """Sampled tokens of every turn, int (N, K), 0 beyond a trajectory's turns."""
    turns = max((len(one.trajectory.turns) for one in scored), default=0)
    tokens_NK = torch.zeros(len(scored), turns, dtype=torch.int64)
    for row, one in enumerate(scored):
        for column, turn in enumerate(one.trajectory.turns):
            tokens_NK[row, column] = len(turn.output_ids)
    return tokens_NK


def rows_of(scored: Sequence[ScoredTrajectory], advantage_NK: Tensor, weight_NK: Tensor) -> tuple[Segment, ...]:
    """The training rows of a batch. A trajectory without any advantage has no gradient and gets no row.

    The weights were computed over *all* trajectories, so leaving some out changes no denominator.
    """
    rows: list[Segment] = []
    for one, advantage_K, weight_K in zip(scored, advantage_NK.tolist(), weight_NK.tolist(), strict=True):
        if any(advantage_K):
            count = len(one.trajectory.turns)
            rows += segments(one.trajectory, advantage_K=advantage_K[:count], weight_K=weight_K[:count])
    return tuple(rows)
