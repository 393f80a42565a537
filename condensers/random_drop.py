"""The control that drops units at random: the baseline for condensers that choose units."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from condensegrpo.condensers.fit import most_by_their_sum, most_that_fit, within
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
        """The units of the highest ranks that fit, in order. Costs a few counts of the kept units."""
        text = "\0".join(f"{message.role}\0{message.content}" for message in history.pinned)
        question = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        units, total = history.units, len(history.units)
        ranks = [_rank(self.seed, unit.turn, question) for unit in units[:-1]]
        places = [*range(total)[-1:], *sorted(range(len(ranks)), key=ranks.__getitem__, reverse=True)]

        def first(most: int) -> tuple[Unit, ...]:
            return tuple(units[place] for place in sorted(places[:most]))

        likely = most_by_their_sum(history, (units[place] for place in places), budget)
        kept = first(most_that_fit(total, lambda most: within(history, first(most), budget), likely))
        dropped = total - len(kept)
        return Condensed(units=kept, reason=f"dropped {dropped} of {total} units at random" if dropped else "")


@lru_cache(maxsize=65536)
def _rank(seed: int, turn: int, question: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{turn}/{question}".encode(), digest_size=8).digest()
