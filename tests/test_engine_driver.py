"""How vLLM's engine is driven: its thread, device and stream, and the order of its calls; a stub stands for vLLM."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny import qwen3, tokenizer

from condensegrpo.config.checks import check_values
from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.learner import devices
from condensegrpo.samplers.transformers import TransformersSampler
from condensegrpo.samplers.vllm.driver import Command, EngineDriver, in_new_thread
from condensegrpo.samplers.vllm.engine import VllmEngine, check_sharing

REPLY = Generation(token_ids=(7,), logprobs=(-0.5,), finish=FinishReason.LENGTH)


@dataclass(eq=False)
class Gpu:
    """What CUDA keeps for each thread: a new thread has device 0 and the default stream."""

    threads: threading.local = field(default_factory=threading.local)
    pending: bool = False  # work that a stream has not done yet
    cached: int = 9  # bytes that the allocator keeps

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return int(getattr(self.threads, "device", 0))

    def set_device(self, device: int) -> None:
        self.threads.device = device

    def current_stream(self) -> str:
        return str(getattr(self.threads, "stream", "default"))

    def set_stream(self, stream: str) -> None:
        self.threads.stream = stream

    def Stream(self) -> str:  # noqa: N802  as torch's
        return "a new stream"

    def synchronize(self) -> None:
        self.pending = False

    def empty_cache(self) -> None:
        self.cached = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()
    monkeypatch.setattr(devices, "gpu", fake)
    return fake


@dataclass(eq=False)
class StubEngine:
    """Answers every request in one step, keeps the stream of its creator as vLLM does, and remembers its calls."""

    calls: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)  # calls on another device or stream than its creation
    open: list[str] = field(default_factory=list)
    asleep: set[str] = field(default_factory=set)
    reply: Generation = REPLY

    def __post_init__(self) -> None:
        self.device = -1
        if devices.gpu.is_available():
            devices.gpu.set_stream(f"vLLM's in {threading.get_ident()}")
            self.device, self.stream = devices.gpu.current_device(), devices.gpu.current_stream()

    def called(self, name: str) -> None:
        self.calls.append(name)
        if self.device >= 0 and (self.device, self.stream) != (
            devices.gpu.current_device(),
            devices.gpu.current_stream(),
        ):
            self.elsewhere.append(name)

    def add(self, name: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if params.max_tokens > 9:
            raise ValueError("too long")
        self.called(f"add {name}")
        self.open.append(name)

    def abort(self, names: Sequence[str]) -> None:
        self.open = [name for name in self.open if name not in names]

    def step(self) -> dict[str, Generation]:
        self.called("step")
        done, self.open = self.open, []
        return dict.fromkeys(done, self.reply)

    def load(self, named_tensors: Any) -> None:
        if named_tensors is None:
            raise SamplerError("a weight is missing")
        self.called("load")
        devices.gpu.pending = True

    def sleep(self, *, keep_weights: bool) -> None:
        self.called("sleep" if keep_weights else "sleep without weights")
        self.asleep = {"weights", "kv_cache"}

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        for part in parts:
            if part in self.asleep:
                self.called(f"wake {part}")
                self.asleep.remove(part)

    def close(self) -> None:
        self.called("close")


def driver_of(create: Callable[[], StubEngine]) -> tuple[StubEngine, EngineDriver]:
    engine, thread = in_new_thread(create)
    return engine, EngineDriver(cast(VllmEngine, engine), thread)


def ask(queue: EngineDriver, max_tokens: int = 1) -> Generation:
    return asyncio.run(queue.submit([5], SamplingParams(max_tokens=max_tokens)))


def use(driver: EngineDriver) -> None:
    """All that a run does with an engine."""
    ask(driver)
    driver.sleep(keep_weights=False)
    driver.load([("weight", torch.zeros(1))], 1)
    ask(driver)
    driver.close()
    driver.close()


def test_an_engine_is_used_where_it_was_created_on_the_device_of_its_rank(gpu: Gpu) -> None:
    """A new thread's device is 0, and the first step on another stream than that of its creation copies too early."""
    gpu.set_device(3)
    gpu.set_stream("the learner's")
    engine, driver = driver_of(StubEngine)
    use(driver)
    assert {"add 0/0", "step", "sleep without weights", "wake weights", "load", "close"} <= set(engine.calls)
    assert (engine.device, engine.elsewhere) == (3, [])
    assert (gpu.current_stream(), gpu.pending) == ("the learner's", False)


def test_the_thread_of_the_transformers_sampler_has_the_device_of_its_rank_and_a_stream_of_its_own(
    gpu: Gpu, tmp_path: Path
) -> None:
    """Weights are copied on the caller's stream, and done before the thread samples with them."""
    qwen3().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    gpu.set_device(2)
    sampler = TransformersSampler(str(tmp_path), device="cpu")
    assert sampler._worker.submit(gpu.current_device).result() == 2
    assert sampler._worker.submit(gpu.current_stream).result() == "a new stream"
    gpu.pending = True
    sampler.update(qwen3().named_parameters(), 1)
    assert (gpu.current_stream(), gpu.pending) == ("default", False)
    sampler.sleep(keep_weights=True)
    assert gpu.cached == 0
    sampler.close()


def test_after_a_failed_step_a_refused_request_has_its_own_error_and_closing_wakes_nothing() -> None:
    class Breaks(StubEngine):
        def step(self) -> dict[str, Generation]:
            raise RuntimeError("out of memory")

    async def both() -> list[Any]:
        asked = (queue.submit([5], SamplingParams(max_tokens=tokens)) for tokens in (1, 40))
        return await asyncio.gather(*asked, return_exceptions=True)

    engine, queue = driver_of(Breaks)
    broken, refused = asyncio.run(both())
    assert "out of memory" in str(broken)
    assert "handing vLLM a prompt of 1 tokens: ValueError: too long" in str(refused)
    queue.sleep(keep_weights=True)
    queue.close()
    assert engine.calls[-2:] == ["sleep", "close"]


def test_weights_that_an_update_replaces_are_dropped_and_wake_before_the_cache() -> None:
    engine, queue = driver_of(StubEngine)
    queue.sleep(keep_weights=False)
    queue.load([], 1)
    ask(queue)
    queue.close()
    assert engine.calls == [
        "sleep without weights",
        "wake weights",
        "load",
        "wake kv_cache",
        "add 0/0",
        "step",
        "close",
    ]


def test_a_request_without_an_update_wakes_weights_that_were_kept() -> None:
    engine, queue = driver_of(StubEngine)
    queue.sleep(keep_weights=True)
    queue.sleep(keep_weights=False)  # it sleeps already
    ask(queue)
    queue.load([], 1)
    queue.close()
    assert engine.calls == ["sleep", "wake weights", "wake kv_cache", "add 0/0", "step", "load", "close"]


def test_no_reply_comes_from_weights_that_were_dropped() -> None:
    """Also not after an update that failed in the middle."""
    _, queue = driver_of(StubEngine)
    queue.sleep(keep_weights=False)
    with pytest.raises(SamplerError, match="the weights were dropped when vLLM was put to sleep"):
        ask(queue)
    with pytest.raises(SamplerError, match="a weight is missing"):
        queue.load(cast(Any, None), 1)
    with pytest.raises(SamplerError, match="the weights were dropped"):
        ask(queue)
    queue.load([], 2)
    assert ask(queue) == REPLY
    queue.close()


# --- ranks that share a copy of the model


@dataclass(eq=False)
class Ranks:
    """Two ranks as threads: the command of each in a round is there for both."""

    commands: list[Command | None] = field(default_factory=lambda: [None, None])
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=240))

    def exchange(self, index: int, command: Command) -> list[Command]:
        self.commands[index] = command
        self.together.wait()
        commands = [command for command in self.commands if command is not None]
        self.together.wait()
        return commands

    def drivers(self, *create: Callable[[], StubEngine]) -> tuple[list[StubEngine], list[EngineDriver]]:
        engines, threads = zip(*map(in_new_thread, create), strict=True)
        shared = []
        for index, (stub, thread) in enumerate(zip(engines, threads, strict=True)):
            shared.append(EngineDriver(cast(VllmEngine, stub), thread, partial(self.exchange, index), index))
        return list(engines), shared


def on_both(call: Callable[[EngineDriver], object], queues: Sequence[EngineDriver]) -> list[object]:
    with ThreadPoolExecutor(len(queues)) as ranks:
        return list(ranks.map(call, queues))


def test_ranks_that_share_a_model_make_the_same_calls_whichever_rank_asks() -> None:
    engines, queues = Ranks().drivers(StubEngine, StubEngine)
    first, second = queues
    on_both(lambda queue: queue.sleep(keep_weights=True), queues)
    assert ask(second) == REPLY  # the first rank has no request, and takes part
    with pytest.raises(SamplerError, match="handing vLLM a prompt of 1 tokens: ValueError: too long"):
        ask(first, max_tokens=10)
    on_both(lambda queue: queue.sleep(keep_weights=False), queues)
    on_both(lambda queue: queue.load([], 1), queues)
    assert on_both(ask, queues) == [REPLY, REPLY]
    on_both(lambda queue: queue.close(), queues)
    woken = ["wake weights", "wake kv_cache", "add 1/0", "step"]
    assert engines[0].calls[:9] == [
        *("sleep", *woken),
        *("sleep without weights", "wake weights", "load", "wake kv_cache"),
    ]
    assert engines[0].calls == engines[1].calls
    assert {"add 0/1", "add 1/1"} < set(engines[0].calls)


def test_engines_that_share_a_model_are_used_where_they_were_created(gpu: Gpu) -> None:
    """Also the first step after an update."""
    engines, drivers = Ranks().drivers(StubEngine, StubEngine)
    on_both(use, drivers)
    for engine in engines:
        assert {"step", "sleep without weights", "wake weights", "load", "close"} <= set(engine.calls)
        assert engine.elsewhere == []


def test_ranks_that_sample_different_replies_in_one_step_are_an_error() -> None:
    """Their keys and values, and all later replies, would be of two conversations."""
    other = Generation(token_ids=(8,), logprobs=(-0.5,), finish=FinishReason.LENGTH)
    _, queues = Ranks().drivers(StubEngine, partial(StubEngine, reply=other))
    first, second = queues
    ask(first)
    for queue in (first, second):
        with pytest.raises(SamplerError, match="the ranks sampled different replies in the same step"):
            ask(queue)
    on_both(lambda queue: queue.close(), queues)


@pytest.mark.parametrize("machines", ["abab", "aaabbb", "aab"])
def test_ranks_that_share_a_model_are_neighbours_on_one_machine(machines: str) -> None:
    """Where a launcher deals ranks out in turn, or an odd number on each machine, a group would span two machines."""
    check_sharing("aabb", 2)
    with pytest.raises(SamplerError, match=r"ranks on 2 machines, wanted groups of 2 neighbouring ranks"):
        check_sharing(machines, 2)


def test_staleness_beside_ranks_that_sample_together_is_refused() -> None:
    changes = ("rollout.staleness=1", "algorithm.importance.cap=2", "sampler.name=vllm")
    engine = "sampler.options.engine.tensor_parallel_size"
    with pytest.raises(ConfigError, match=f"rollout.staleness: found 1, and {engine} is 2"):
        check_values(load_config(find_config("quickstart"), [*changes, f"{engine}=2"]))
    check_values(load_config(find_config("quickstart"), [*changes, f"{engine}=1"]))
