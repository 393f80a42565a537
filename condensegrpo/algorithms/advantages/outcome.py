"""Estimators that give a trajectory one scalar, for all its turns or discounted towards its end. Torch only.

``grpo``, ``grpo_merged``, ``rloo``, ``reinforce`` and ``turn_discounted``.

Arguments and suffixes as in ``condensegrpo.algorithms.advantages``.
"""

from typing import Annotated

from annotated_types import Ge, Gt, Le

from condensegrpo.algorithms.advantages.estimator import Batch, Estimate, Term, against_group, estimator, total
from condensegrpo.algorithms.advantages.groups import Epsilon, Scale, Singleton, sizes, std
from condensegrpo.algorithms.advantages.table import discounts


@estimator(
    summary="the reward against its group (default for every other reward)",
)
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

    Raises:
        ScoreError, ValueError: as every estimator, see ``condensegrpo.algorithms.advantages``.
    """
    return total(against_group("R", batch.outcome_N, batch.group_N, scale=scale, eps=eps, singleton=singleton))


@estimator(
    summary="turn and outcome rewards added, against the group",
    sees_turn_rewards=True,
)
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

    Raises:
        ScoreError, ValueError: as every estimator, see ``condensegrpo.algorithms.advantages``.
    """
    merged_N = batch.turn_N + batch.outcome_N
    return total(against_group("R^T + R^O", merged_N, batch.group_N, scale=scale, eps=eps, singleton=singleton))


@estimator(
    summary="the reward against the mean of the others",
)
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

    Raises:
        ScoreError, ValueError: as every estimator, see ``condensegrpo.algorithms.advantages``.
    """
    size_N = sizes(batch.group_N).double()
    factor_N = size_N / (size_N - 1).clamp(min=1)  # n/(n − 1); 1 for a group of one, whose "raw" it must leave alone
    centred = against_group("R", batch.outcome_N, batch.group_N, scale="none", eps=0.0, singleton=singleton)
    return total(Term("R − mean of the others", factor_N * centred.value_NK, {**centred.numbers, "n": size_N}))


@estimator(
    summary="the clamped reward against its group",
)
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

    Raises:
        ScoreError: also for a reward that the clamp would hide.
    """
    reward_N = batch.outcome_N.clamp(-clamp, clamp)
    scaled = against_group("R'", reward_N, batch.group_N, scale="std", eps=eps, singleton=singleton)
    centred = against_group("R'", reward_N, batch.group_N, scale="none", eps=eps, singleton=singleton)
    spread_N = std(reward_N, batch.group_N) > eps
    return total(scaled._replace(applies_NK=spread_N), centred._replace(applies_NK=~spread_N))


@estimator(
    summary="grpo, later turns weighing more",
)
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

    Raises:
        ScoreError, ValueError: as every estimator, see ``condensegrpo.algorithms.advantages``.
    """
    term = against_group("R^O", batch.outcome_N, batch.group_N, scale=scale, eps=eps, singleton=singleton)
    discount_NK = discounts(batch.turns_N, gamma)
    value_NK = discount_NK * term.value_NK[:, None]
    return total(Term(f"γ^(K−1−t)·{term.name}", value_NK, {**term.numbers, "γ^(K−1−t)": discount_NK}))
