"""``condensegrpo serve``: the command line of the server and its refusals; what it serves: ``test_vllm_server.py``."""

import os
import re
import shlex
import signal
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from command import ENVIRONMENT, ROOT, run
from forked import ForkedCommand
from needs_vllm import needs_vllm
from recipe_world import make_model
from served import change, gap, save_model, together
from transformers import AutoModelForCausalLM

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.vllm_server.process import free_port
from condensegrpo.samplers.vllm_server.sampler import VllmServerSampler


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


@needs_vllm
def test_a_model_that_the_server_does_not_know_is_refused_before_vllm_is_imported(tmp_path: Path) -> None:
    """By the server, which replaces the command: its token is shown first."""
    save_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_API_KEY"}
    process = ForkedCommand(
        ("serve", "quickstart", f"--model={tmp_path}", f"--port={free_port()}"), cwd=ROOT, environment=clean
    )
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.findall(r"^export VLLM_API_KEY=\S{32}$", err, re.MULTILINE)
    assert re.search(rf"^error: .*{tmp_path}.*model type `nobody`", err, re.MULTILINE | re.DOTALL), err


@needs_vllm
@pytest.mark.skipif("LONG_TESTS" not in os.environ, reason="a start of vLLM takes half a minute: LONG_TESTS=1 runs it")
def test_a_run_of_the_same_model_samples_from_the_command_with_its_token_and_ctrl_c_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model", steps=20, head_dim=32)
    url = f"http://127.0.0.1:{free_port()}"
    options = "sampler={name: vllm_server, options: {max_model_len: 2048, server: {kv_cache_gib: 0.05}}}"
    line = ("serve", "quickstart", f"--model={tmp_path / 'model'}", f"--port={url.rpartition(':')[2]}", options)
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_API_KEY"}
    process, deadline = ForkedCommand(line, cwd=ROOT, environment=clean), time.monotonic() + 400
    try:
        while not answers(f"{url}/health"):
            assert process.poll() is None, process.errors()
            assert time.monotonic() < deadline, process.errors()
            time.sleep(0.25)
        (token,) = re.findall(r"^export VLLM_API_KEY=(\S+)$", process.errors(), re.MULTILINE)
        monkeypatch.setenv("VLLM_API_KEY", "wrong")
        with pytest.raises(SamplerError, match="401"):
            VllmServerSampler(str(tmp_path / "model"), urls=(url,))
        monkeypatch.setenv("VLLM_API_KEY", token)
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval().requires_grad_(False)
        sampler = VllmServerSampler(str(tmp_path / "model"), urls=(url,))
        try:
            change(policy, seed=1)
            sampler.update(policy.named_parameters(), 1)
            (reply,) = together(sampler, [((5, 6, 7), SamplingParams(max_tokens=8, seed=1))])
            assert gap(policy, (5, 6, 7), reply) < 1e-4
        finally:
            sampler.close()
        assert process.poll() is None  # the sampler must not end it
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()


def answers(url: str) -> bool:
    try:
        urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True
