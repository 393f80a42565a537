"""Models behind OpenAI-compatible endpoints, and every way in which one fails; a real vLLM is in ``test_serve.py``."""

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from answering import Behaviour, completion, endpoint
from command import ROOT
from recipe_world import GSM8K, HELD_OUT, make_model, write
from served import together
from talk import said, tokenizer

from condensegrpo.algorithms.segments import segments
from condensegrpo.api import evaluate
from condensegrpo.assembly.runtime import check_sampler
from condensegrpo.config.load import named_config
from condensegrpo.config.options import build_plugin, check_plugin
from condensegrpo.core.errors import ConfigError, PluginError, RolloutError, SamplerError
from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers.openai import OpenAIChatSampler, OpenAISampler
from condensegrpo.samplers.vllm.settings import RequestSettings
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.training.run_setup import prepare_run

PARAMS = SamplingParams(max_tokens=5, temperature=0.7, seed=3, stop_ids=(2, 9), stop_strings=("</tool>",))
PAGE = (ROOT / "docs" / "how-to" / "compare-condensers.md").read_text(encoding="utf-8")
KEY = "SERVED_KEY"


def exact(ids: Sequence[int], logprobs: Sequence[float | None], finish: str = "stop") -> bytes:
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish, "text": "x"}
    return json.dumps({"choices": [choice]}).encode()


def sample(url: str, **options: Any) -> Generation:
    options = {"requests": RequestSettings(seconds=60, retries=0), **options}
    return asyncio.run(OpenAISampler(url, "big", **options).sample((5, 6), PARAMS))


# --- requests and replies ---------------------------------------------------------------------------------------------


def test_token_ids_go_in_and_come_out_with_log_probabilities() -> None:
    behaviour = Behaviour(body=exact([7, 2], [-0.5, 1e-8]))
    with endpoint(behaviour) as url:
        reply = sample(url, fields={"seed": None, "priority": 1})
    assert reply == Generation(token_ids=(7, 2), logprobs=(-0.5, 0.0), finish=FinishReason.STOP)
    (request,) = behaviour.asked
    assert request["path"] == "/v1/completions"
    assert {name: request[name] for name in ("model", "prompt", "max_tokens", "temperature", "stop_token_ids")} == {
        "model": "big",
        "prompt": [5, 6],
        "max_tokens": 5,
        "temperature": 0.7,
        "stop_token_ids": [2, 9],
    }
    whole = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # whatever the served folder sets
    assert {name: request[name] for name in whole} == whole
    assert "seed" not in request
    assert request["priority"] == 1
    assert behaviour.keys == [None]


def test_a_busy_or_failing_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret-key")
    behaviour = Behaviour(body=exact([7], [-1.0], "length"), statuses=[429, 503])
    with endpoint(behaviour) as url:
        reply = sample(url, key_variable=KEY, requests=RequestSettings(retries=2))
    assert reply.finish is FinishReason.LENGTH
    assert behaviour.keys == ["Bearer secret-key"] * 3


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(status=500, body=b'{"error": {"message": "boom"}}'), " 500: boom"),
        (Behaviour(status=429, body=b"slow down"), "429: slow down"),
        (Behaviour(seconds=2), r"no answer within 0\.5 seconds"),
        (Behaviour(body=b'{"choices": ['), "wanted a JSON object"),
        (Behaviour(body=b"[1]"), "wanted a JSON object"),
        (Behaviour(body=b""), "holds no completion"),
        (Behaviour(body=b'{"choices": []}'), "holds no completion"),
        (Behaviour(body=b'{"choices": [{"text": "x", "finish_reason": "stop"}]}'), "sampler.name=openai_chat"),
        (Behaviour(body=exact([7, 8], [-1.0])), "no token_ids with their logprobs"),
        (Behaviour(body=exact([7], [None])), "no token_ids with their logprobs"),
        (Behaviour(body=exact([7] * 21, [-1.0] * 21)), "the reply has some 21 tokens, and max_tokens was 5"),
        (Behaviour(body=exact([7], [-9999.0])), "not numbers"),
        (Behaviour(status=400, body=b'{"error": {"message": "too long"}}'), "400: too long"),
        (
            Behaviour(status=400, body=b"temperature must be 1"),
            r"must be 1\. .*fields=\{temperature: null\}",
        ),
        (Behaviour(status=404, body=b"no such model"), "404, not found: no such model.*sampler.options.model"),
        (Behaviour(status=307, body=b"there"), "307, a redirect, which is refused. Check sampler.options.url"),
        (Behaviour(status=401, body=b"secret-key is wrong"), r"401, refused: \*\*\* is wrong.*key_variable"),
        (Behaviour(status=400, body=b"x" * 479 + b" http://ana:secret-pw@host/v1"), r"400: x+ http://\*\*\*@"),
        (Behaviour(body=b"x" * ((64 << 20) + 1)), "exceeds 64 MiB"),
    ],
)
def test_what_a_server_does_wrong_is_said_with_its_address(
    behaviour: Behaviour, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "secret-key")
    with endpoint(behaviour) as url, pytest.raises(SamplerError, match=message) as error:
        sample(url, key_variable=KEY, requests=RequestSettings(seconds=0.5 if behaviour.seconds else 60, retries=0))
    assert f"{url}/completions" in str(error.value) or "not numbers" in message
    assert "secret-" not in str(error.value)


def test_a_server_that_is_not_there_is_an_error() -> None:
    with endpoint(Behaviour()) as url:
        pass
    with pytest.raises(SamplerError, match="completions: ClientConnectorError"):
        sample(url)


def test_open_requests_are_bounded_in_any_event_loop() -> None:
    behaviour = Behaviour(body=exact([7], [-1.0]), meeting=threading.Barrier(2))
    with endpoint(behaviour) as url:
        sampler = OpenAISampler(url, "big", concurrency=2)
        for _ in range(2):  # every step of a run has its own event loop
            together(sampler, [((5,), PARAMS)] * 8)
    assert behaviour.most_at_once == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://ana:pw@host/v1"}, "url holds a user or password"),
        ({"url": "host:8000"}, "url is 'host:8000'"),
        ({"url": "http://host/v1", "key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ],
)
def test_an_address_or_a_key_that_cannot_be_used_is_refused_before_a_request(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        check_plugin("samplers", "openai", {"model": "big", **options})


@pytest.mark.parametrize("name", ["openai", "openai_chat"])
def test_training_is_refused_with_what_to_use(name: str, tmp_path: Path) -> None:
    sampler = f"sampler={{name: {name}, options: {{url: 'http://localhost:1/v1', model: big}}}}"
    config = named_config("quickstart", [sampler, f"runs_dir={tmp_path}", "rollout.answer_form=null"])
    with pytest.raises(ConfigError, match=f"found {name}, whose model cannot be given new weights. Train with .*vllm"):
        prepare_run(config)


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_endpoint_gives_the_ids_of_its_text_without_log_probabilities(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    messages = (
        Message(role="user", content="go"),
        Message(role="assistant", content="<tool>{}</tool>"),
        Message(role="tool", content="Error: it cannot be read", tool_call_id="call_0"),
    )
    behaviour = Behaviour(body=completion("hello</tool> and more"))
    with endpoint(behaviour) as url:
        supplied = {"model_path": str(tmp_path)}
        sampler: OpenAIChatSampler = build_plugin("samplers", "openai_chat", {"url": url, "model": "big"}, supplied)
        reply = asyncio.run(sampler.reply(messages, PARAMS))
        behaviour.body = completion("hello</tool> and more", finish="length")  # behind the stop string
        assert asyncio.run(sampler.reply(messages, PARAMS)) == reply
        behaviour.body = completion("hello", finish="length")
        assert asyncio.run(sampler.reply(messages, PARAMS)).finish is FinishReason.LENGTH
        behaviour.body = completion(
            [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}], finish="max_tokens"
        )
        assert asyncio.run(sampler.reply(messages, PARAMS)).token_ids == tuple(said("hello")[:-1])
        behaviour.body = completion("", finish="content_filter")
        with pytest.raises(SamplerError, match="the server ended the reply by 'content_filter'"):
            asyncio.run(sampler.reply(messages, PARAMS))
        behaviour.body = completion("w" * (64 * 4 * 5 + 64))
        with pytest.raises(SamplerError, match="the reply has some 21 tokens, and max_tokens was 5"):
            asyncio.run(sampler.reply(messages, PARAMS))
        behaviour.body = completion({"text": "hello"})
        with pytest.raises(SamplerError, match="the reply is no text"):
            asyncio.run(sampler.reply(messages, PARAMS))
    assert reply == Generation(token_ids=(*said("hello</tool>")[:-1], 2), logprobs=(), finish=FinishReason.STOP)
    first = behaviour.asked[0]
    assert first["path"] == "/v1/chat/completions"
    assert [(message["role"], message["content"]) for message in first["messages"]] == [
        ("user", "go"),
        ("assistant", "<tool>{}</tool>"),
        ("user", "Error: it cannot be read"),
    ]


def test_an_evaluation_by_text_says_so_and_cannot_be_trained_on(tmp_path: Path) -> None:
    make_model(tmp_path / "model", steps=0)
    data = write(tmp_path / "rows.jsonl", GSM8K)
    with endpoint(Behaviour(body=completion("so <answer>72</answer>"))) as url:
        result = evaluate(
            "gsm8k",
            f"task.data={data}",
            f"task.eval_data={write(tmp_path / 'held_out.jsonl', HELD_OUT)}",
            f"sampler={{name: openai_chat, options: {{url: '{url}', model: big}}}}",
            "rollout.limits={max_context_tokens: 900, max_output_tokens: 40}",
            "rollout.answer_form=null",
            "evaluate.problems=1",
            model=tmp_path / "model",
            save=tmp_path / "saved",
        )
    assert result.metrics["text_turns"] == result.metrics["turns"] == 1
    (scored,) = read_trajectories(tmp_path / "saved" / "held-out.parquet")
    assert scored.trajectory.turns[0].is_text
    assert scored.figures.text_turns == 1
    with pytest.raises(RolloutError, match="text and not the sampled tokens"):
        segments(scored.trajectory, advantage_K=(1.0,), weight_K=(1.0,))


def test_a_chat_endpoint_cannot_say_how_sure_it_is() -> None:
    sampler = "sampler={name: openai_chat, options: {url: 'http://localhost:1/v1', model: big}}"
    config = named_config("quickstart", [sampler, "rollout.stop_when_confident={}", "rollout.answer_form=null"])
    with pytest.raises(ConfigError, match="openai_chat knows no probability of a draft"):
        check_sampler(config)
