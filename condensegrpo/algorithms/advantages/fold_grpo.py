"""The estimator of FoldGRPO: process rewards of single turns beside the outcome. Torch only.

Arguments and suffixes as in ``condensegrpo.algorithms.advantages``.
"""

import torch
from torch import Tensor

from condensegrpo.algorithms.advantages.estimator import Batch, Estimate, Term, against_group, estimator, total
from condensegrpo.algorithms.advantages.groups import Epsilon, Scale, Singleton, std


@estimator(
    summary="the outcome, and each turn its own turn rewards in units of the outcome",
    sees_turn_rewards=True,
)
def fold_grpo(
    batch: Batch,
    *,
    turn_reward_NK: Tensor,
    low: float = 0.0,
    high: float = 1.0,
    scale: Scale = "std",
    singleton: Singleton = "zero",
    eps: Epsilon = 1e-6,
) -> Estimate:
    """The outcome for all turns, and for each turn what it was itself paid.

        A_it = N_ε(R^O)_i + Q_it
        Q_it = (clip(R^O_i + r_it, low, high) − R^O_i) / (std_g + ε)     r_it: the turn rewards of turn t
        Q_it = 0                                                         where std_g = 0

    and without (std_g + ε) where scale="none". FoldGRPO (https://arxiv.org/abs/2510.11967): for outcomes in [low, high]
    that differ this is (clip(R_i + Q_it, 0, 1) − mean_g) / std_g. The clip keeps a wrong trajectory from being
    penalised twice; an outcome beyond low or high is itself the bound. A group without a difference gives no signal, as
    everywhere here. Statistics are of outcomes alone, so that turn rewards move no sibling.

    Biased by: what ``grpo`` is; penalties, which only trajectories with an outcome above ``low`` feel, and which push a
    turn of the best trajectory down for what was perhaps needed.

    Example: outcomes [1, 0], turn rewards [[0, −1], [−1, ·]], ε = 0: std is 1/√2, N = ±0.707. The penalty of trajectory
    0 is (0 − 1)·√2, that of trajectory 1 is clipped away: [[0.707, −0.707], [−0.707, ·]].

    Args:
        turn_reward_NK: float, what each turn was paid, 0 beyond a trajectory's turns.
        low: least reward of a turn, outcome included.
        high: most.

    Returns:
        float (N, K).

    Raises:
        ScoreError, ValueError: as every estimator, see ``condensegrpo.algorithms.advantages``; also for low > high.
    """
    if low > high:
        raise ValueError(f"the estimator 'fold_grpo' has low={low} and high={high}, wanted low <= high")
    outcome = against_group("R^O", batch.outcome_N, batch.group_N, scale=scale, singleton=singleton, eps=eps)
    outcome_N1, deviation_N1 = batch.outcome_N[:, None], std(batch.outcome_N, batch.group_N)[:, None]
    bounded_NK = (outcome_N1 + turn_reward_NK).clamp(outcome_N1.clamp(max=low), outcome_N1.clamp(min=high))
    scale_N1 = deviation_N1 + eps if scale == "std" else torch.ones_like(deviation_N1)
    process_NK = torch.where(deviation_N1 > 0, (bounded_NK - outcome_N1) / scale_N1, 0.0)
    return total(outcome, Term("Q", process_NK, {"r": turn_reward_NK}))
