"""The default estimator: correctness first, then context efficiency among the correct. Torch only.

Arguments and suffixes as in ``condensegrpo.algorithms.advantages``. What it promises:

  * A longer context never raises a trajectory's own advantage.
  * Of two correct siblings, neither truncated, the longer context never has the larger advantage.
  * In a mixed group no correct trajectory is negative, and where r is 0 or 1 none stands below a wrong one. Partial
    credit is outside the second half: beside [1, 1, 0.99, 0] a long correct trajectory may fall below the 0.99, by λ·p
    at most.
  * An all-correct group with equal contexts gives exactly 0.
  * Contexts and anchors in another unit change nothing.

Example: outcomes [1, 1, 0, 0], contexts [100, 1000, 100, 100], anchors 100 and 1000, ``accuracy="none"``: u of the
correct is 0 and 1, mean ½, std 0.71, E = ±0.71; λ·p·E = ±0.071, so A = [0.571, 0.429, −0.5, −0.5].
"""

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from condensegrpo.algorithms.advantages.estimator import Batch, Estimate, Term, against_group, estimator
from condensegrpo.algorithms.advantages.groups import Epsilon, Scale, first, group_indices, mean, name_of, std
from condensegrpo.core.errors import ScoreError

ROUNDING = 1e-9  # weights such as 0.7, 0.2 and 0.1 sum to 1 up to rounding


Share = Annotated[float, Ge(0), Le(1)]


@estimator(
    summary="accuracy, then shorter contexts among correct trajectories (default for the reward correct)",
    learns_from="score",
)
def efficient(
    batch: Batch,
    *,
    context_N: Tensor,
    truncated_N: Tensor,
    context_low: float,
    context_high: float,
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

    with A_acc = N(r), or r − mean for ``accuracy="none"``. E is 0 in a group with fewer than two correct trajectories,
    and for a trajectory that was truncated in an emergency. In an all-correct group A_acc = 0 and the guard has no
    effect: shorter contexts win. Introduced here; the accuracy part is that of ``grpo``. Example: at the top of the
    module.

    Biased by: what ``grpo`` is; short contexts, on purpose, in proportion to the pass rate; the anchors, beyond which
    contexts are equal; the clip and the guard, by which A need not sum to zero over a group.

    Args:
        outcome_N: r in [0, 1], the total reward; only r = 1 counts as correct.
        guard: κ in [0, 1].
        accuracy: the ``scale`` of A_acc.
        context_N: C, the largest context of any turn, in tokens.
        context_low, context_high: C_lo and C_hi in tokens, with no cost and full cost; never taken from the group.
        coefficient: λ ≥ 0.
        min_pass_rate: p_min in [0, 1].
        truncated_N: bool, trajectories that earn no E but count in its mean and std.

    Returns:
        float (N, K), constant over the turns of a trajectory.

    Raises:
        ScoreError: an outcome is NaN, infinite or outside [0, 1].
        ValueError: an option, a context or a result turn is out of range.
    """
    _check_unit_interval(batch.outcome_N)
    _check_contexts(context_N, batch.outcome_N)
    if not 0 < context_low < context_high:
        raise ValueError(
            f"the context anchors must satisfy 0 < context_low < context_high, found {context_low} and {context_high}"
        )
    correct_N = batch.outcome_N >= 1 - ROUNDING
    accurate = against_group("R", batch.outcome_N, batch.group_N, scale=accuracy, eps=eps)
    width = torch.tensor(context_high / context_low, dtype=torch.float64).log()
    cost_N = (context_N.double().clamp(context_low, context_high) / context_low).log() / width  # u
    pass_rate_N = mean(correct_N.double(), batch.group_N)
    trust_N = torch.where(pass_rate_N >= min_pass_rate, pass_rate_N, 0.0)  # g(p)
    saving_N = _saving(cost_N, correct_N, batch.group_N, truncated_N)
    numbers = {"C": context_N, "u": cost_N, "g(p)": trust_N, "E": saving_N}
    efficient = Term("λ·g(p)·E", coefficient * trust_N * saving_N, numbers, correct_N)
    unguarded_N = accurate.value_NK + efficient.value_NK
    floor_N = guard * accurate.value_NK
    guarded_N = correct_N & (accurate.value_NK > 0) & (floor_N > unguarded_N)
    kept = Term("guard", floor_N - unguarded_N, {"κ·N(R)": floor_N}, guarded_N)
    advantage_N = torch.where(correct_N, unguarded_N, accurate.value_NK)
    return Estimate(torch.where(guarded_N, floor_N, advantage_N), (accurate, efficient, kept))


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


def _check_contexts(context_N: Tensor, outcome_N: Tensor) -> None:
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


def _check_unit_interval(outcome_N: Tensor) -> None:
    bad = first((outcome_N < -ROUNDING) | (outcome_N > 1 + ROUNDING))
    if bad is not None:
        raise ScoreError(
            f"computing advantages: the outcome of {name_of(bad, outcome_N)} is "
            f"{outcome_N[bad].item()}, wanted a score in [0, 1]. The estimator 'efficient' takes the total of the "
            f"reward as its score: scale the reward, or set algorithm.advantage.estimator=grpo."
        )
