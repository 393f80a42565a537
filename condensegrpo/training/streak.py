"""Counts the steps in a row that something lasts, so that a hint comes neither at once nor at every step."""

from dataclasses import dataclass, field

PATIENCE = 3  # steps before the hint
AGAIN = 20  # steps until it is repeated


@dataclass(slots=True)
class Streak:
    """The steps up to now in which something held."""

    steps: int = field(default=0, init=False)

    def due(self, holds: bool) -> bool:
        """Count one more step, and say whether to speak of it now."""
        self.steps = self.steps + 1 if holds else 0
        return self.steps >= PATIENCE and (self.steps - PATIENCE) % AGAIN == 0
