"""``condensegrpo serve``: the server that other runs, and the sampler ``openai``, sample from."""

import contextlib
import json
import re
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from command import ENVIRONMENT, ROOT, run
from forked import ForkedCommand
from needs_vllm import needs_vllm
from recipe_world import make_model
from served import change, gap, save_model, together
from transformers import AutoConfig, AutoModelForCausalLM

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.openai import OpenAISampler
from condensegrpo.samplers.vllm_server import server
from condensegrpo.samplers.vllm_server.process import free_port
from condensegrpo.samplers.vllm_server.sampler import VllmServerSampler
from condensegrpo.storage.trajectories import read_trajectories


def test_the_command_serves_the_configurations_model_on_loopback_with_room_for_its_rollouts() -> None:
    done = run("serve", "quickstart", "model.new=null", "model.path=some/model", "evaluate.variants={}", "--dry-run")
    assert done.returncode == 0, done.stderr
    line = shlex.split(done.stdout)
    values = {flag: line[place + 1] for place, flag in enumerate(line) if flag.startswith("--")} | {}
    assert values["--model"] == "some/model"
    assert values["--host"] == "127.0.0.1"
    assert values["--max-model-len"] == str(64 + 24)


def test_a_missing_policy_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    done = run("serve", "quickstart", f"runs_dir={tmp_path}", "--dry-run")
    assert done.returncode == 2
    assert "there is none in" in done.stderr
    made = tmp_path / "quickstart" / "origin" / "new"
    made.mkdir(parents=True)
    assert str(made) in run("serve", "quickstart", f"runs_dir={tmp_path}", "--dry-run").stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "model"
    make_model(folder, steps=60, head_dim=32)
    bent = {"do_sample": True, "top_k": 1, "repetition_penalty": 1.3}  # of a folder, which may have no effect
    (folder / "generation_config.json").write_text(json.dumps(bent))
    return folder


@dataclass(frozen=True)
class Served:
    """The command as a user started it."""

    process: ForkedCommand
    url: str
    token: str


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    """The command for all tests: a start takes the CPU half a minute. The last one ends it."""
    url = f"http://127.0.0.1:{free_port()}"
    line = (
        "serve",
        "quickstart",
        f"--model={model}",
        f"--port={url.rpartition(':')[2]}",
        "sampler={name: vllm_server, options: {max_model_len: 2048, server: {kv_cache_gib: 0.05}}}",
    )
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_API_KEY"}
    process = ForkedCommand(line, cwd=ROOT, environment=clean)
    deadline = time.monotonic() + 400
    try:
        while True:
            assert process.poll() is None, process.errors()
            assert time.monotonic() < deadline, process.errors()
            with contextlib.suppress(OSError):
                urlopen(f"{url}/health", timeout=5).close()
                break
            time.sleep(0.25)
        (token,) = re.findall(r"^export VLLM_API_KEY=(\S+)$", process.errors(), re.MULTILINE)
        yield Served(process, url, token)
    finally:
        process.kill()


@needs_vllm
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_sampler_openai_gets_the_models_replies_token_by_token(
    served: Served, model: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVED_KEY", served.token)
    sampler = OpenAISampler(f"{served.url}/v1", "policy", key_variable="SERVED_KEY")
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=1, stop_ids=(11,))
    replies = together(sampler, [((5, 6, 7), params), (tuple(range(60, 90)), params)])
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    assert (
        max(gap(policy, (5, 6, 7), replies[0], temperature), gap(policy, range(60, 90), replies[1], temperature)) < 1e-4
    )
    with pytest.raises(SamplerError, match="404, not found"):
        together(OpenAISampler(f"{served.url}/v1", "other", key_variable="SERVED_KEY"), [((5,), params)])


@needs_vllm
def test_the_page_compares_condensers_on_a_served_model(
    served: Served, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "how-to" / "compare-condensers.md").read_text(encoding="utf-8")
    section = page.split("## Compare on a served model", 1)[1]
    (configuration,) = re.findall(r"```yaml\n# served.yaml\n(.*?)```", section, re.DOTALL)
    (line,) = re.findall(r"^condensegrpo (eval .*)$", section, re.MULTILINE)
    name = "Qwen/Qwen2.5-72B-Instruct"
    for before, after in (("http://gpu-box:8000", served.url), (f"model: {name}", "model: policy"), (name, str(model))):
        assert before in configuration
        configuration = configuration.replace(before, after)
    (tmp_path / "served.yaml").write_text(configuration)
    questions = [{"question": f"70 and {number}?", "answer": "72"} for number in range(60)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(question)}\n" for question in questions))
    monkeypatch.setitem(ENVIRONMENT, "SERVED_KEY", served.token)  # type: ignore[arg-type]  # a dict
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line.replace(name, str(model)))]
    done = run(*words, "evaluate.problems=4", "--json", "--save", "saved", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [each["contender"]["condenser"] for each in result["figures"]] == ["full", "last_k", "truncate"]
    saved = sorted((tmp_path / "saved").glob("*.parquet"))
    turns = [turn for file in saved for each in read_trajectories(file) for turn in each.trajectory.turns]
    assert len(saved) == 3
    assert all(len(turn.logprobs) == len(turn.output_ids) > 0 for turn in turns)


@needs_vllm
def test_a_run_of_the_same_model_samples_from_it_with_its_token_and_ctrl_c_ends_it(
    served: Served, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(SamplerError, match="401"):
        VllmServerSampler(str(model), urls=(served.url,))
    monkeypatch.setenv("VLLM_API_KEY", served.token)
    deeper = AutoConfig.from_pretrained(model)
    layers = deeper.num_hidden_layers
    deeper.update({"num_hidden_layers": layers + 1, "layer_types": None})
    deeper.save_pretrained(tmp_path)
    with pytest.raises(SamplerError, match=f"its num_hidden_layers is {layers}, this run's is {layers + 1}"):
        VllmServerSampler(str(tmp_path), urls=(served.url,))
    policy = AutoModelForCausalLM.from_pretrained(model).eval().requires_grad_(False)
    sampler = VllmServerSampler(str(model), urls=(served.url,))
    try:
        change(policy, seed=1)
        sampler.update_weights(policy.named_parameters(), 1)
        (reply,) = together(sampler, [((5, 6, 7), SamplingParams(max_tokens=8, seed=1))])
        assert gap(policy, (5, 6, 7), reply) < 1e-4
    finally:
        sampler.close()
    assert served.process.poll() is None  # the sampler must not end it
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0


@needs_vllm
def test_a_model_without_a_kernel_is_refused_before_the_server_is_ready(tmp_path: Path) -> None:
    save_model(tmp_path, head_dim=24)
    done = run("--model", str(tmp_path), program=server.main)
    assert done.returncode == 1
    assert "error: starting vLLM on a CPU: the model's attention heads have 24 dimensions, and it has" in done.stderr
