"""``condensegrpo serve``: the command line of the server and its start; what it serves: ``test_vllm_server.py``."""

import re
import shlex
from pathlib import Path

from command import ENVIRONMENT, ROOT, run
from forked import ForkedCommand
from needs_vllm import needs_vllm
from served import save_model

from condensegrpo.samplers.vllm_server.process import free_port


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
def test_a_model_without_a_kernel_is_refused_before_the_server_is_ready(tmp_path: Path) -> None:
    """By the server, which replaces the command: its token is shown first."""
    save_model(tmp_path, head_dim=24)
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_API_KEY"}
    process = ForkedCommand(
        ("serve", "quickstart", f"--model={tmp_path}", f"--port={free_port()}"), cwd=ROOT, environment=clean
    )
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.findall(r"^export VLLM_API_KEY=\S{32}$", err, re.MULTILINE)
    assert "error: starting vLLM on a CPU: the model's attention heads have 24 dimensions, and it has" in err
