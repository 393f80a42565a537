"""``condensegrpo serve``: the server that other runs sample from."""

import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ENVIRONMENT, command, run
from needs_vllm import needs_vllm
from served import ROOM, change, gap, save_model, together

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.vllm_server.process import free_port
from condensegrpo.samplers.vllm_server.sampler import VllmServerSampler
from condensegrpo.samplers.vllm_server.settings import ServerSettings


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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "qwen3"


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command as a user starts it: the process, its URL, and its output."""
    port, said = free_port(), list[str]()
    line = command(
        "serve",
        "quickstart",
        f"--model={folder}",
        f"--port={port}",
        f"sampler={{name: vllm_server, options: {{max_model_len: {ROOM}, server: {{kv_cache_gib: 0.02}}}}}}",
    )
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_API_KEY"}
    with subprocess.Popen(
        line, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        listening = threading.Thread(target=said.extend, args=(process.stdout,), daemon=True)
        listening.start()
        yield process, f"http://127.0.0.1:{port}", said
        process.kill()
        listening.join()


@needs_vllm
def test_a_run_samples_from_it_with_its_token_and_ctrl_c_ends_it(
    folder: Path, server: tuple[subprocess.Popen[str], str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = save_model(folder)
    process, url, said = server
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(SamplerError, match="401"):
        VllmServerSampler(str(folder), urls=(url,), server=ServerSettings(start_seconds=400))
    (token,) = re.findall(r"^export VLLM_API_KEY=(\S+)$", "".join(said), re.MULTILINE)
    monkeypatch.setenv("VLLM_API_KEY", token)
    other = folder.with_name("other")
    save_model(other, layers=3)
    with pytest.raises(SamplerError, match="its num_hidden_layers is 2, this run's is 3"):
        VllmServerSampler(str(other), urls=(url,))
    sampler = VllmServerSampler(str(folder), urls=(url,))
    try:
        change(policy, seed=1)
        sampler.update_weights(policy.named_parameters(), 1)
        (reply,) = together(sampler, [((5, 6, 7), SamplingParams(max_tokens=8, seed=1))])
        assert gap(policy, (5, 6, 7), reply) < 1e-4
    finally:
        sampler.close()
    assert process.poll() is None  # the sampler must not end it
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@needs_vllm
def test_a_model_without_a_kernel_is_refused_before_the_server_is_ready(tmp_path: Path) -> None:
    save_model(tmp_path, head_dim=24)
    done = run("serve", "quickstart", f"--model={tmp_path}", f"--port={free_port()}")
    assert done.returncode == 1
    assert "error: starting vLLM on a CPU: the model's attention heads have 24 dimensions, and it has" in done.stderr
