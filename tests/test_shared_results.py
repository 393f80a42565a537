"""Results that are shared by those who ask at the same time, and remembered for those who ask later."""

import asyncio

import pytest

from condensegrpo.core.request_queue import SharedResults


class Squares:
    """Computes squares when ``go`` is set, and fails for negative numbers."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.started: list[int] = []
        self.cancelled: list[int] = []

    async def square(self, number: int) -> int:
        self.started.append(number)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        if number < 0:
            raise ValueError("negative")
        return number * number


def test_a_result_is_computed_once_for_all_who_ask_at_the_same_time_and_remembered_in_later_event_loops() -> None:
    shared = SharedResults[int, int](8)

    async def ask(*numbers: int) -> tuple[list[int], list[int]]:
        squares = Squares()
        asked = [asyncio.ensure_future(shared.get(number, lambda n=number: squares.square(n))) for number in numbers]
        await asyncio.sleep(0)
        assert all(number in shared for number in numbers)
        squares.go.set()
        return await asyncio.gather(*asked), squares.started

    assert asyncio.run(ask(2, 3, 2, 2)) == ([4, 9, 4, 4], [2, 3])
    assert asyncio.run(ask(3, 2)) == ([9, 4], [])


def test_only_the_last_results_that_were_asked_for_are_remembered() -> None:
    async def ask(*numbers: int) -> list[int]:
        shared, squares = SharedResults[int, int](2), Squares()
        squares.go.set()
        for number in numbers:
            await shared.get(number, lambda n=number: squares.square(n))
        return squares.started

    assert asyncio.run(ask(1, 2, 1, 3, 1, 2)) == [1, 2, 3, 2]


def test_a_caller_that_is_cancelled_affects_no_other() -> None:
    async def ask() -> None:
        shared, squares = SharedResults[int, int](8), Squares()
        first, second = (asyncio.ensure_future(shared.get(2, lambda: squares.square(2))) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        squares.go.set()
        assert await second == 4
        assert (first.cancelled(), squares.started) == (True, [2])

    asyncio.run(ask())


def test_a_computation_that_nobody_awaits_any_more_is_cancelled_and_starts_again_when_it_is_asked_for() -> None:
    async def ask() -> None:
        shared, squares = SharedResults[int, int](8), Squares()
        first = asyncio.ensure_future(shared.get(2, lambda: squares.square(2)))
        for _ in range(3):  # the caller, its computation, and what that awaits
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        assert 2 not in shared
        again = asyncio.ensure_future(shared.get(2, lambda: squares.square(2)))
        squares.go.set()
        assert await again == 4
        assert (squares.started, squares.cancelled) == ([2, 2], [2])

    asyncio.run(ask())


def test_a_failure_reaches_all_who_wait_and_is_not_remembered() -> None:
    async def ask() -> None:
        shared, squares = SharedResults[int, int](8), Squares()
        squares.go.set()
        both = await asyncio.gather(
            *(shared.get(-2, lambda: squares.square(-2)) for _ in range(2)), return_exceptions=True
        )
        assert [str(error) for error in both] == ["negative", "negative"]
        with pytest.raises(ValueError, match="negative"):
            await shared.get(-2, lambda: squares.square(-2))
        assert squares.started == [-2, -2]
        shared.forget(-2)  # is not there

    asyncio.run(ask())
