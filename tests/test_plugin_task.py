"""Tasks of plug-ins: everything happens as on the event loop alone, except that no step blocks it for ever."""

import asyncio
import contextlib
import gc
import inspect
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import ClientSession, web
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually

from condensegrpo.core.plugin_task import Blocked, start_plugin_task, wait_for_task
from condensegrpo.core.threads import ABANDONED

Start = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
VISITS = ContextVar("visits", default=0)


def started(work: Coroutine[Any, Any, Any], name: str = "it", seconds: float = 5.0) -> asyncio.Task[Any]:
    return start_plugin_task(work, name=name, seconds=seconds)


# --- as on the event loop ---------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from(["yield", "set", "wait", "spawn", "raise"]), max_size=6), max_size=5))
def test_everything_happens_in_the_same_order(scripts: list[list[str]]) -> None:
    def happened(start: Start) -> list[str]:
        log: list[str] = []
        waiting = set[str]()

        async def play(name: str, script: list[str], turn: asyncio.Event) -> None:
            for place, act in enumerate(script):
                log.append(f"{name} {place} {act}")
                if act == "yield":
                    await asyncio.sleep(0)
                elif act == "set":
                    turn.set()
                elif act == "wait":
                    waiting.add(name)
                    await turn.wait()
                elif act == "spawn":
                    await asyncio.gather(play(f"{name}a", ["yield"], turn), play(f"{name}b", ["set"], turn))
                else:
                    raise LookupError(name)

        async def run() -> None:
            turn = asyncio.Event()
            tasks = [start(play(str(number), script, turn)) for number, script in enumerate(scripts)]
            ends = asyncio.gather(*tasks, return_exceptions=True)
            while not all(task.done() or str(number) in waiting for number, task in enumerate(tasks)):
                await asyncio.sleep(0)
            turn.set()  # every task has ended or waited
            log.extend(map(repr, await ends))

        asyncio.run(run())
        return log

    assert happened(started) == happened(asyncio.create_task)


async def visit(url: str) -> list[str]:
    """What environments do: limits, threads, processes, tasks, generators, context and HTTP clients."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task in asyncio.all_tasks()
    VISITS.set(VISITS.get() + 1)
    found = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.sleep(20)
            found.append("no timeout")
    with anyio.move_on_after(0.01):
        await anyio.sleep(20)
    found.append(await asyncio.to_thread(lambda: "thread"))

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(9):
                yield number
                await asyncio.sleep(0)
        finally:
            found.append("closed")

    async for number in numbers():  # left early: closed by the loop when it is collected
        if number == 2:
            break
    gc.collect()
    await asyncio.sleep(0.01)
    async with asyncio.TaskGroup() as group:
        inner = group.create_task(asyncio.sleep(0, VISITS.get()), name="inner")
    found.append(f"{inner.get_name()} {inner.result()}")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(5)", stdout=asyncio.subprocess.PIPE)
    found.append((await process.communicate())[0].decode().strip())
    async with ClientSession() as session, session.get(url) as answer:
        found.append(await answer.text())
    async with httpx.AsyncClient(trust_env=False) as client:
        found.append((await client.get(url)).text)
    assert (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)
    return found


@pytest.mark.parametrize("debug", [False, True])
def test_what_environments_use_works(debug: bool) -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def run() -> list[str]:
        app = web.Application()
        app.router.add_get("/", hello)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await started(visit("http://127.0.0.1:{1}/".format(*runner.addresses[0])))
        finally:
            await runner.cleanup()

    found = asyncio.run(run(), debug=debug)
    assert found == ["thread", "closed", "inner 1", "5", "hello", "hello"]
    assert VISITS.get() == 0


# --- never for ever ---------------------------------------------------------------------------------------------------


def test_a_task_that_waits_meanwhile_loses_none_of_its_time() -> None:
    async def run() -> tuple[bool, bool]:
        release = threading.Event()
        patient, blocking = started(asyncio.sleep(0.5)), started(blocks(release), seconds=1.0)
        ends = await asyncio.gather(wait_for_task(patient, 0.6), wait_for_task(blocking, 0.6))
        release.set()
        assert isinstance(blocking.exception(), Blocked)
        return ends[0], ends[1]

    assert asyncio.run(run()) == (True, True)


def test_the_time_of_a_first_step_counts() -> None:
    async def late() -> None:
        time.sleep(0.3)
        for _ in range(50):  # of the loop, which ends its wait in the next two or three
            await asyncio.sleep(0)

    async def run() -> bool:
        return await wait_for_task(started(late()), 0.2)

    assert not asyncio.run(run())


async def blocks(release: threading.Event) -> None:
    await asyncio.sleep(0)
    release.wait(60)


def test_the_limits_of_a_plugin_that_hangs_again_and_again_halve_down_to_a_second() -> None:
    async def run() -> list[str]:
        release, limits = threading.Event(), []
        for _ in range(2):
            await asyncio.wait({task := started(blocks(release), seconds=1.6)})
            limits.append(str(task.exception()).partition(",")[0])
        release.set()
        return limits

    held_up = "it held up the event loop for more than"
    assert asyncio.run(run()) == [f"{held_up} 1.6 seconds", f"{held_up} 1 second"]


def test_one_worker_serves_a_loop_and_ends_with_it() -> None:
    async def run() -> set[int]:
        return set(await asyncio.gather(*(started(ident()) for _ in range(20))))

    async def ident() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    used = asyncio.run(run())
    gc.collect()
    assert len(used) == 1
    assert threading.get_ident() not in used
    assert eventually(
        lambda: not used & {each.ident for each in threading.enumerate() if not each.name.startswith(ABANDONED)}
    )


def test_a_task_that_is_cancelled_before_its_first_step_closes_its_coroutine() -> None:
    async def run() -> None:
        work = asyncio.sleep(20)
        task = started(work)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED

    asyncio.run(run())
