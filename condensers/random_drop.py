"""The control that drops units at random: the baseline for condensers that choose units."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.condensers.fit import fits, most_that_fit
from condensegrpo.core.account import account
from condensegrpo.core.messages import History, Unit
from condensegrpo.core.protocols import Budget, Condensed


@dataclass(frozen=True, slots=True)
class RandomDrop:
    """Drops random units until the rest fits, the newest never.

    Every unit has a rank, drawn from the seed, the pinned messages and its turn; the lowest ranks go first. So the
    choice is deterministic, siblings share it, and a unit that was dropped does not come back while others grow.
    """

    seed: int = 0

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units of the highest ranks that fit, in order. Costs one count per unit and 2·log2 more."""
        text = "\0".join(f"{message.role}\0{message.content}" for message in history.pinned)
        question = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

        def rank(unit: Unit) -> bytes:
            return hashlib.blake2b(f"{self.seed}/{unit.turn}/{question}".encode(), digest_size=8).digest()

        ranked = sorted(history.units[:-1], key=rank, reverse=True)

        def first(most: int) -> tuple[Unit, ...]:
            return tuple(sorted((*history.units[-1:], *ranked[: most - 1]), key=lambda unit: unit.turn))

        total = len(history.units)
        kept = first(most_that_fit(total, lambda most: fits(history.pinned, first(most), budget)))
        dropped = total - len(kept)
        return Condensed(
            units=kept,
            spans=account(history, kept, budget.count),
            reason=f"dropped {dropped} of {total} units at random" if dropped else "",
        )
