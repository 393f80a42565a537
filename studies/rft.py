"""Rejection-sampling fine-tuning as an estimator: what GRPO is compared with, on samples of the same policy.

algorithm.advantage.estimator=studies/rft.py:rft
"""

from torch import Tensor

from condensegrpo.algorithms.advantages import Batch, Estimate, Term, estimator, total


@estimator(summary="1 for a success, else 0", formula="A_i = 1 where correct, else 0")
def rft(batch: Batch, *, correct_N: Tensor) -> Estimate:
    """Imitates successful trajectories, whatever their siblings did; with one update a batch, by plain likelihood.

    Biased by: lucky successes, which it imitates like sound ones; failures, which it does not learn from.
    """
    return total(Term("correct", (correct_N >= 1).double(), {"correct": correct_N}))
