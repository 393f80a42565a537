"""Several servers behind one sampler: routing, retries, weights and refusals."""

import asyncio
import gc
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted_qwen3, trained_weights
from aiohttp import web
from command import ENVIRONMENT
from forked import ForkedCommand
from safetensors.torch import load_file
from stand_in_server import TOKEN, StandIn, serving
from tiny import qwen3
from torch import distributed
from transformers import AutoConfig
from waiting import eventually

from condensegrpo.config.options import check_plugin
from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import ConfigError, PluginError, SamplerError
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.vllm.settings import TEMPORARY, RequestSettings, ServedModel, ServerSettings
from condensegrpo.samplers.vllm.weights import free_bytes, write_adapters
from condensegrpo.samplers.vllm_server.pool import STARTED_WITH, ReplicaPool, WeightsLabel
from condensegrpo.samplers.vllm_server.process import ServerProcess
from condensegrpo.samplers.vllm_server.publish import FolderPublisher, write_weights
from condensegrpo.samplers.vllm_server.sampler import VllmServerSampler
from condensegrpo.samplers.vllm_server.server import engines_of, shape_of

MODEL = qwen3()
SHAPE = shape_of(MODEL.config)
LORA = LoraSettings(rank=4, alpha=8.0, sampler="native")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    MODEL.save_pretrained(path)
    return str(path)


@pytest.fixture
def shape(folder: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    return shape_of(AutoConfig.from_pretrained(folder))


def pool_of(shape: dict[str, str], weights: WeightsLabel, **options: Any) -> ReplicaPool:
    """A pool of servers of a model that hold these weights."""
    settings = {"requests": RequestSettings(), "token": TOKEN, "start_seconds": 60.0, **options}
    return ReplicaPool(shape=shape, weights=weights, **settings)


DEFAULT = WeightsLabel(label=STARTED_WITH, folder=None)


@contextmanager
def sampling(
    folder: str,
    *servers: StandIn,
    seconds: float = 60.0,
    retries: int = 3,
    weights: str = TEMPORARY,
    lora: LoraSettings | None = None,
) -> Iterator[VllmServerSampler]:
    """A sampler over some servers, whose time limits are all ``seconds``."""
    sampler = VllmServerSampler(
        folder,
        dtype="float32" if lora is None else "bfloat16",
        lora=lora,
        urls=tuple(server.url for server in servers),
        server=ServerSettings(start_seconds=seconds, weights=weights),
        requests=RequestSettings(seconds=seconds, retries=retries),
    )
    try:
        yield sampler
    finally:
        sampler.close()


def ask(sampler: VllmServerSampler, trajectory: str = "t", prompt: tuple[int, ...] = (3, 4)) -> Generation:
    return asyncio.run(sampler.sample(prompt, SamplingParams(max_tokens=4, trajectory=trajectory)))


def ask_all(sampler: VllmServerSampler, count: int, of: str = "") -> list[Generation]:
    """A reply for each of so many trajectories, which two calls share unless they are ``of`` different steps."""

    async def all_at_once() -> list[Generation]:
        asked = (
            sampler.sample((3, number), SamplingParams(max_tokens=4, trajectory=f"{of}{number}"))
            for number in range(count)
        )
        return await asyncio.gather(*asked)

    return asyncio.run(all_at_once())


def adapter_tensors() -> dict[str, torch.Tensor]:
    trained = trained_weights(adapted_qwen3(LORA))
    return {f"base_model.model.{name.replace('.default', '')}": tensor for name, tensor in trained.items()}


@contextmanager
def two(shape: dict[str, str]) -> Iterator[tuple[StandIn, StandIn]]:
    with ExitStack() as stack:
        yield (stack.enter_context(serving(StandIn(shape))), stack.enter_context(serving(StandIn(shape))))


# --- routes -----------------------------------------------------------------------------------------------------------


def test_a_trajectory_stays_with_its_server_and_trajectories_spread(folder: str, shape: dict[str, str]) -> None:
    with two(shape) as servers, sampling(folder, *servers) as sampler:
        ask_all(sampler, 32)
        first = [set(server.prompts) for server in servers]
        ask_all(sampler, 32)
    assert [set(server.prompts) for server in servers] == first
    assert all(len(prompts) >= 8 for prompts in first)
    assert not first[0] & first[1]


def test_other_servers_take_over_from_a_lost_one_and_keep_their_own(folder: str, shape: dict[str, str]) -> None:
    with ExitStack() as stack:
        staying = stack.enter_context(serving(StandIn(shape)))
        going = serving(StandIn(shape))
        gone = going.__enter__()
        sampler = stack.enter_context(sampling(folder, staying, gone))
        ask_all(sampler, 16)
        kept = set(staying.prompts)
        going.__exit__(None, None, None)
        replies = ask_all(sampler, 16)
    assert len(replies) == 16
    assert kept < set(staying.prompts)
    assert len(set(staying.prompts)) == 16


class Started(ServerProcess):
    """A process of the run beside a stand-in, which answers in its place."""

    starts = 0

    def start(self) -> None:
        self.starts += 1
        self.log.write_text("the last words\n")
        self._process = subprocess.Popen(["sleep", "600"])

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()


def test_a_server_of_the_run_that_ended_is_dropped_and_the_last_one_is_an_error(
    shape: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ServedModel(path="model", dtype="float32", max_model_len=8)
    processes = [Started(model, ServerSettings(), token=TOKEN, log=tmp_path / str(place)) for place in range(2)]
    ended = r"sampling from http://\S+: the server ended with code -9, .*train --resume RUN(.|\n)*the last words"
    with ExitStack() as stack:
        contexts = [serving(StandIn(shape)) for _ in processes]
        servers = [context.__enter__() for context in contexts]
        loop = stack.enter_context(BackgroundLoop("test"))
        pool = pool_of(shape, DEFAULT, requests=RequestSettings(seconds=60.0, retries=1))
        both: list[tuple[str, ServerProcess]] = []
        for server, process in zip(servers, processes, strict=True):
            process.url = server.url
            both.append((server.url, process))
        loop.run(pool.open(both))
        stack.callback(lambda: loop.run(pool.close()))

        async def ask_16() -> list[Generation]:
            asked = (pool.sample((3,), SamplingParams(max_tokens=4, trajectory=str(number))) for number in range(16))
            return await asyncio.gather(*asked)

        loop.run(ask_16())
        processes[1].kill()
        contexts[1].__exit__(None, None, None)
        assert len(loop.run(ask_16())) == 16
        assert len(servers[0].prompts) == 16 + 16 - len(servers[1].prompts)
        assert eventually(
            lambda: re.search(f"the vLLM server {servers[1].url} is gone: {ended}", caplog.text) is not None
        )
        loop.run(pool.load(WeightsLabel(label="run:1", folder=str(tmp_path))))
        assert servers[0].label == "run:1"
        processes[0].kill()
        contexts[0].__exit__(None, None, None)
        with pytest.raises(SamplerError, match=rf"2 attempts failed; the last: {ended}"):
            loop.run(pool.sample((3,), SamplingParams(max_tokens=4)))
        with pytest.raises(SamplerError, match=ended):
            loop.run(pool.load(WeightsLabel(label="run:2", folder=str(tmp_path))))
        assert [process.starts for process in processes] == [1, 1]


def test_a_restarted_server_gets_the_weights_before_it_serves(folder: str, shape: dict[str, str]) -> None:
    server = StandIn(shape)
    with ExitStack() as stack:
        first = serving(server)
        first.__enter__()
        port = int(server.url.rpartition(":")[2])
        sampler = stack.enter_context(sampling(folder, server))
        sampler.update(MODEL.named_parameters(), 1)
        first.__exit__(None, None, None)
        new = StandIn(shape)  # the same place, and what it was started with
        stack.enter_context(serving(new, port=port))
        assert ask(sampler).token_ids == (7, 2)
        assert new.label == server.label
        assert new.loaded == server.loaded[-1:]


def test_requests_go_to_the_first_server_that_comes_back_where_all_were_lost(
    folder: str, shape: dict[str, str]
) -> None:
    """Half of them waited ten minutes for the one that did not."""
    with ExitStack() as stack:
        contexts = [serving(StandIn(shape)) for _ in range(2)]
        servers = [context.__enter__() for context in contexts]
        sampler = stack.enter_context(sampling(folder, *servers, seconds=240))
        ask_all(sampler, 8)
        for context in contexts:
            context.__exit__(None, None, None)
        back = stack.enter_context(serving(StandIn(shape), port=int(servers[1].url.rpartition(":")[2])))
        began = time.monotonic()
        ask_all(sampler, 8)
        assert time.monotonic() - began < 120
        assert len(set(back.prompts)) == 8


def test_a_trajectory_stays_with_one_engine_of_a_data_parallel_server(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape, engines=2)) as server, sampling(folder, server) as sampler:
        ask_all(sampler, 16)
        first = dict(zip(server.prompts, server.ranks, strict=True))
        ask_all(sampler, 16)
    assert dict(zip(server.prompts[16:], server.ranks[16:], strict=True)) == first
    assert set(first.values()) == {"0", "1"}


@pytest.mark.parametrize(
    ("line", "engines"),
    [
        (["--port", "1"], "1"),
        (["--data-parallel-size", "4", "-x"], "4"),
        (["--data-parallel-size=8"], "8"),
        (["--data_parallel_size=8"], "8"),
    ],
)
def test_the_engines_of_a_server_are_those_of_its_command_line(line: list[str], engines: str) -> None:
    assert engines_of(line) == engines


def test_servers_join_and_leave_a_run_with_the_file_of_their_urls(
    folder: str, shape: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    caplog.clear()  # of what earlier tests left
    file = tmp_path / "servers"
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(serving(StandIn(shape))) for _ in range(3))
        other = stack.enter_context(serving(StandIn({**shape, "vocab_size": "7"})))
        file.write_text(f"{first.url}\n")
        server = ServerSettings(start_seconds=60.0)
        sampler = VllmServerSampler(folder, urls_file=str(file), server=server, requests=RequestSettings(seconds=60.0))
        stack.callback(sampler.close)
        ask_all(sampler, 16)
        assert len(first.prompts) == 16
        file.write_text(f"{first.url}/\n{second.url}\n{other.url}\n")
        sampler.update(MODEL.named_parameters(), 1)
        # a trajectory that began before the server joined stays where it is: each look begins others
        assert eventually(lambda: bool((ask_all(sampler, 16, of=f"{len(first.prompts)}/"), second.prompts)[1]))
        assert (second.label, second.loaded[-1]) == (first.label, first.loaded[-1])
        assert eventually(lambda: f"{other.url} did not join the run: checking the model" in caplog.text)
        file.write_text("half a ur")
        sampler.update(MODEL.named_parameters(), 2)
        assert "the run keeps its servers" in caplog.text
        assert first.label == second.label
        file.write_text(f"{third.url}\n")  # all others leave
        sampler.update(MODEL.named_parameters(), 3)
        seen = len(first.prompts), len(second.prompts)
        ask_all(sampler, 16)
        assert (len(first.prompts), len(second.prompts), len(third.prompts)) == (*seen, 16)
        assert first.label != third.label
    gc.collect()
    assert "never retrieved" not in caplog.text  # of the server that was refused


def test_a_server_that_loads_weights_which_an_update_replaces_gets_those_of_the_update(shape: dict[str, str]) -> None:
    class Replaced(StandIn):
        """The folder is gone when it loads the first time."""

        async def rpc(self, request: web.Request) -> web.Response:
            if (await request.json())["method"] == "condensegrpo_load" and not self.loaded:
                self.loaded.append("replaced")
                pool.weights = WeightsLabel(label="run:2", folder="/new")
                return web.json_response({"error": {"message": "no such folder"}}, status=500)
            return await super().rpc(request)

    pool = pool_of(shape, WeightsLabel(label="run:1", folder="/old"))
    with serving(Replaced(shape)) as server, BackgroundLoop("test") as loop:
        loop.run(pool.open([(server.url, None)]))
        assert (server.loaded, server.label) == (["replaced", "/new"], "run:2")
        loop.run(pool.close())


def test_a_server_with_weights_that_no_folder_has_gets_those_of_the_first_update(
    shape: dict[str, str], tmp_path: Path
) -> None:
    """As where the model is a Hub id, and an earlier run updated the server: no second run could start."""
    params = SamplingParams(max_tokens=4)
    pool = pool_of(shape, DEFAULT, requests=RequestSettings(retries=0))
    with serving(StandIn(shape, label="earlier:57")) as server, BackgroundLoop("test") as loop:
        loop.run(pool.open([(server.url, None)]))
        with pytest.raises(SamplerError, match=r"does not hold the current weights .*: it gets the next ones"):
            loop.run(pool.sample((3,), params))
        loop.run(pool.load(WeightsLabel(label="run:1", folder=str(tmp_path))))
        assert loop.run(pool.sample((3,), params)).token_ids
        loop.run(pool.close())


@contextmanager
def pools_of_two_ranks(server: StandIn, loop: BackgroundLoop, weights: WeightsLabel) -> Iterator[list[ReplicaPool]]:
    """The first rank's, which watches over the server, and another's."""
    requests = RequestSettings(seconds=60.0, retries=3)
    pools = [pool_of(server.shape, weights, requests=requests, gives_weights=first) for first in (True, False)]

    async def opened() -> None:
        opening = (pool.open([(server.url, None)]) for pool in pools)
        await asyncio.gather(*opening)

    loop.run(opened())
    loop.submit(pools[0].watch(0.1))
    try:
        yield pools
    finally:
        for pool in pools:
            loop.run(pool.close())


@pytest.mark.parametrize("asking", [(0, 1), (1,)])
def test_a_lost_server_gets_the_weights_from_the_first_rank_alone(
    shape: dict[str, str], tmp_path: Path, asking: tuple[int, ...]
) -> None:
    """Both ranks notice at once, or the other one alone, which waits."""
    server, weights = StandIn(shape), WeightsLabel(label="run:3", folder=str(tmp_path))
    with serving(server), BackgroundLoop("test") as loop, pools_of_two_ranks(server, loop, weights) as pools:
        assert server.loaded == [str(tmp_path)]  # as both opened
        server.label = "default"  # it was restarted

        async def ask_from_both() -> list[Generation]:
            params = SamplingParams(max_tokens=4)
            return await asyncio.gather(*(pools[number].sample((3, number), params) for number in asking * 4))

        assert len(loop.run(ask_from_both())) == 4 * len(asking)
        assert server.loaded == [str(tmp_path)] * 2
        assert server.label == "run:3"


# --- retries ----------------------------------------------------------------------------------------------


def test_requests_to_a_failing_server_are_retried_a_bounded_number_of_times(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape, statuses=[500, 503])) as server, sampling(folder, server, retries=2) as sampler:
        assert ask(sampler) == Generation(token_ids=(7, 2), logprobs=(-0.5, -0.25), finish=FinishReason.STOP)
        server.statuses = [500] * 9
        with pytest.raises(SamplerError, match=r"3 attempts failed; the last: .*500: a scripted failure"):
            ask(sampler)
        assert len(server.prompts) == 6


def test_a_refused_request_is_not_retried(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape, statuses=[400])) as server, sampling(folder, server) as sampler:
        with pytest.raises(SamplerError, match="400: a scripted failure"):
            ask(sampler)
        assert len(server.prompts) == 1


def test_a_server_that_never_answers_costs_a_bounded_time(folder: str, shape: dict[str, str]) -> None:
    with (
        serving(StandIn(shape, seconds=60)) as server,
        sampling(folder, server, seconds=0.3, retries=1) as sampler,
    ):
        began = time.monotonic()
        with pytest.raises(SamplerError, match=r"2 attempts failed; the last: .*no answer within 0\.3 seconds"):
            ask(sampler)
    assert time.monotonic() - began < 30


def test_a_server_that_is_gone_for_good_is_an_error_in_a_bounded_time(folder: str, shape: dict[str, str]) -> None:
    with ExitStack() as stack:
        going = serving(StandIn(shape))
        sampler = stack.enter_context(sampling(folder, going.__enter__(), seconds=0.5, retries=1))
        going.__exit__(None, None, None)
        with pytest.raises(SamplerError, match=r"attempts failed; the last: waiting for .*: no sign of life"):
            ask(sampler)
        with pytest.raises(SamplerError, match="no sign of life"):
            sampler.update(MODEL.named_parameters(), 1)
    assert sampler.version == 0


def test_an_unreachable_server_is_an_error_at_the_start(folder: str, shape: dict[str, str]) -> None:
    gone = StandIn(shape, url="http://127.0.0.1:9")
    with pytest.raises(SamplerError, match=r"waiting for http://127\.0\.0\.1:9: no sign of life within 0\.3 seconds"):
        sampling(folder, gone, seconds=0.3).__enter__()


# --- weights ----------------------------------------------------------------------------------------------------------


def test_every_server_gets_every_update_and_drops_its_prefix_cache(folder: str, shape: dict[str, str]) -> None:
    with two(shape) as servers, sampling(folder, *servers) as sampler:
        before = [server.resets for server in servers]
        sampler.update(MODEL.named_parameters(), 7)
        assert sampler.version == 7
        assert servers[0].label == servers[1].label
        assert servers[0].label.endswith(":7")
        assert [server.resets for server in servers] == [count + 1 for count in before]
        last = Path(servers[0].loaded[-1])
        assert list(last.glob("*.safetensors"))
        sampler.update(MODEL.named_parameters(), 7)  # other weights may have the same version
        assert [server.resets for server in servers] == [count + 2 for count in before]
        assert not last.exists()  # of the past nothing is kept


def test_a_server_that_fails_one_call_of_an_update_joins_again_at_once(shape: dict[str, str]) -> None:
    """Servers that the sampler started have no watch: half of them were gone until the next update."""

    class Busy(StandIn):
        refusals = 1

        async def reset(self, request: web.Request) -> web.Response:
            if self.refusals:
                self.refusals -= 1
                return web.json_response({"error": {"message": "busy"}}, status=503)
            return await super().reset(request)

    async def updated(*urls: str) -> list[bool]:
        pool = pool_of(shape, DEFAULT)
        await pool.open([(url, None) for url in urls])
        await pool.load(WeightsLabel(label="run:1", folder="/w1"))
        async with asyncio.timeout(20):
            while not all(replica.ready for replica in pool.replicas):
                await asyncio.sleep(0.05)
        found = [replica.ready for replica in pool.replicas]
        await pool.close()
        return found

    with serving(StandIn(shape)) as well, serving(Busy(shape)) as busy:
        assert asyncio.run(updated(well.url, busy.url)) == [True, True]
        assert (well.label, busy.label) == ("run:1", "run:1")


def test_a_server_that_is_named_twice_is_one(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape)) as server, sampling(folder, server, server) as sampler:
        before = server.resets
        sampler.update(MODEL.named_parameters(), 7)
        assert server.resets == before + 1


def test_a_model_in_the_folder_of_the_updates_stays_and_they_go(
    folder: str, shape: dict[str, str], tmp_path: Path
) -> None:
    """As with server.weights=/shared and model.path=/shared/model: it was removed with the first update."""
    model = shutil.copytree(folder, tmp_path / "model")
    with serving(StandIn(shape)) as server, sampling(str(model), server, weights=str(tmp_path)) as sampler:
        sampler.update(MODEL.named_parameters(), 1)
        sampler.update(MODEL.named_parameters(), 2)
        (update,) = (path for path in tmp_path.glob("*/*") if path.parent != model)
        assert str(update) == server.loaded[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"model"}  # a run that goes on writes its own


def test_a_server_with_another_runs_weights_gets_this_model_first(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape, label="another run:57")) as server, sampling(folder, server) as sampler:
        assert server.loaded == [folder]
        ask(sampler)


def test_a_reply_from_other_weights_is_never_returned(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape)) as server, sampling(folder, server) as sampler:
        sampler.update(MODEL.named_parameters(), 1)
        ours, server.label = server.label, "somebody else's"
        ask(sampler)
        assert server.label == ours
        assert len(server.prompts) == 2  # the first reply was thrown away
        assert server.loaded[-1] == server.loaded[-2]


def test_an_update_during_a_request_is_an_error(folder: str, shape: dict[str, str]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Held(StandIn):
        async def generate(self, request: web.Request) -> web.Response:
            begun.set()
            await asyncio.to_thread(go_on.wait, 60)
            return await super().generate(request)

    with serving(Held(shape)) as server, sampling(folder, server) as sampler:

        async def update_in_between() -> Generation:
            asked = asyncio.create_task(sampler.sample((3, 4), SamplingParams(max_tokens=4)))
            await asyncio.to_thread(begun.wait, 60)
            with pytest.raises(SamplerError, match="to version 1: 1 requests are under way"):
                sampler.update(MODEL.named_parameters(), 1)
            go_on.set()
            return await asked

        assert asyncio.run(update_in_between()).token_ids == (7, 2)
        assert sampler.version == 0


def test_a_cancelled_request_does_not_block_an_update(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape, seconds=30)) as server, sampling(folder, server) as sampler:

        async def give_up() -> None:
            await asyncio.wait_for(sampler.sample((3, 4), SamplingParams(max_tokens=4)), 0.2)

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        sampler.update(MODEL.named_parameters(), 1)
        assert sampler.version == 1


def test_adapters_are_sent_alone_and_requests_name_them(folder: str, shape: dict[str, str]) -> None:
    """A server that lost them gets them again; one with another run's weights gets the base first."""
    server = StandIn(shape, lora_rank=8)
    adapters = adapter_tensors()
    with serving(server), sampling(folder, server, lora=LORA) as sampler:
        assert sampler.takes_adapters
        assert server.loaded == [folder]
        ask(sampler)
        sampler.update(adapters.items(), 1)
        ask(sampler)
        assert server.models == [None, "adapters"]
        assert load_file(Path(server.adapters[-1]) / "adapter_model.safetensors").keys() == adapters.keys()
        ours, server.label = server.label, f"{server.label.partition(':')[0]}:0"  # it missed an update
        ask(sampler)
        assert (len(server.adapters), server.loaded) == (2, [folder])
        server.label = "another run:3"
        ask(sampler)
        assert (len(server.adapters), server.loaded) == (3, [folder, folder])
        assert server.label == ours
        first = Path(server.adapters[-1])
        sampler.update(adapters.items(), 2)
        assert not first.exists()
        with pytest.raises(SamplerError, match="is no weight of its model"):
            sampler.update(MODEL.named_parameters(), 3)


def test_a_server_that_was_restarted_between_requests_gets_its_base_with_the_next_adapters(
    folder: str, shape: dict[str, str]
) -> None:
    """The adapters alone were loaded beside the base that it had started with."""
    server = StandIn(shape, lora_rank=8)
    with serving(server), sampling(folder, server, lora=LORA) as sampler:
        sampler.update(adapter_tensors().items(), 1)
        server.label = "default"
        sampler.update(adapter_tensors().items(), 2)
        assert (server.loaded, server.label[-2:]) == ([folder, folder], ":2")


def test_merged_weights_are_sent_to_servers_that_cannot_compute_adapters(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape, lora_rank=0)) as server:
        with sampling(folder, server, lora=replace(LORA, sampler="auto")) as sampler:
            assert not sampler.takes_adapters
        with pytest.raises(SamplerError, match=r"was started without --enable-lora for this rank.*sampler=merged"):
            sampling(folder, server, lora=LORA).__enter__()


def test_wrong_weights_are_refused_before_a_server_loads_them(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape)) as server, sampling(folder, server) as sampler:
        loaded, named = list(server.loaded), dict(MODEL.named_parameters())
        name = "model.layers.0.mlp.up_proj.weight"
        for given, fault in (
            ({**named, "model.nobody": named[name]}, "'model.nobody' is no weight of its model"),
            ({**named, name: named[name].T}, "has the shape"),
            ({key: value for key, value in named.items() if key != name}, "were not given, the first is"),
        ):
            with pytest.raises(SamplerError, match=fault):
                sampler.update(iter(given.items()), 1)
        assert server.loaded == loaded
        assert sampler.version == 0
        ask(sampler)


def test_weights_that_cannot_be_written_are_an_error_with_the_folder(
    folder: str, shape: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("")
    place = str(tmp_path / "a file" / "in it")
    with (
        serving(StandIn(shape)) as server,
        sampling(folder, server, weights=place) as sampler,
        pytest.raises(SamplerError, match=r"writing weights for the servers into .*in it.*server\.weights"),
    ):
        sampler.update(MODEL.named_parameters(), 1)


def test_a_folder_that_fails_while_weights_are_written_is_an_error_that_all_ranks_can_raise(tmp_path: Path) -> None:
    """safetensors has an error of its own, of a full disk too; only a SamplerError reaches the ranks that wait."""

    def losing(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(2)
        shutil.rmtree(folder)

    with pytest.raises(SamplerError, match=r"writing weights for the servers into .*SafetensorError"):
        write_weights(tmp_path / "new", losing(tmp_path / "new"), torch.float32)
    (tmp_path / "a file").touch()
    with pytest.raises(SamplerError, match=r"writing adapters for vLLM into .*NotADirectoryError.*server\.weights"):
        write_adapters(tmp_path / "a file" / "in it", adapter_tensors().items(), LORA)


def test_a_folder_without_room_for_two_updates_is_an_error_before_anything_is_written(
    folder: str, shape: dict[str, str], tmp_path: Path
) -> None:
    size = sum(weight.nbytes for weight in MODEL.parameters())
    with serving(StandIn(shape)) as server, BackgroundLoop("test") as loop:
        pool = pool_of(shape, DEFAULT)
        loop.run(pool.open([(server.url, None)]))
        updates = tmp_path / "updates"
        room = {updates: 2 * size - 1}
        publisher = FolderPublisher(loop=loop, folder=updates, dtype=torch.float32, nbytes=size, free=room.__getitem__)
        no_room = r"found 0\.00 GB free, wanted 0\.00 GB.*--shm-size=1g.*server\.weights"
        with pytest.raises(SamplerError, match=no_room):
            publisher.check_room()
        with pytest.raises(SamplerError, match=no_room):
            publisher.stage(pool, MODEL.named_parameters(), "run:1")
        assert not list(tmp_path.iterdir())
        room[updates] = 2 * size
        publisher.check_room()
        publisher.stage(pool, MODEL.named_parameters(), "run:1")()
        room[updates] = size  # the first update lies there
        publisher.stage(pool, MODEL.named_parameters(), "run:2")()
        publisher.stage(pool, MODEL.named_parameters(), "run:3")  # the run ends before servers load it
        assert len(list(updates.iterdir())) == 2
        publisher.close()
        assert not list(tmp_path.iterdir())
        loop.run(pool.close())


def test_the_room_of_a_folder_that_is_not_there_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def one_of_two_ranks(rank: int, folder: Path, shape: dict[str, str]) -> None:
    """A rank with a server of its own and room of its own; it writes down what its server loaded and what lay there."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    own = folder / f"rank{rank}"
    with serving(StandIn(shape)) as server, BackgroundLoop("test") as loop:
        pool = pool_of(shape, DEFAULT)
        loop.run(pool.open([(server.url, None)]))
        room = {0: 800, 1: 0}[rank]  # bytes: for two updates of 100 numbers, on the rank that writes
        publisher = FolderPublisher(loop=loop, folder=own, dtype=torch.float32, nbytes=400, free=lambda _: room)
        publisher.check_room()
        for version in (1, 2):
            load = publisher.stage(pool, iter([("weight", torch.full((100,), float(version)))]), f"run:{version}")
            assert (len(server.loaded), pool.weights.label != f"run:{version}") == (version - 1, True)
            load()
            (file,) = Path(server.loaded[-1]).iterdir()
            assert torch.equal(load_file(file)["weight"], torch.full((100,), float(version)))
        (folder / f"loaded{rank}").write_text("\n".join(server.loaded))
        pool.gives_weights = rank == 0  # with servers that the ranks share, the first has them load
        publisher.stage(pool, iter([("weight", torch.zeros(100))]), "run:3")()
        assert (len(server.loaded), pool.weights.label) == (3 - rank, "run:3")
        room = 399
        with pytest.raises(SamplerError, match=r"writing weights for the servers into .*rank0: found 0\.00 GB free"):
            publisher.stage(pool, iter([("weight", torch.zeros(100))]), "run:4")  # raised on both ranks
        loop.run(pool.close())
    distributed.destroy_process_group()


def test_two_ranks_of_a_machine_write_weights_once_for_the_servers_of_both(tmp_path: Path) -> None:
    """Each rank wrote a copy: 8 ranks of a 7B model filled /dev/shm with 16 x 15 GB."""
    code = "import test_vllm_server_replicas as t; t.one_of_two_ranks({}, t.Path({!r}), t.SHAPE)"
    programs = [partial(exec, code.format(rank, str(tmp_path))) for rank in range(2)]
    ranks = [ForkedCommand((), cwd=tmp_path, environment=ENVIRONMENT, program=program) for program in programs]
    for rank in ranks:
        _, errors = rank.communicate(timeout=240)
        assert rank.returncode == 0, errors
    first, second = ((tmp_path / f"loaded{rank}").read_text().splitlines() for rank in range(2))
    assert first == second
    assert {Path(path).parent for path in first} == {tmp_path / "rank0"}
    assert len(list((tmp_path / "rank0").iterdir())) == 1  # the last update
    assert not (tmp_path / "rank1").exists()


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_server_of_another_model_is_refused(folder: str, shape: dict[str, str]) -> None:
    with (
        serving(StandIn({**shape, "vocab_size": "999"})) as server,
        pytest.raises(SamplerError, match="its vocab_size is 999, this run's is 32"),
    ):
        sampling(folder, server).__enter__()


def test_a_wrong_token_is_an_error(folder: str, shape: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "another")
    with serving(StandIn(shape)) as server, pytest.raises(SamplerError, match=r"401, refused: no\. Set VLLM_API_KEY"):
        sampling(folder, server).__enter__()


def test_a_prompt_that_does_not_fit_is_refused_without_a_request(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape, max_model_len=10)) as server, sampling(folder, server) as sampler:
        with pytest.raises(SamplerError, match=r"a prompt of 7 tokens and max_tokens=4 make 11, .* max_model_len=10"):
            ask(sampler, prompt=(3,) * 7)
        assert not server.prompts
        ask(sampler, prompt=(3,) * 6)


def test_a_closed_sampler_is_an_error_and_closes_twice(folder: str, shape: dict[str, str]) -> None:
    with serving(StandIn(shape)) as server:
        with sampling(folder, server) as sampler:
            pass
        sampler.close()
        with pytest.raises(SamplerError, match="was closed"):
            ask(sampler)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"replicas": 0}, "the option replicas is 0, wanted at least 1"),
        ({"urls": "http://here"}, "wanted a list"),
        ({"requests": {"retries": -1}}, r"the option requests\['retries'\] is -1, wanted at least 0"),
        ({"urls": [], "urls_file": "/nowhere"}, "urls_file=/nowhere: No such file"),
        ({"urls_file": "/nowhere"}, "wanted one of them"),
        ({"urls": ["here:8000"]}, "wanted addresses such as http"),
        (
            {"server": {"gpu_memory": 0.5}},
            "has no key 'gpu_memory'. Did you mean 'gpu_memory_utilization'",
        ),
        ({"server": {"kv_cache_gib": 0}}, r"the option server\['kv_cache_gib'\] is 0, wanted greater than 0"),
        ({"server": {"flags": ["--api-key=open"]}}, "is set by condensegrpo"),
        ({"server": {"devices": ["0"]}, "replicas": 2, "urls": ["http://x"]}, "one for each of 2 replicas"),
        ({"server": {"flags": ["--port", "8000"]}}, "--port is set by condensegrpo"),
        ({"server": {"flags": ['--override-generation-config={"top_p": 0.5}']}}, "exact sampling depends on it"),
        ({"server": {"flags": ["--generation_config=auto"]}}, "exact sampling depends on it"),
        ({"server": {"flags": ["--generation-c", "auto"]}}, "--generation-c is set by condensegrpo"),
        ({"server": {"flags": ["--config", "server.yaml"]}}, "--config is set by condensegrpo"),
        ({"top_p": 0.5}, "top_p"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(options: dict[str, Any], fault: str) -> None:
    with pytest.raises((PluginError, ConfigError), match=fault):
        check_plugin("samplers", "vllm_server", {"model_path": "", "dtype": "float32", "urls": ["http://x"], **options})
