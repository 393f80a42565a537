"""The names that ``algorithm.estimator`` and ``algorithm.loss`` choose from, each in a line. Standard library only.

Here and not beside the functions, so that ``--help`` lists them without waiting for torch; a test compares the two.
"""

from collections.abc import Mapping

ESTIMATORS: Mapping[str, str] = {
    "efficient": "accuracy, then shorter contexts among the right answers (default)",
    "grpo": "the reward against its group",
    "grpo_merged": "turn and outcome rewards added, against the group",
    "ms_grpo": "outcome, plus turn rewards on the turns up to the first tool result",
    "mt_grpo": "as ms_grpo; without a tool result turn and outcome rewards added",
    "ms_po": "turn rewards and outcome up to the first tool result, the outcome alone after it",
    "rloo": "the reward against the mean of the others",
    "reinforce": "the clamped reward against its group",
    "turn_discounted": "grpo, later turns weighing more",
    "gigpo": "grpo, plus a comparison of the visits to one and the same context",
}
SEE_TURN_REWARDS = frozenset({"grpo_merged", "ms_grpo", "mt_grpo", "ms_po"})  # to the others R^T is only logged
LOSSES: Mapping[str, str] = {
    "clipped": "PPO's surrogate, clipped per token (default)",
    "gspo": "clipped per turn, by the turn's mean ratio",
    "cispo": "the ratio bounded as a constant weight, no token without gradient",
    "reinforce": "−A·logp, for one update a batch",
}
