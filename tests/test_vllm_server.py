"""The sampler on a real vLLM server: exact before and after updates; its end if the server is killed."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from adapters import trained_weights
from command import ENVIRONMENT, ROOT, run
from needs_vllm import needs_vllm
from served import LONG, ROOM, change, gap, save_model, together
from transformers import PreTrainedModel

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.learner.checkpoint import FORMAT, Manifest
from condensegrpo.learner.export import export_checkpoint
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.model_folder import load_policy
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.openai import OpenAISampler
from condensegrpo.samplers.vllm_server.sampler import VllmServerSampler
from condensegrpo.samplers.vllm_server.server import TOKEN_VARIABLE
from condensegrpo.storage.trajectories import read_trajectories

pytestmark = needs_vllm
PROMPTS = ((5, 6, 7), (0, 0, 9), (2, 11, 12, 13, 14, 15, 16, 17, 18), (19,), LONG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "qwen3"


@pytest.fixture(scope="module")
def policy(folder: Path) -> PreTrainedModel:
    """The learner's side: its weights are changed and sent by some of the tests. What is served is an export of it."""
    checkpoint = folder.parent / "step_000003"
    model = save_model(checkpoint / "model")
    files = {f"model/{file.name}": file.read_bytes() for file in (checkpoint / "model").iterdir()}
    manifest = Manifest(
        format=FORMAT,
        step=3,
        world_size=1,
        zero_stage=0,
        policy="",
        sizes={name: len(data) for name, data in files.items()},
        hashes={name: sha256(data).hexdigest() for name, data in files.items()},
    )
    (checkpoint / "manifest.json").write_text(json.dumps(asdict(manifest)))
    export_checkpoint(checkpoint, folder, "model", lambda target, step: (target / "README.md").write_text("a card"))
    return model


@pytest.fixture(scope="module")
def sampler(folder: Path, policy: PreTrainedModel) -> Iterator[VllmServerSampler]:
    """One server for all tests."""
    made: VllmServerSampler = build_plugin(
        "samplers",
        "vllm_server",
        {
            "model_path": str(folder),
            "max_model_len": 2048,
            "server": {"kv_cache_gib": 0.05, "start_seconds": 400, "flags": ["--enable-lora", "--max-lora-rank", "8"]},
        },
    )
    yield made
    made.close()


@pytest.fixture
def served(sampler: VllmServerSampler, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the server; its token is in VLLM_API_KEY and in SERVED_KEY, for commands too."""
    (process,) = [replica.process for replica in sampler._pool.replicas]
    assert process is not None
    for name in (TOKEN_VARIABLE, "SERVED_KEY"):
        monkeypatch.setenv(name, process._environment[TOKEN_VARIABLE])
        monkeypatch.setitem(ENVIRONMENT, name, process._environment[TOKEN_VARIABLE])  # type: ignore[arg-type]  # a dict
    return process.url


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, **changes})  # type: ignore[arg-type]  # each test knows its fields


def worst_gap(sampler: Sampler, policy: PreTrainedModel, temperature: float = 1.0) -> float:
    asked = [(prompt, params(temperature=temperature, seed=number)) for number, prompt in enumerate(PROMPTS)]
    replies = together(sampler, asked)
    return max(gap(policy, prompt, reply, temperature) for prompt, reply in zip(PROMPTS, replies, strict=True))


def members(group: int) -> list[int]:
    """The processes of a group, without those that have ended and were not waited for."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state, _, its_group, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            found += [int(process.name)] if int(its_group) == group and state != "Z" else []
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_learner_whatever_the_folder_says(
    sampler: VllmServerSampler, policy: PreTrainedModel, temperature: float
) -> None:
    assert worst_gap(sampler, policy, temperature) < 1e-4


def test_the_token_that_completes_a_stop_string_is_kept(sampler: VllmServerSampler) -> None:
    (free,) = together(sampler, [((5, 6, 7), params(seed=3))])
    text = f"w{free.token_ids[2]}w{free.token_ids[3]}"
    (stopped,) = together(sampler, [((5, 6, 7), params(seed=3, stop_strings=(text,)))])
    assert stopped.finish is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert f"w{stopped.token_ids[-2]}w{stopped.token_ids[-1]}" == text


def test_after_an_update_every_logit_is_new_cached_prompts_included(
    sampler: VllmServerSampler, policy: PreTrainedModel
) -> None:
    (before,) = together(sampler, [(LONG, params(temperature=0.0))])
    change(policy, seed=1)
    sampler.update(policy.named_parameters(), 1)
    (after,) = together(sampler, [(LONG, params(temperature=0.0))])
    assert after.logprobs[0] != before.logprobs[0]
    assert worst_gap(sampler, policy) < 1e-4  # the tied head included, which vLLM holds packed on a CPU
    assert sampler.version == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_sampler_openai_gets_the_models_replies_token_by_token(
    served: str, policy: PreTrainedModel, temperature: float
) -> None:
    sampler = OpenAISampler(f"{served}/v1", "policy", key_variable="SERVED_KEY")
    assert worst_gap(sampler, policy, temperature) < 1e-4
    with pytest.raises(SamplerError, match="404, not found"):
        together(OpenAISampler(f"{served}/v1", "other", key_variable="SERVED_KEY"), [((5,), params())])


def test_the_page_compares_condensers_on_a_served_model(served: str, folder: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "compare-condensers.md").read_text(encoding="utf-8")
    section = page.split("## Compare on a served model", 1)[1]
    (configuration,) = re.findall(r"```yaml\n# served.yaml\n(.*?)```", section, re.DOTALL)
    (line,) = re.findall(r"^condensegrpo (eval .*)$", section, re.MULTILINE)
    name = "Qwen/Qwen2.5-72B-Instruct"
    for before, after in (("http://gpu-box:8000", served), (f"model: {name}", "model: policy"), (name, str(folder))):
        assert before in configuration
        configuration = configuration.replace(before, after)
    (tmp_path / "served.yaml").write_text(configuration)
    questions = [{"question": f"70 and {number}?", "answer": "72"} for number in range(60)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(question)}\n" for question in questions))
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line.replace(name, str(folder)))]
    shorter = ("evaluate.problems=4", "rollout.limits.max_output_tokens=16")
    done = run(*words, *shorter, "--json", "--save", "saved", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [each["contender"]["condenser"] for each in result["figures"]] == ["full", "last_k", "truncate"]
    saved = sorted((tmp_path / "saved").glob("*.parquet"))
    turns = [turn for file in saved for each in read_trajectories(file) for turn in each.trajectory.turns]
    assert len(saved) == 3
    assert all(len(turn.logprobs) == len(turn.output_ids) > 0 for turn in turns)


def test_adapters_alone_reach_a_running_server_whose_base_is_loaded_first(served: str, folder: Path) -> None:
    """Its base is that of other updates; cached prompts are of other adapters."""
    lora = LoraSettings(rank=4, alpha=8.0, sampler="native")
    policy = add_adapters(load_policy(str(folder), dtype="float32"), lora, base=str(folder), seed=0)
    second = VllmServerSampler(str(folder), max_model_len=ROOM, lora=lora, urls=(served,))
    assert second.takes_adapters
    assert worst_gap(second, policy) < 1e-4  # before the first update: B = 0
    draw = torch.Generator().manual_seed(0)
    for version in (1, 2):
        with torch.no_grad():
            for tensor in trained_weights(policy).values():
                tensor += 0.2 * torch.randn(tensor.shape, generator=draw)
        (before,) = together(second, [(LONG, params())])
        sent = {name.replace(".default", ""): tensor for name, tensor in trained_weights(policy).items()}
        second.update([(f"base_model.model.{name}", tensor) for name, tensor in sent.items()], version)
        assert gap(policy, LONG, before) > 0.01
        assert worst_gap(second, policy) < 1e-4
    second.close()


def test_after_its_server_was_killed_a_run_ends_with_the_way_to_resume_it(
    sampler: VllmServerSampler, policy: PreTrainedModel
) -> None:
    """The last test of this server."""
    (process,) = [replica.process for replica in sampler._pool.replicas]
    assert process is not None
    assert process._process is not None
    guard = process._process.pid
    (server,) = map(int, Path(f"/proc/{guard}/task/{guard}/children").read_text().split())
    assert len(members(server)) > 1  # its engine ignores SIGTERM
    ended = r"sampling from http://127\.0\.0\.1:\d+: the server ended with code \d+, .*train --resume RUN(.|\n)*log:\n"

    async def kill_in_between() -> list[Generation | BaseException]:
        asked = [asyncio.create_task(sampler.sample(prompt, params(max_tokens=80))) for prompt in PROMPTS]
        await asyncio.sleep(0.05)
        os.kill(server, signal.SIGKILL)
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = asyncio.run(kill_in_between())
    assert any(isinstance(outcome, SamplerError) for outcome in outcomes)
    with pytest.raises(SamplerError, match=rf"4 attempts failed; the last: {ended}"):
        together(sampler, [(LONG, params())])
    with pytest.raises(SamplerError, match=ended):
        sampler.update(policy.named_parameters(), 2)
    assert members(server) == []


# --- its processes ----------------------------------------------------------------------------------------------------


def test_a_server_ends_with_its_run_and_removes_its_folder(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    program = [sys.executable, "-m", "condensegrpo.samplers.vllm_server.server", "--watched", str(weights), "--help"]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as server:
        assert server.stdin is not None
        server.stdin.close()  # what the kernel does for a run that was killed
        assert server.wait(60) == 128 + signal.SIGKILL
    assert not weights.exists()
