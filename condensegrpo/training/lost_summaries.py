"""Notices that many summaries cannot be used: they train nothing, so training does not unlearn them."""

from collections.abc import Mapping

from condensegrpo.training.streak import Streak

LOST = 0.25  # share of the summaries that are rejected from which a step counts


class SummaryWatch:
    """Counts the steps in which many summaries were rejected."""

    def __init__(self, condenser: str) -> None:
        self._condenser = condenser
        self._streak = Streak()

    def hint(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to say after a step: None while most summaries can be used, or shortly after the last hint."""
        lost = metrics.get("summaries_rejected", 0.0)
        share = lost / written if (written := lost + metrics.get("summaries", 0.0)) else 0.0
        if not self._streak.due(share >= LOST):
            return None
        return (
            f"{share:.0%} of the summaries in step {step} cannot be used. They train nothing, so training does not "
            f"unlearn them, and old results are masked instead. What may help:"
            f"\n  - `condensegrpo inspect RUN`, which shows them and why they were rejected"
            f"\n  - a larger max_tokens of the condenser {self._condenser}, if they are cut off"
            f"\n  - demonstrations of what the condenser shows when it asks for a summary (warm_start.steps)"
            f"\n  - a lower learner.optimiser.lr, if the share has grown in training"
        )
