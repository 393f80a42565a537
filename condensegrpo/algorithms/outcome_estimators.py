"""Estimators that give a trajectory one scalar, for all its turns or discounted towards its end. Torch only.

``grpo``, ``grpo_merged``, ``rloo``, ``reinforce``, ``turn_discounted`` and ``efficient``. Arguments and suffixes as in
``condensegrpo.algorithms.advantages``.
"""

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from condensegrpo.algorithms.advantages import (
    Batch,
    Epsilon,
    Estimate,
    Scale,
    Singleton,
    Term,
    against_group,
    discounts,
    estimator,
    first,
    group_indices,
    mean,
    name_of,
    sizes,
    std,
    total,
)
from condensegrpo.core.errors import ScoreError
from condensegrpo.core.scored_trajectory import CACHED, WRITTEN

Cost = Literal["peak", "price"]  # the largest context of any turn, or what all calls cost
Share = Annotated[float, Ge(0), Le(1)]

SCORE_ROUNDING = 1e-9  # weights such as 0.7, 0.2 and 0.1 sum to 1 up to rounding


@estimator(summary="the reward against its group (default for every other reward)")
def grpo(batch: Batch, *, scale: Scale = "std", singleton: Singleton = "zero", eps: Epsilon = 1e-6) -> Estimate:
    """The outcome against the mean of its group, one scalar for all turns of a trajectory.

    A_i = (R_i − mean_g) / (std_g + ε),  g = group_N[i]

    GRPO (https://arxiv.org/abs/2402.03300, sec. 4.1.2) divides by std; ``scale="none"`` is Dr. GRPO
    (https://arxiv.org/abs/2503.20783), which does not, since that weighs easy and hard questions more than the rest.
    Equal rewards give exactly 0. A group of one gives 0, or with ``singleton="raw"`` its own reward.

    Biased by: the division, which makes a lone success of 8 weigh as much as a lone failure and more than each of 4
    against 4; the trajectory's own reward in the mean, a factor (n − 1)/n that ``rloo`` removes; all turns get the same
    credit.

    Example: outcomes [1, 1, 1, 0] in one group have mean ¾ and std ½, and give [½, ½, ½, −1½].

    Returns:
        float (N, K), constant over the turns of a trajectory, summing to zero over a group's trajectories.
    """
    return total(against_group("R", batch.outcome_N, batch.group_N, scale=scale, eps=eps, singleton=singleton))


@estimator(summary="turn and outcome rewards added, against the group", sees_turn_rewards=True)
def grpo_merged(batch: Batch, *, scale: Scale = "std", singleton: Singleton = "zero", eps: Epsilon = 1e-4) -> Estimate:
    """All of a trajectory's rewards in one sum, against the mean of its group.

    A_i = N_ε(R^T + R^O)_i

    The baseline that turn-level credit is measured against in https://arxiv.org/abs/2505.11821 (GRPO with merged
    rewards).

    Biased by: what ``grpo`` is; whichever of R^T and R^O varies more drowns the other; a turn reward is credited to
    every turn, those after it included.

    Example: R^O = [0, 1, 2], R^T = [1, 3, 2]: the sums [1, 4, 4] have mean 3 and std √3, and give [−2, 1, 1]/√3.

    Returns:
        float (N, K), constant over the turns of a trajectory, summing to zero over a group's trajectories.
    """
    merged_N = batch.turn_N + batch.outcome_N
    return total(against_group("R^T + R^O", merged_N, batch.group_N, scale=scale, eps=eps, singleton=singleton))


@estimator(summary="the reward against the mean of the others")
def rloo(batch: Batch, *, singleton: Singleton = "zero") -> Estimate:
    """The outcome against the mean of its siblings, itself left out.

    A_i = R_i − mean_{j ≠ i} R_j = n/(n − 1) · (R_i − mean_g),  n the size of the group

    REINFORCE leave-one-out (https://arxiv.org/abs/2402.14740). The baseline does not depend on the trajectory that it
    is subtracted from, so the gradient is unbiased at every n. Equal rewards give exactly 0. A group of one has no
    siblings and gives 0, or with ``singleton="raw"`` its own reward.

    Biased by: nothing; the price is variance, and a step that grows with the scale of the rewards.

    Example: outcomes [1, 1, 1, 0] give 1 − ⅔ = ⅓ three times and 0 − 1 = −1.

    Returns:
        float (N, K), constant over the turns of a trajectory, summing to zero over a group's trajectories.
    """
    size_N = sizes(batch.group_N).double()
    factor_N = size_N / (size_N - 1).clamp(min=1)  # n/(n − 1); 1 for a group of one, whose "raw" it must leave alone
    centred = against_group("R", batch.outcome_N, batch.group_N, scale="none", eps=0.0, singleton=singleton)
    return total(Term("R − mean of the others", factor_N * centred.value_NK, {**centred.numbers, "n": size_N}))


@estimator(summary="the clamped reward against its group")
def reinforce(
    batch: Batch, *, clamp: Annotated[float, Gt(0)] = 10.0, singleton: Singleton = "zero", eps: Epsilon = 1e-8
) -> Estimate:
    """The clamped outcome against the mean of its group, divided by a deviation only where there is one.

        R' = clip(R, −clamp, clamp)
        A_i = (R'_i − mean_g) / (std_g + ε)   where std_g > ε
        A_i =  R'_i − mean_g                  where std_g ≤ ε

    REINFORCE (Williams 1992) with the group's mean as its baseline and outliers cut off. REINFORCE++
    (https://arxiv.org/abs/2501.03262) normalises over the batch instead, which is ``whiten`` here. A group of one gives
    0, or with ``singleton="raw"`` its own clamped reward.

    Biased by: what ``grpo`` is; the clamp, beyond which rewards are equal; a jump at std = ε, where a difference of
    2e-8 becomes one of about 1.

    Example: outcomes [100, 0, 0] are [10, 0, 0] with mean 3⅓ and std 5.77: [1.15, −0.58, −0.58], as for [1, 0, 0].

    Args:
        clamp: the magnitude, > 0, that a reward is cut to.

    Returns:
        float (N, K), constant over the turns of a trajectory, summing to zero over a group's trajectories.
    """
    reward_N = batch.outcome_N.clamp(-clamp, clamp)
    scaled = against_group("R'", reward_N, batch.group_N, scale="std", eps=eps, singleton=singleton)
    centred = against_group("R'", reward_N, batch.group_N, scale="none", eps=eps, singleton=singleton)
    spread_N = std(reward_N, batch.group_N) > eps
    return total(scaled._replace(applies_NK=spread_N), centred._replace(applies_NK=~spread_N))


@estimator(summary="grpo, later turns weighing more")
def turn_discounted(
    batch: Batch,
    *,
    gamma: Annotated[float, Ge(0), Le(1)] = 0.9,
    scale: Scale = "std",
    singleton: Singleton = "zero",
    eps: Epsilon = 1e-6,
) -> Estimate:
    """The advantage of ``grpo``, less the further a turn lies before the trajectory's last.

    A_it = γ^{K_i − 1 − t} · N_ε(R^O)_i,   K_i = turns_N[i],  t from 0

    The discounted return of a reward that comes at the end (Sutton & Barto, Reinforcement Learning, sec. 3.3), with the
    group's statistics taken before the discount, so that a trajectory's length changes no sibling's advantage.

    Biased by: what ``grpo`` is; the last turns, whether or not the first decided; the number of turns, since the first
    turn of a long trajectory learns less than that of a short one. γ = 1 is ``grpo``; γ = 0 trains last turns only.

    Example: outcomes [1, 0] with 3 and 1 turns, γ = ½: N = ±0.707, so [0.177, 0.354, 0.707] and [−0.707, 0, 0].

    Args:
        gamma: γ in [0, 1].

    Returns:
        float (N, K). It sums to zero over a group's trajectories at their last turns, not in any one column.
    """
    term = against_group("R^O", batch.outcome_N, batch.group_N, scale=scale, eps=eps, singleton=singleton)
    discount_NK = discounts(batch.turns_N, gamma)
    value_NK = discount_NK * term.value_NK[:, None]
    return total(Term(f"γ^(K−1−t)·{term.name}", value_NK, {**term.numbers, "γ^(K−1−t)": discount_NK}))


@estimator(
    summary="accuracy, then shorter contexts among correct trajectories (default for the reward correct)",
    learns_from="score",
)
def efficient(
    batch: Batch,
    *,
    context_N: Tensor,
    uncached_N: Tensor,
    cached_N: Tensor,
    output_N: Tensor,
    truncated_N: Tensor,
    context_low: float,
    context_high: float,
    cost: Cost = "peak",
    cached: Annotated[float, Ge(0)] = CACHED,
    written: Annotated[float, Ge(0)] = WRITTEN,
    coefficient: Annotated[float, Ge(0)] = 0.2,
    min_pass_rate: Share = 0.0,
    guard: Share = 0.25,
    accuracy: Scale = "std",
    eps: Epsilon = 1e-6,
) -> Estimate:
    """Accuracy first, then context efficiency among the correct, decoupled so that one cannot drown the other.

        u_i = clip(ln(C_i/C_lo) / ln(C_hi/C_lo), 0, 1)                    cost of the context, 0 is cheap
        E_i = 1[r_i=1] · clip((mean u − u_i) / max(std u, 0.1), −1, 1)    mean, std over the correct of g
        A_i = A_acc + λ·g(p)·E_i,   g(p) = p if p ≥ p_min else 0          p: the group's share of r = 1
        r_i < 1 ⇒ A_i = A_acc;      A_acc > 0 ⇒ A_i ≥ κ·A_acc             the guard

    with A_acc = N(r), or r − mean for ``accuracy="none"``. C is the largest context of any turn, or with
    ``cost="price"`` what all calls cost: C = tokens read uncached + ``cached``·(tokens read from a prefix cache) +
    ``written``·(tokens sampled): a condensation that breaks the cache counts, and its summary too. E is 0 in a group
    with fewer than two correct trajectories, and for a trajectory that a token budget cut off. In an all-correct
    group A_acc = 0 and the guard has no effect: smaller C wins. Introduced here; the accuracy part is that of ``grpo``.
    It promises:

      * A larger C never raises a trajectory's own advantage.
      * Of two correct siblings, neither truncated, that of larger C never has the larger advantage.
      * In a mixed group no correct trajectory is negative, and where r is 0 or 1 none stands below a wrong one.
        Partial credit is outside the second half: beside [1, 1, 0.99, 0] a long correct trajectory may fall below the
        0.99, by λ·p at most.
      * An all-correct group with equal contexts gives exactly 0.
      * Contexts and anchors in another unit change nothing.

    Example: outcomes [1, 1, 0, 0], contexts [100, 1000, 100, 100], anchors 100 and 1000, ``accuracy="none"``: u of the
    correct is 0 and 1, mean ½, std 0.71, E = ±0.71; λ·p·E = ±0.071, so A = [0.571, 0.429, −0.5, −0.5].

    Biased by: what ``grpo`` is; short contexts, on purpose, in proportion to the pass rate; the anchors, beyond which
    contexts are equal; the clip and the guard, by which A need not sum to zero over a group.

    Args:
        outcome_N: r in [0, 1], the total reward; only r = 1 counts as correct.
        guard: κ in [0, 1].
        accuracy: the ``scale`` of A_acc.
        context_N, uncached_N, cached_N, output_N: tokens of the largest context, and of all calls by kind.
        context_low, context_high: C_lo and C_hi in tokens, with no cost and full cost; never taken from the group.
        cost: C, ``peak`` or ``price``.
        cached, written: price of a token read from a prefix cache and of a sampled one, ≥ 0; 1 is one read uncached.
        coefficient: λ ≥ 0.
        min_pass_rate: p_min in [0, 1].
        truncated_N: bool, trajectories that a token budget cut off: they earn no E but count in its mean and std.

    Returns:
        float (N, K), constant over the turns of a trajectory.
    """
    price_N = uncached_N + cached * cached_N + written * output_N
    spent_N = (context_N if cost == "peak" else price_N).double()  # C
    _check_scored_contexts(batch.outcome_N, spent_N)
    if not 0 < context_low < context_high:
        raise ValueError(
            f"the context anchors must satisfy 0 < context_low < context_high, found {context_low} and {context_high}"
        )
    correct_N = batch.outcome_N >= 1 - SCORE_ROUNDING
    accurate = against_group("R", batch.outcome_N, batch.group_N, scale=accuracy, eps=eps)
    width = torch.tensor(context_high / context_low, dtype=torch.float64).log()
    cost_N = (spent_N.clamp(context_low, context_high) / context_low).log() / width  # u
    pass_rate_N = mean(correct_N.double(), batch.group_N)
    trust_N = torch.where(pass_rate_N >= min_pass_rate, pass_rate_N, 0.0)  # g(p)
    saving_N = _saving(cost_N, correct_N, batch.group_N, truncated_N)
    numbers = {"C": spent_N, "u": cost_N, "g(p)": trust_N, "E": saving_N}
    cheaper = Term("λ·g(p)·E", coefficient * trust_N * saving_N, numbers, correct_N)
    unguarded_N = accurate.value_NK + cheaper.value_NK
    floor_N = guard * accurate.value_NK
    guarded_N = correct_N & (accurate.value_NK > 0) & (floor_N > unguarded_N)
    guarded = Term("guard", floor_N - unguarded_N, {"κ·N(R)": floor_N}, guarded_N)
    advantage_N = torch.where(correct_N, unguarded_N, accurate.value_NK)
    return Estimate(torch.where(guarded_N, floor_N, advantage_N), (accurate, cheaper, guarded))


def _saving(cost_N: Tensor, correct_N: Tensor, group_N: Tensor, truncated_N: Tensor) -> Tensor:
    """E_N: how much cheaper than its correct siblings a correct trajectory was, in their deviations; within [−1, 1].

    0 for a truncated trajectory, which counts in the mean and the deviation of its siblings.
    """
    index_N, _ = group_indices(group_N)
    correct_cost_N = cost_N[correct_N]
    index_C = index_N[correct_N]  # of the correct only, in the labels of all groups
    saving_C = (mean(correct_cost_N, index_C) - correct_cost_N) / std(correct_cost_N, index_C).clamp(min=0.1)
    saving_N = torch.zeros_like(cost_N).masked_scatter(correct_N, saving_C.clamp(-1, 1))
    return saving_N.masked_fill(truncated_N, 0.0)


def _check_scored_contexts(outcome_N: Tensor, context_N: Tensor) -> None:
    """Raise ScoreError for an outcome outside [0, 1], and ValueError for contexts of another shape or not finite."""
    bad = first((outcome_N < -SCORE_ROUNDING) | (outcome_N > 1 + SCORE_ROUNDING))
    if bad is not None:
        raise ScoreError(
            f"computing advantages: the outcome of {name_of(bad, outcome_N)} is "
            f"{outcome_N[bad].item()}, wanted a score in [0, 1]. The estimator 'efficient' takes the total of the "
            f"reward as its score: scale the reward, or set algorithm.advantage.estimator=grpo."
        )
    if context_N.shape != outcome_N.shape:
        raise ValueError(
            f"the estimator 'efficient' needs context_N of shape {tuple(outcome_N.shape)}, one a trajectory, "
            f"found {tuple(context_N.shape)}"
        )
    bad = first(~context_N.isfinite())
    if bad is not None:
        raise ValueError(
            f"computing advantages: the context of {name_of(bad, context_N)} is {context_N[bad].item()} tokens, "
            f"wanted a finite number"
        )
