"""Advantages: what a trajectory is worth against its siblings, per turn. Pure functions of tensors; torch only.

Legend of the suffixes: ``_N`` trajectories, ``_K`` turns (K = the most turns of any trajectory), ``_G`` groups.

Every estimator takes a ``Batch`` of the same five columns, so that one can stand for another:

    outcome_N      float, R^O, the reward of the whole trajectory
    turn_N         float, R^T, the sum of its turn rewards
    group_N        int, the group of each trajectory: any labels, in any order
    turns_N        int, how many turns it has
    result_turn_N  int, the first turn whose observation carried a tool result; −1: none

and returns an ``Estimate``: advantage_NK, float of the outcome's type, computed in float64, 0 beyond ``turns_N``, and
the terms that it is the sum of. Statistics are over the trajectories of a group, each counted once however many turns
or rows it made, with ddof = 1:

    N_ε(x)_i = (x_i − mean_g) / (std_g + ε),   g = group_N[i]           scale="none": x_i − mean_g

Equal values give exactly 0, whatever ε; values of a group within 1e-12 of its largest magnitude are equal. A group of
one gives 0 (``singleton="zero"``) or x itself (``"raw"``). Nothing here ever returns NaN or an infinity: a reward that
is not finite or beyond ±1e100, or an advantage beyond single precision, is a ``ScoreError`` that names the trajectory.
A result turn out of range is a ``ValueError`` that says what is allowed. Options are validated by the annotations of
the signature where a configuration is read (``condensegrpo.assembly.learning_signal``).

    estimator.py  ``estimator``: declares a formula of a checked ``Batch`` as an estimator
    outcome.py    one scalar for all turns: grpo, grpo_merged, rloo, reinforce; and turn_discounted
    turns.py      turns before and after the first tool result: ms_grpo, mt_grpo, ms_po
    efficient.py  correctness and context efficiency, decoupled
    fold_grpo.py  the outcome, and turn rewards of single turns
    gigpo.py      turns that were given the very same context
    whiten.py     all of a batch on one scale, after any of them
"""

from condensegrpo.algorithms.advantages.efficient import efficient
from condensegrpo.algorithms.advantages.estimator import (
    Batch,
    Estimate,
    EstimatorPlugin,
    Term,
    against_group,
    estimator,
    total,
)
from condensegrpo.algorithms.advantages.fold_grpo import fold_grpo
from condensegrpo.algorithms.advantages.gigpo import gigpo
from condensegrpo.algorithms.advantages.groups import Epsilon, Scale, Singleton
from condensegrpo.algorithms.advantages.outcome import grpo, grpo_merged, reinforce, rloo, turn_discounted
from condensegrpo.algorithms.advantages.turns import ms_grpo, ms_po, mt_grpo
from condensegrpo.algorithms.advantages.whiten import Moments, moments, whiten

__all__ = [
    "Batch",
    "Epsilon",
    "Estimate",
    "EstimatorPlugin",
    "Moments",
    "Scale",
    "Singleton",
    "Term",
    "against_group",
    "efficient",
    "estimator",
    "fold_grpo",
    "gigpo",
    "grpo",
    "grpo_merged",
    "moments",
    "ms_grpo",
    "ms_po",
    "mt_grpo",
    "reinforce",
    "rloo",
    "total",
    "turn_discounted",
    "whiten",
]
