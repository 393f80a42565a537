"""The queue of requests: how a driver is called, and what callers see when they cancel, or when it fails or hangs."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from condensegrpo.core.request_queue import Outcomes, QueuedRequest, RequestQueue

Requests = Sequence[QueuedRequest[int, int]]


@dataclass
class Doubling:
    """A driver that doubles numbers. It finishes one request a call, the oldest, or all of them; 13 fails."""

    at_once: bool = False
    calls: list[list[int]] = field(default_factory=list)  # the new requests of each call
    under_way: list[QueuedRequest[int, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.go_on.set()

    def __call__(self, requests: Requests) -> Outcomes[int, int]:
        self.calls.append([request.value for request in requests])
        self.threads.add(threading.get_ident())
        self.begun.set()
        assert self.go_on.wait(20)
        if any(request.value == 13 for request in requests):
            self.under_way.clear()
            raise ValueError("13")
        self.under_way += requests
        for _ in range(len(self.under_way) if self.at_once else 1):
            request = self.under_way.pop(0)
            yield request, LookupError("no 4") if request.value == 4 else 2 * request.value


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def replies(queue: RequestQueue[int, int], numbers: Sequence[int]) -> list[int | BaseException]:
    return await asyncio.gather(*map(queue.submit, numbers), return_exceptions=True)


def test_requests_join_while_others_are_under_way_and_one_thread_drives_them(worker: ThreadPoolExecutor) -> None:
    driver = Doubling()
    queue = RequestQueue(drive=driver, worker=worker)

    async def main() -> list[int]:
        driver.go_on.clear()
        first = asyncio.create_task(queue.submit(1))
        await asyncio.to_thread(driver.begun.wait)
        others = [asyncio.create_task(queue.submit(number)) for number in (2, 3)]
        await asyncio.sleep(0)
        assert queue.open == 3
        driver.go_on.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(main()) == [2, 4, 6]
    assert driver.calls == [[1], [2, 3], []]
    assert len(driver.threads) == 1
    assert queue.open == 0


def test_requests_that_settle_share_batches_of_at_most_so_many(worker: ThreadPoolExecutor) -> None:
    driver = Doubling(at_once=True)
    queue = RequestQueue(drive=driver, worker=worker, most=3, settle=True)
    assert asyncio.run(replies(queue, range(20, 27))) == [40, 42, 44, 46, 48, 50, 52]
    assert driver.calls == [[20, 21, 22], [23, 24, 25], [26]]


def test_callers_that_got_a_reply_share_the_next_batch_with_those_that_came_meanwhile(
    worker: ThreadPoolExecutor,
) -> None:
    driver = Doubling(at_once=True)
    queue = RequestQueue(drive=driver, worker=worker, settle=True)

    async def two_turns(number: int) -> None:
        await queue.submit(await queue.submit(number))

    async def main() -> None:
        driver.go_on.clear()
        first = [asyncio.create_task(two_turns(number)) for number in (1, 3)]
        await asyncio.to_thread(driver.begun.wait)
        last = asyncio.create_task(queue.submit(7))
        await asyncio.sleep(0.02)
        driver.go_on.set()
        await asyncio.gather(*first, last)

    asyncio.run(main())
    assert [sorted(call) for call in driver.calls] == [[1, 3], [2, 6, 7]]


def test_no_more_requests_are_under_way_than_fit(worker: ThreadPoolExecutor) -> None:
    driver = Doubling()
    queue = RequestQueue(drive=driver, worker=worker, most=2, settle=True)
    assert asyncio.run(replies(queue, (1, 2, 3))) == [2, 4, 6]
    assert driver.calls == [[1, 2], [3], []]


@pytest.mark.parametrize("settle", [False, True])
def test_an_error_for_a_request_concerns_it_alone_and_one_of_the_driver_all_under_way(
    worker: ThreadPoolExecutor, settle: bool
) -> None:
    def failure(error: Exception, requests: int) -> Exception:
        return RuntimeError(f"{requests} requests: {error}")

    queue = RequestQueue(drive=Doubling(at_once=True), worker=worker, failure=failure, settle=settle)
    two, none = asyncio.run(replies(queue, (1, 4)))
    assert (two, str(none)) == (2, "no 4")
    assert str(*asyncio.run(replies(queue, (13,)))) == "1 requests: 13"
    if settle:
        assert list(map(str, asyncio.run(replies(queue, (13, 1))))) == ["2 requests: 13"] * 2
    assert asyncio.run(replies(queue, (1,))) == [2]


def test_the_drivers_own_error_is_that_of_its_requests(worker: ThreadPoolExecutor) -> None:
    with pytest.raises(ValueError, match="13"):
        asyncio.run(RequestQueue(drive=Doubling(), worker=worker).submit(13))


def test_a_panic_of_the_driver_is_the_error_of_its_requests_and_the_queue_goes_on(worker: ThreadPoolExecutor) -> None:
    """An extension in Rust raises what is no ``Exception``."""

    def drive(requests: Requests) -> Outcomes[int, int]:
        if requests[0].value == 1:
            raise GeneratorExit("panic")
        return [(request, 2 * request.value) for request in requests]

    queue = RequestQueue(drive=drive, worker=worker)
    with pytest.raises(RuntimeError, match="GeneratorExit: panic"):
        asyncio.run(asyncio.wait_for(queue.submit(1), 20))
    assert asyncio.run(asyncio.wait_for(queue.submit(2), 20)) == 4
    with queue.paused(20):
        pass


def test_a_driver_that_loses_a_request_fails_it_and_the_queue_goes_on(worker: ThreadPoolExecutor) -> None:
    def drive(requests: Requests) -> Outcomes[int, int]:
        return [(request, 2 * request.value) for request in requests if request.value != 1]

    queue = RequestQueue(drive=drive, worker=worker, most_idle_calls=50)
    lost, other = asyncio.run(asyncio.wait_for(replies(queue, (1, 2)), 20))
    assert (str(lost), other) == ("51 calls in a row finished none of the requests: they are lost", 4)
    assert asyncio.run(asyncio.wait_for(queue.submit(3), 20)) == 6


def test_a_worker_that_hangs_outside_of_a_call_fails_the_requests(worker: ThreadPoolExecutor) -> None:
    queue, go_on = RequestQueue(drive=Doubling(), worker=worker, call_seconds=0.3), threading.Event()
    worker.submit(go_on.wait, 20)
    with pytest.raises(TimeoutError, match=r"no result within 0\.3 seconds"):
        asyncio.run(asyncio.wait_for(queue.submit(1), 20))
    go_on.set()
    with queue.paused(20):
        pass
    queue.call_seconds = 20.0
    assert asyncio.run(asyncio.wait_for(queue.submit(2), 20)) == 4


def test_a_worker_that_cannot_begin_fails_the_requests() -> None:
    def begin() -> None:
        raise OSError("no device")

    with ThreadPoolExecutor(1, initializer=begin) as broken:
        queue = RequestQueue(drive=Doubling(), worker=broken)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="initializer failed"):
                asyncio.run(asyncio.wait_for(queue.submit(1), 20))


@pytest.mark.parametrize("settle", [False, True])
def test_a_cancelled_request_is_abandoned_and_the_others_get_their_replies(
    worker: ThreadPoolExecutor, settle: bool
) -> None:
    driver = Doubling(at_once=True)
    queue = RequestQueue(drive=driver, worker=worker, settle=settle)

    async def main() -> list[int]:
        driver.go_on.clear()
        tasks = [asyncio.create_task(queue.submit(number)) for number in (1, 2)]
        await asyncio.to_thread(driver.begun.wait)
        late = [asyncio.create_task(queue.submit(number)) for number in (5, 6)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        late[0].cancel()
        await asyncio.gather(tasks[0], late[0], return_exceptions=True)
        assert queue.open == 2
        driver.go_on.set()
        return [await tasks[1], await late[1]]

    assert asyncio.run(main()) == [4, 12]
    assert not any(5 in call for call in driver.calls), "it was cancelled before the driver saw it"


@pytest.mark.parametrize("settle", [False, True])
def test_event_loops_in_several_threads_share_a_queue(worker: ThreadPoolExecutor, settle: bool) -> None:
    queue = RequestQueue(drive=Doubling(at_once=settle), worker=worker, settle=settle, most=4)

    async def turns(first: int) -> list[int]:
        return [reply for number in range(first, first + 20) for reply in [await queue.submit(number)]]

    async def one_loop(first: int) -> list[list[int]]:
        return await asyncio.gather(*(turns(first + offset) for offset in (0, 100, 200)))

    with ThreadPoolExecutor(3) as loops:
        starts = (1000, 2000, 3000)
        for first, found in zip(starts, loops.map(lambda n: asyncio.run(one_loop(n)), starts), strict=True):
            assert found == [[2 * n for n in range(first + offset, first + offset + 20)] for offset in (0, 100, 200)]


@pytest.mark.parametrize("settle", [False, True])
def test_an_event_loop_that_is_closed_with_requests_does_not_affect_the_next(
    worker: ThreadPoolExecutor, settle: bool
) -> None:
    driver = Doubling()
    queue = RequestQueue(drive=driver, worker=worker, settle=settle)
    driver.go_on.clear()
    unclean = asyncio.new_event_loop()
    tasks = [unclean.create_task(queue.submit(number)) for number in (1, 2)]
    unclean.run_until_complete(asyncio.sleep(0))
    unclean.run_until_complete(asyncio.sleep(0 if settle else 0.01))
    rest = asyncio.all_tasks(unclean) - set(tasks)
    unclean.call_soon(driver.go_on.set)
    unclean.run_until_complete(asyncio.sleep(0))
    assert asyncio.run(queue.submit(3)) == 6
    for task in (*tasks, *rest):  # tidy up, or their destructors complain
        task.cancel()
    unclean.run_until_complete(asyncio.gather(*tasks, *rest, return_exceptions=True))
    unclean.close()


@pytest.mark.parametrize("settle", [False, True])
def test_a_pause_begins_when_nothing_is_under_way_and_requests_wait_for_its_end(
    worker: ThreadPoolExecutor, settle: bool
) -> None:
    driver = Doubling(at_once=settle)
    queue = RequestQueue(drive=driver, worker=worker, settle=settle)

    async def main() -> None:
        driver.go_on.clear()
        under_way = asyncio.create_task(queue.submit(1))
        await asyncio.to_thread(driver.begun.wait)
        with pytest.raises(TimeoutError, match="waiting for 1 requests"), queue.paused(0.01):
            pass
        driver.go_on.set()
        with queue.paused():  # needs no round of the event loop
            calls = len(driver.calls)
            waits = asyncio.create_task(queue.submit(2))
            await asyncio.sleep(0.05)
            assert (await under_way, waits.done(), len(driver.calls)) == (2, False, calls)
        assert await waits == 4

    asyncio.run(main())


def test_queues_that_share_a_worker_take_turns(worker: ThreadPoolExecutor) -> None:
    order = list[str]()

    def countdown(name: str) -> Callable[[Requests], Outcomes[int, int]]:
        left = list[tuple[int, QueuedRequest[int, int]]]()

        def drive(requests: Requests) -> Outcomes[int, int]:
            order.append(name)
            left[:] = [(calls - 1, request) for calls, request in (*left, *((one.value, one) for one in requests))]
            finished, left[:] = [each for each in left if not each[0]], [each for each in left if each[0]]
            return [(request, 0) for _, request in finished]

        return drive

    first, second = (RequestQueue(drive=countdown(name), worker=worker) for name in "ab")

    async def both() -> None:
        tasks = [asyncio.create_task(queue.submit(4)) for queue in (first, second)]
        await asyncio.sleep(0)
        both_wait.set()
        await asyncio.gather(*tasks)

    both_wait = threading.Event()
    worker.submit(both_wait.wait, 20)
    asyncio.run(both())
    assert order == list("abababab")


@pytest.mark.parametrize("settle", [False, True])
def test_a_queue_without_its_worker_fails_all_requests(settle: bool) -> None:
    driver, worker = Doubling(), ThreadPoolExecutor(1)
    queue = RequestQueue(drive=driver, worker=worker, settle=settle)

    async def main() -> list[int | BaseException]:
        driver.go_on.clear()
        tasks = [asyncio.create_task(queue.submit(number)) for number in (1, 2)]
        await asyncio.to_thread(driver.begun.wait)
        worker.shutdown(wait=False, cancel_futures=True)
        driver.go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [reply if isinstance(reply, int) else type(reply) for reply in asyncio.run(main())] == [2, RuntimeError]
    worker.shutdown()
    queue.close()
    queue.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        asyncio.run(queue.submit(3))


def test_closing_fails_what_a_cancelled_call_left_undone() -> None:
    worker, go_on = ThreadPoolExecutor(1), threading.Event()
    queue = RequestQueue(drive=Doubling(), worker=worker)

    async def main() -> None:
        worker.submit(go_on.wait)
        waits = asyncio.create_task(queue.submit(1))
        await asyncio.sleep(0)
        worker.shutdown(wait=False, cancel_futures=True)
        go_on.set()
        worker.shutdown()
        queue.close()
        with pytest.raises(RuntimeError, match="the queue was closed"):
            await waits

    asyncio.run(main())


def test_a_call_that_hangs_fails_its_requests_and_further_ones(worker: ThreadPoolExecutor) -> None:
    driver = Doubling()
    queue = RequestQueue(drive=driver, worker=worker, call_seconds=0.2)
    driver.go_on.clear()
    for number in (1, 2):
        with pytest.raises(TimeoutError, match=r"no result within 0\.2 seconds"):
            asyncio.run(queue.submit(number))
    driver.go_on.set()
    with queue.paused():
        pass
    queue.call_seconds = 20.0
    assert asyncio.run(queue.submit(3)) == 6
