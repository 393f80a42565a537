"""The control that drops units at random: what a choice of units is worth shows against it."""

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from condensegrpo.condensers.spans import spans
from condensegrpo.messages import History, flatten
from condensegrpo.protocols import Budget, Condensed


@dataclass(frozen=True, slots=True)
class RandomDrop:
    """Drops random units until the rest fits, the newest never.

    Every unit has a rank, drawn from the seed, the head and the turn of the unit; the lowest ranks go first. So the
    choice is deterministic, siblings share it, and a unit that was dropped does not come back while others grow.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        index(self.seed)  # a TypeError for what is no whole number

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, Any]]) -> Condensed:
        """The units of the highest ranks that fit, in order. Costs one count for every unit and log2 of them more."""
        total = len(history.units)
        question = hashlib.blake2b(
            "\0".join(f"{message.role}\0{message.content}" for message in history.head).encode(
                "utf-8", "surrogatepass"
            ),
            digest_size=16,
        ).hexdigest()
        older = sorted(range(total - 1), key=lambda position: self._rank(question, history.units[position].turn))

        def kept(dropped: int) -> list[int]:
            return sorted((*older[dropped:], total - 1)) if total else []

        def fits(dropped: int) -> bool:
            return budget.count(flatten(history.head, [history.units[at] for at in kept(dropped)])) <= budget.tokens

        dropped = bisect_left(range(len(older)), True, key=fits)
        return Condensed(
            units=tuple(history.units[position] for position in kept(dropped)),
            spans=spans(history, kept(dropped), budget.count),
            reason=f"dropped {dropped} of {total} units at random" if dropped else "",
        )

    def _rank(self, question: str, turn: int) -> bytes:
        return hashlib.blake2b(f"{self.seed}/{turn}/{question}".encode(), digest_size=8).digest()
