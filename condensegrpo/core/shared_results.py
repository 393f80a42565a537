"""Expensive results: remembered by key, and computed once for all concurrent callers. Standard library only.

a   asks ──── computes ──── result
b           asks ────────── result            awaits the computation of a
c                                   asks ─ result       remembered
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class _Pending(Generic[R]):
    task: asyncio.Task[R]
    waiting: int = 0  # callers


@dataclass(slots=True, eq=False)
class SharedResults(Generic[K, R]):
    """The ``most`` results that were requested last. It serves one event loop after another; failures are forgotten."""

    most: int
    _results: OrderedDict[K, R] = field(default_factory=OrderedDict, init=False)
    _pending: dict[K, _Pending[R]] = field(default_factory=dict, init=False)

    def __contains__(self, key: K) -> bool:
        """Whether the result is remembered or being computed."""
        return key in self._results or key in self._pending

    async def get(self, key: K, compute: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """The result of a key. What ``compute`` raises, all who await this computation get.

        Cancelling a caller affects no other; the computation is cancelled when nobody awaits it any more.
        """
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        loop = asyncio.get_running_loop()
        pending = self._pending.get(key)
        if pending is None or pending.task.get_loop() is not loop:
            pending = self._pending[key] = _Pending(loop.create_task(self._computed(key, compute)))
        pending.waiting += 1
        try:
            return await asyncio.shield(pending.task)
        finally:
            pending.waiting -= 1
            if not pending.waiting:
                pending.task.cancel()
                if self._pending.get(key) is pending:
                    del self._pending[key]

    def forget(self, key: K) -> None:
        """Compute this result again when it is requested again."""
        self._results.pop(key, None)

    async def _computed(self, key: K, compute: Callable[[], Coroutine[Any, Any, R]]) -> R:
        result = self._results[key] = await compute()
        while len(self._results) > self.most:
            self._results.popitem(last=False)
        return result
