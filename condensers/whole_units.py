"""Condensers that keep or drop whole units by their place: ``full``, ``last_k``, ``truncate`` and ``random_drop``.

They leave no placeholder, which would be a reply that the policy never gave. The newest kept unit is never
dropped: if it does not fit by itself, it is returned and the engine stops with ``context_overflow``.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.fit import most_by_their_sum, most_that_fit, newest_that_fit, within
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed


@dataclass(frozen=True, slots=True)
class Full:
    """Keeps everything. A history over budget is returned unchanged, and the engine stops with ``context_overflow``."""

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """All units, unchanged."""
        return Condensed(units=history.units)


@dataclass(frozen=True, slots=True)
class LastK:
    """Keeps the first ``keep_first`` and last ``keep_last`` units, then drops the oldest of them until all fit."""

    keep_last: Annotated[int, Ge(0)] = 1  # 0 keeps none
    keep_first: Annotated[int, Ge(0)] = 0

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The kept units. Costs one count for a new unit and a few of the kept ones."""
        total = len(history.units)
        first = min(self.keep_first, total)
        chosen = (*history.units[:first], *history.units[max(total - self.keep_last, first) :])
        kept = newest_that_fit(history, chosen, budget)
        dropped = len(chosen) - len(kept)
        fitted = f", without the {dropped} oldest of them to fit {budget.tokens} tokens" if dropped else ""
        return Condensed(
            units=kept,
            reason="" if len(kept) == total else f"kept {len(chosen)} of {total} units{fitted}",
        )


@dataclass(frozen=True, slots=True)
class Truncate:
    """Drops the oldest units until the rest fits, as an agent without a condenser does.

    ``last_k`` treats the units that it keeps in the same way.
    """

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """As many of the newest units as fit. Costs one count for a new unit and a few of the kept ones."""
        kept = newest_that_fit(history, history.units, budget)
        dropped = len(history.units) - len(kept)
        return Condensed(
            units=kept,
            reason=f"cut off the {dropped} oldest of {len(history.units)} units" if dropped else "",
        )


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
