"""The parts of the server mode that need no server: the guard, flags, requests and replies."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import qwen3

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers.vllm.request import sampling_parameters
from condensegrpo.samplers.vllm.settings import ServedModel, ServerSettings
from condensegrpo.samplers.vllm_server.client import reply_of
from condensegrpo.samplers.vllm_server.process import (
    ServerProcess,
    check_free,
    environment,
    server_command,
)
from condensegrpo.samplers.vllm_server.publish import write_weights
from condensegrpo.samplers.vllm_server.server import RequireToken

# --- the guard --------------------------------------------------------------------------------------------------------


def status(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> list[Any]:
    """The messages that a guarded application sends for a request."""
    sent: list[Any] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("status", message.get("code")))

    scope = {"type": kind, "path": path, "headers": list(headers)}
    asyncio.run(RequireToken(application)(scope, receive, send))
    return sent[:1]


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weights", "/inference/v1/generate", "/v1/models", "/"])
def test_no_route_but_health_answers_without_the_token(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert status(path) == [401]
    assert status(path, (b"authorization", b"Bearer wrong")) == [401]
    assert status(path, (b"authorization", b"Bearer secret")) == [200]
    assert status(path, kind="websocket") == [1008]
    assert status("/health") == [200]


def test_a_guard_without_a_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY is empty"):
        status("/health")


# --- flags ------------------------------------------------------------------------------------------------------------


def test_a_command_line_holds_no_token_and_asks_for_exact_logprobs() -> None:
    served = ServedModel(path="model", dtype="bfloat16", max_model_len=100)
    line = server_command(served, ServerSettings(flags=("--max-num-seqs", "8")), host="127.0.0.1", port=1234)
    text = " ".join(line)
    assert "secret" not in text
    assert environment("secret", ServerSettings())["VLLM_API_KEY"] == "secret"
    for wanted in (
        "--model model",
        "--dtype bfloat16",
        "--host 127.0.0.1 --port 1234",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--max-model-len 100",
        "--max-num-seqs 8",
    ):
        assert wanted in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="the flags of a CPU; this machine has a GPU")
def test_on_a_cpu_prompts_are_prefilled_in_one_step() -> None:
    served = ServedModel(path="model", dtype="float32", max_model_len=20000)
    line = server_command(served, ServerSettings(), host="127.0.0.1", port=1)
    assert "--no-enable-chunked-prefill" in line
    assert line[line.index("--max-num-batched-tokens") + 1] == "20000"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the variables of a CPU; this machine has a GPU")
def test_on_a_cpu_functions_are_compiled_where_the_model_is() -> None:
    assert environment("t", ServerSettings())["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment("t", ServerSettings(enforce_eager=False))


def test_a_server_does_not_join_the_learners_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor look for the store of torchrun, which TORCHELASTIC_… has it do at an address of its own."""
    launched = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    for name in launched:
        monkeypatch.setenv(name, "1")
    inside = environment("t", ServerSettings(), device="2,3")
    assert not {*launched} & inside.keys()
    assert inside["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_port_in_use_is_an_error_before_a_model_is_loaded() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SamplerError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            check_free("127.0.0.1", taken.getsockname()[1])


def test_a_failed_start_is_an_error_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")  # a program that ends at once, with code 1
    served = ServedModel(path="model", dtype="float32", max_model_len=8)
    child = ServerProcess(served, ServerSettings(), token="t", log=tmp_path / "log")
    child.check_alive()  # not started: nothing to say
    child.log.write_text("the last words\n")
    child.start()
    assert child._process is not None
    os.waitid(os.P_PID, child._process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(SamplerError, match=r"it ended with code 1(.|\n)*the last words(.|\n)*kv_cache_gib"):
        child.check_alive()
    child.stop()
    child.stop()


def test_the_first_error_is_quoted_from_a_long_log(tmp_path: Path) -> None:
    served = ServedModel(path="model", dtype="float32", max_model_len=8)
    child = ServerProcess(served, ServerSettings(), token="t", log=tmp_path / "log")
    lines = ["loading", "ERROR ValueError: No memory for the cache", *map(str, range(30)), "RuntimeError: see above"]
    child.log.write_text("\n".join(lines))
    said = child.log_excerpt().splitlines()
    assert said[:2] == ["ERROR ValueError: No memory for the cache", "…"]
    assert said[2:] == lines[-12:]
    child.log.write_text("\n".join(lines[-5:]))  # all of it is shown
    assert child.log_excerpt().splitlines() == lines[-5:]


# --- requests and replies ---------------------------------------------------------------------------------------------


def test_a_request_asks_for_ids_and_only_its_own_stops_end_it() -> None:
    asked = sampling_parameters(SamplingParams(max_tokens=9, temperature=0.7, seed=2**62, stop_ids=(2,)))
    assert asked == {
        "max_tokens": 9,
        "temperature": 0.7,
        "seed": 2**62,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [2],
        "detokenize": False,
    }
    assert sampling_parameters(SamplingParams(max_tokens=1, stop_strings=("</tool>",)))["stop"] == ["</tool>"]


CHOICE = {
    "token_ids": [5, 2],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": 1e-8}]},
    "finish_reason": "stop",
    "weight_versions": [{"version": "a:1"}, {"version": "a:2"}],
}


def test_a_reply_is_ids_logprobs_and_the_weights_of_every_span() -> None:
    reply = reply_of({"choices": [CHOICE]})
    assert reply.generation == Generation(token_ids=(5, 2), logprobs=(-0.5, 0.0), finish=FinishReason.STOP)
    assert reply.labels == ("a:1", "a:2")


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"choices": []},
        {"choices": [{**CHOICE, "finish_reason": "error"}]},
        {"choices": [{**CHOICE, "logprobs": None}]},
        {"choices": [{**CHOICE, "token_ids": [5]}]},
        {"choices": [{**CHOICE, "logprobs": {"content": [{"logprob": None}, {"logprob": -1.0}]}}]},
    ],
)
def test_a_reply_of_another_form_is_an_error(broken: dict[str, Any]) -> None:
    with pytest.raises(SamplerError, match=r"reading a server's reply: .*wanted vLLM 0\.32"):
        reply_of(broken)


@pytest.mark.parametrize("logprob", [-9999.0, float("nan")])
def test_a_reply_of_weights_that_have_diverged_is_an_error(logprob: float) -> None:
    """vLLM 0.32 writes -9999 for NaN, and the smaller of NaN and 0 would be 0."""
    with pytest.raises(SamplerError, match="the model's logits are not numbers"):
        reply_of({"choices": [{**CHOICE, "logprobs": {"content": [{"logprob": logprob}, {"logprob": -1.0}]}}]})


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_are_written_as_they_are_in_files_of_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("condensegrpo.samplers.vllm_server.publish.SHARD_BYTES", 4096)
    named = dict(qwen3().named_parameters())
    write_weights(tmp_path / "new", iter(named.items()), torch.float32)
    files = sorted((tmp_path / "new").iterdir())
    assert len(files) > 1
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == named.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())


def test_an_interrupted_write_leaves_no_folder(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "a", torch.zeros(2)
        raise SamplerError("stop here")

    with pytest.raises(SamplerError, match="stop here"):
        write_weights(tmp_path / "new", broken(), torch.float32)
    assert not (tmp_path / "new").exists()
