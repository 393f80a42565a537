"""Condensers that keep or drop whole units by their place: ``full``, ``last_k``, ``truncate`` and ``random_drop``.

They leave no placeholder, which would be a reply that the policy never gave. The newest kept unit is never
dropped: if it does not fit by itself, it is returned and the engine stops with ``context_overflow``.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.fit import newest_that_fit
from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.messages import History, Message


@dataclass(frozen=True)
class Full(Condenser):
    """Keeps everything. A history over budget is returned unchanged, and the engine stops with ``context_overflow``."""

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """All units, unchanged."""
        return Condensed(units=history.units)


@dataclass(frozen=True)
class LastK(Condenser):
    """Keeps the first ``keep_first`` and last ``keep_last`` units, then drops the oldest of them until all fit."""

    keep_last: Annotated[int, Ge(0)] = 1  # 0 keeps none
    keep_first: Annotated[int, Ge(0)] = 0

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The kept units."""
        total = len(history.units)
        first = min(self.keep_first, total)
        chosen = (*history.units[:first], *history.units[max(total - self.keep_last, first) :])
        kept = newest_that_fit(chosen, budget.tokens)
        dropped = len(chosen) - len(kept)
        fitted = f", without the {dropped} oldest of them to fit {budget.tokens} tokens" if dropped else ""
        return Condensed(
            units=kept,
            reason="" if len(kept) == total else f"kept {len(chosen)} of {total} units{fitted}",
        )


@dataclass(frozen=True)
class Truncate(Condenser):
    """Drops the oldest units until the rest fits, as an agent without a condenser does.

    ``last_k`` treats the units that it keeps in the same way.
    """

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """As many of the newest units as fit."""
        kept = newest_that_fit(history.units, budget.tokens)
        dropped = len(history.units) - len(kept)
        return Condensed(
            units=kept,
            reason=f"cut off the {dropped} oldest of {len(history.units)} units" if dropped else "",
        )


@dataclass(frozen=True)
class RandomDrop(Condenser):
    """Drops random units until the rest fits, the newest never.

    Every unit has a rank, drawn from the seed, the pinned messages and its turn; the lowest ranks go first. So the
    choice is deterministic, siblings share it, and a unit that was dropped does not come back while others grow.
    """

    seed: int = 0

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units of the highest ranks that fit, in order."""
        units, question = history.units, _digest(history.pinned)
        ranks = {unit.turn: _rank(self.seed, question, unit.turn) for unit in units[:-1]}
        ranked = [*units[-1:], *sorted(units[:-1], key=lambda unit: ranks[unit.turn], reverse=True)]
        kept = {unit.turn for unit in newest_that_fit(ranked[::-1], budget.tokens)}
        dropped = len(units) - len(kept)
        return Condensed(
            units=tuple(unit for unit in units if unit.turn in kept),
            reason=f"dropped {dropped} of {len(units)} units at random" if dropped else "",
        )


@lru_cache(maxsize=1 << 18)
def _rank(seed: int, question: str, turn: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{turn}/{question}".encode(), digest_size=8).digest()


@lru_cache(maxsize=4096)
def _digest(pinned: tuple[Message, ...]) -> str:
    text = "\0".join(f"{message.role}\0{message.text}" for message in pinned)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
