"""The control that drops units at random: the baseline for condensers that choose units."""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from threading import Lock

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
        units, total = history.units, len(history.units)
        indices = _ranking(self.seed, history.pinned).indices(units)
        ranked: list[int] = []  # as many as were needed

        def upcoming() -> Iterator[Unit]:
            for index in indices:
                ranked.append(index)
                yield units[index]

        def first(most: int) -> tuple[Unit, ...]:
            ranked.extend(islice(indices, max(most - len(ranked), 0)))
            return tuple(units[index] for index in sorted(ranked[:most]))

        likely = most_by_their_sum(history, upcoming(), budget)
        kept = first(most_that_fit(total, lambda most: within(history, first(most), budget), likely))
        dropped = total - len(kept)
        return Condensed(units=kept, reason=f"dropped {dropped} of {total} units at random" if dropped else "")


class _Ranking:
    """The turns of the episodes of a question by rank."""

    def __init__(self, seed: int, question: str) -> None:
        self._seed, self._question = seed, question
        self._ranks: list[tuple[bytes, int]] = []  # with turns, the lowest first
        self._lock = Lock()

    def indices(self, units: Sequence[Unit]) -> Iterator[int]:
        """The indices of units: of the newest, then the higher the rank the earlier."""
        yield from range(len(units))[-1:]
        with self._lock:
            for turn in range(len(self._ranks), units[-1].turn if units else 0):
                insort(self._ranks, (self._rank(turn), turn))
            ranks = self._ranks[::-1]
        for _, turn in ranks:
            index = turn if turn < len(units) and units[turn].turn == turn else bisect_left(units, turn, key=_turn)
            if index < len(units) - 1 and units[index].turn == turn:
                yield index

    def _rank(self, turn: int) -> bytes:
        return hashlib.blake2b(f"{self._seed}/{turn}/{self._question}".encode(), digest_size=8).digest()


@lru_cache(maxsize=4096)
def _ranking(seed: int, pinned: tuple[Message, ...]) -> _Ranking:
    text = "\0".join(f"{message.role}\0{message.text}" for message in pinned)
    return _Ranking(seed, hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest())


_turn = attrgetter("turn")
