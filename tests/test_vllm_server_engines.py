"""A real vLLM server with two data-parallel engines: both get every update. Its address joins and leaves a run."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from needs_vllm import needs_vllm
from served import ROOM, change, gap, save_model, together
from transformers import PreTrainedModel

from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.vllm.settings import ServedModel, ServerSettings
from condensegrpo.samplers.vllm_server.process import ServerProcess
from condensegrpo.samplers.vllm_server.sampler import VllmServerSampler
from condensegrpo.samplers.vllm_server.server import TOKEN_VARIABLE

pytestmark = [
    needs_vllm,
    pytest.mark.skipif("LONG_TESTS" not in os.environ, reason="starts six processes of vLLM: LONG_TESTS=1 runs it"),
]
TOKEN, TRAJECTORIES = "a token", 16
COUNTER = re.compile(r'^vllm:prompt_tokens_total\{engine="(\d)".*\} (\S+)$', re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "qwen3"


@pytest.fixture
def policy(folder: Path) -> PreTrainedModel:
    return save_model(folder)


@pytest.fixture
def process(folder: Path, policy: PreTrainedModel) -> Iterator[ServerProcess]:
    settings = ServerSettings(kv_cache_gib=0.02, flags=("--data-parallel-size", "2"))
    model = ServedModel(path=str(folder), dtype="float32", max_model_len=ROOM)
    made = ServerProcess(model, settings, token=TOKEN, log=folder.parent / "log")
    made.start()
    yield made
    made.stop()


def worst_gap(sampler: VllmServerSampler, policy: PreTrainedModel) -> float:
    prompts = [(5, 6, 7, number) for number in range(TRAJECTORIES)]
    params = [SamplingParams(max_tokens=8, seed=each, trajectory=str(each)) for each in range(TRAJECTORIES)]
    replies = together(sampler, list(zip(prompts, params, strict=True)))
    return max(gap(policy, prompt, reply) for prompt, reply in zip(prompts, replies, strict=True))


def computed(process: ServerProcess) -> dict[str, float]:
    """The prompt tokens that each engine has taken."""
    with urlopen(Request(f"{process.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})) as answer:
        return {engine: float(tokens) for engine, tokens in COUNTER.findall(answer.read().decode())}


def test_every_engine_gets_every_update_and_an_address_joins_and_leaves_meanwhile(
    folder: Path, policy: PreTrainedModel, process: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    file, other = tmp_path / "servers", process.url.replace("127.0.0.1", "localhost")
    file.write_text(process.url)
    settings = ServerSettings(start_seconds=600)
    sampler = VllmServerSampler(str(folder), max_model_len=ROOM, urls_file=str(file), server=settings)
    try:
        assert worst_gap(sampler, policy) < 1e-4
        file.write_text(f"{process.url}\n{other}\n")
        change(policy, seed=1)
        sampler.update(policy.named_parameters(), 1)
        before = computed(process)
        assert worst_gap(sampler, policy) < 1e-4
        after = computed(process)
        file.write_text(other)
        change(policy, seed=2)
        sampler.update(policy.named_parameters(), 2)
        assert worst_gap(sampler, policy) < 1e-4
    finally:
        sampler.close()
    taken = [after[engine] - before[engine] for engine in before]
    assert (len(taken), sum(taken)) == (2, 4 * TRAJECTORIES)
    assert all(taken)
