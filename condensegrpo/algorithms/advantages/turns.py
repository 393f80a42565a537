"""Estimators that treat the turns up to the first tool result unlike the turns after it. Torch only.

Arguments and suffixes as in ``condensegrpo.algorithms.advantages``, and

    b(t) = 1 for t ≤ result_turn, else 0; 0 for all t of a trajectory without a result

The turn that called the tool is before the result: it was sampled without having seen it. Statistics are over *all*
trajectories of the group, with or without a result. All three come from the repository Multi-Turn-RL-Agent
of https://arxiv.org/abs/2505.11821, whose paper describes MT-GRPO.

One example serves all three, a group with ε = 0 and defaults otherwise:

    trajectory   R^O  R^T  turns  result turn     N(R^O)  N(R^T)  N(R^T+R^O)
    0            0    1    2      −1              −1      −1      −2/√3
    1            1    3    3      1                0       1       1/√3
    2            2    2    2      0                1       0       1/√3
"""

from functools import partial
from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from condensegrpo.algorithms.advantages.estimator import Batch, Estimate, Term, against_group, estimator, total
from condensegrpo.algorithms.advantages.groups import Epsilon, Scale, Singleton
from condensegrpo.algorithms.advantages.table import before_result


@estimator(
    summary="outcome, plus turn rewards on the turns up to the first tool result",
    sees_turn_rewards=True,
)
def ms_grpo(
    batch: Batch, *, coef: float = 1.0, scale: Scale = "std", singleton: Singleton = "zero", eps: Epsilon = 1e-4
) -> Estimate:
    """The outcome for all turns, and the turn rewards for those up to the first tool result.

    A_it = N_ε(R^O)_i + coef · N_ε(R^T)_i · b(t);   without a result b = 0, so N_ε(R^O)_i

    MS-GRPO of the Multi-Turn-RL-Agent repository.

    Biased by: what ``grpo`` is; R^T and R^O are put on one scale before they are added, so that a turn reward that
    hardly varies weighs as much as the outcome; rewards of later turns are credited to the turns before the result; the
    trajectories with a result are a part of those that N(R^T) was centred on, so that theirs need not sum to zero.

    Example (of the module): [−1, −1, ·], [0 + 1, 0 + 1, 0], [1 + 0, 1, ·].

    Args:
        coef: the weight of the turn rewards; 0 is ``grpo``.

    Returns:
        float (N, K), of two values at most in each trajectory.

    Raises:
        ScoreError, ValueError: as every estimator, see ``condensegrpo.algorithms.advantages``.
    """
    compared = partial(against_group, group_N=batch.group_N, scale=scale, singleton=singleton, eps=eps)
    return total(compared("R^O", batch.outcome_N), _before_result(compared("R^T", batch.turn_N), batch, coef))


@estimator(
    summary="as ms_grpo; without a tool result turn and outcome rewards added",
    sees_turn_rewards=True,
)
def mt_grpo(
    batch: Batch, *, coef: float = 1.0, scale: Scale = "std", singleton: Singleton = "zero", eps: Epsilon = 1e-4
) -> Estimate:
    """As ``ms_grpo``, but a trajectory without a tool result has all its rewards on all its turns.

        A_it = N_ε(R^O)_i + coef · N_ε(R^T)_i · b(t)     with a result
        A_it = N_ε(R^T + R^O)_i                          without

    MT-GRPO (https://arxiv.org/abs/2505.11821, turn-level credit assignment), in the form of its repository.

    Biased by: what ``ms_grpo`` is; siblings with and without a result are measured on two scales, so that using a tool
    at all moves a trajectory's advantage, and a group need not sum to zero.

    Example (of the module): [−2/√3, −2/√3, ·], [0 + 1, 0 + 1, 0], [1 + 0, 1, ·].

    Args:
        coef: the weight of the turn rewards where there is a result.

    Returns:
        float (N, K), of two values at most in each trajectory.

    Raises:
        ScoreError, ValueError: as every estimator, see ``condensegrpo.algorithms.advantages``.
    """
    compared = partial(against_group, group_N=batch.group_N, scale=scale, singleton=singleton, eps=eps)
    has_result_N = batch.result_turn_N >= 0
    return total(
        compared("R^O", batch.outcome_N)._replace(applies_NK=has_result_N),
        _before_result(compared("R^T", batch.turn_N), batch, coef),
        compared("R^T + R^O", batch.turn_N + batch.outcome_N)._replace(applies_NK=~has_result_N),
    )


@estimator(
    summary="turn rewards and outcome up to the first tool result, the outcome alone after it",
    sees_turn_rewards=True,
)
def ms_po(
    batch: Batch,
    *,
    gamma: Annotated[float, Ge(0)] = 1.0,
    scale: Scale = "std",
    singleton: Singleton = "zero",
    eps: Epsilon = 1e-4,
) -> Estimate:
    """Two stages: before the first tool result the return of both, after it that of the outcome alone.

        A_it = N_ε(R^T + γ·R^O)_i     where b(t) = 1, and on all turns of a trajectory without a result
        A_it = N_ε(R^O)_i             after the result

    MS-PO of the Multi-Turn-RL-Agent repository.

    Biased by: what ``grpo`` is; whichever of R^T and γ·R^O varies more drowns the other before the result; rewards of
    turns after the result are credited to those before it.

    Example (of the module): [−2/√3, −2/√3, ·], [1/√3, 1/√3, 0], [1/√3, 1, ·].

    Args:
        gamma: γ ≥ 0, what the outcome counts for at the stage before it.

    Returns:
        float (N, K), of two values at most in each trajectory.

    Raises:
        ScoreError, ValueError: as every estimator, see ``condensegrpo.algorithms.advantages``.
    """
    compared = partial(against_group, group_N=batch.group_N, scale=scale, singleton=singleton, eps=eps)
    after_NK = (batch.result_turn_N[:, None] >= 0) & ~before_result(batch.turns_N, batch.result_turn_N)
    both, outcome = compared("R^T + γ·R^O", batch.turn_N + gamma * batch.outcome_N), compared("R^O", batch.outcome_N)
    return total(_at(both, ~after_NK), _at(outcome, after_NK))


def _before_result(turn: Term, batch: Batch, coef: float) -> Term:
    """coef·N(R^T)·b(t)."""
    weighted = turn._replace(name=f"coef·{turn.name}·b(t)", value_NK=coef * turn.value_NK)
    return _at(weighted, before_result(batch.turns_N, batch.result_turn_N))


def _at(term: Term, applies_NK: Tensor) -> Term:
    """A term of whole trajectories at some of their turns."""
    return term._replace(value_NK=term.value_NK[:, None], applies_NK=applies_NK)
