"""The control that drops units at random: the baseline for condensers that choose units."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from condensegrpo.condensers.fit import most_by_their_sum, most_that_fit, within
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed


@dataclass(frozen=True, slots=True)
class RandomDrop:
    """Drops random units until the rest fits, the newest never.

    Every unit has a rank, drawn from the seed, the pinned messages and its turn; the lowest ranks go first. So the
    choice is deterministic, siblings share it, and a unit that was dropped does not come back while others grow.
    """

    seed: int = 0

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units of the highest ranks that fit, in order. Costs a few counts of the kept units."""
        units, question = history.units, _digest(history.pinned)

        def rank(index: int) -> tuple[bool, bytes]:
            return index == len(units) - 1, _rank(self.seed, question, units[index].turn)

        ranked = sorted(range(len(units)), key=rank, reverse=True)

        def first(most: int) -> tuple[Unit, ...]:
            return tuple(units[index] for index in sorted(ranked[:most]))

        likely = most_by_their_sum(history, (units[index] for index in ranked), budget)
        kept = first(most_that_fit(len(units), lambda most: within(history, first(most), budget), likely))
        dropped = len(units) - len(kept)
        return Condensed(units=kept, reason=f"dropped {dropped} of {len(units)} units at random" if dropped else "")


@lru_cache(maxsize=1 << 18)
def _rank(seed: int, question: str, turn: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{turn}/{question}".encode(), digest_size=8).digest()


@lru_cache(maxsize=4096)
def _digest(pinned: tuple[Message, ...]) -> str:
    text = "\0".join(f"{message.role}\0{message.text}" for message in pinned)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
