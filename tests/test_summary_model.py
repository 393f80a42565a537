"""The condenser ``summary_model``: a real endpoint in a thread, a real tiny model, and every way in which they fail."""

import asyncio
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import Behaviour, completion, endpoint
from conformance import PINNED, answered, budget, check_account, count, history, statuses
from talk import engine, tokenizer
from test_summary import OVER, kinds, play, talker
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from condensegrpo.algorithms import segments
from condensegrpo.assembly.build import build_condenser
from condensegrpo.condensers.summary_model import SummaryModel
from condensegrpo.config.use import CondenserUse
from condensegrpo.core.condenser import Budget, Condensed, WrittenSummary, with_tokens
from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import flatten
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.samplers.writers import LocalWriter, on_rank, open_writer

PAST = history(*(answered(turn, f"think {turn}", "o" * 60) for turn in range(4)))  # 23 + 4·75 tokens


def served(model: str, url: str | None, **options: Any) -> SummaryModel:
    return SummaryModel(model, url, open_writer=open_writer, **options)


def local(model: Path | str, **options: Any) -> SummaryModel:
    return served(str(model), None, **options)


def condense(condenser: SummaryModel, tokens: int = 250, past: Any = PAST) -> Condensed:
    past = with_tokens(past, count)
    found = asyncio.run(condenser.condense(past, Budget(tokens=tokens - count(past.pinned), prompt_tokens=tokens)))
    check_account(past, found)
    return found


def test_another_model_writes_the_summary_from_the_conversation_so_far() -> None:
    behaviour = Behaviour()
    with endpoint(behaviour) as url:
        found = condense(served("small", url, max_tokens=50))
    assert found.note is not None
    assert (found.note.reply.text, found.note.turn) == ("facts: a=1", 2)
    assert "summarised above: 225 tokens" in found.note.results[0].text
    assert statuses(PAST, found) == "rrrk"
    assert found.units == (found.note, PAST.units[3])
    (asked,) = behaviour.asked
    assert (asked["path"], asked["model"], asked["max_tokens"]) == ("/v1/chat/completions", "small", 50)
    (message,) = asked["messages"]
    for text in ("[system]\nbe brief", "[user]\nwhy?", "[assistant]\nthink 2", "o" * 60, "at most 50 tokens"):
        assert text in message["content"]
    assert "think 3" not in message["content"], "what stays is not summarised"
    assert behaviour.keys == [None]


def test_a_conversation_of_megabytes_is_sent_without_a_warning() -> None:
    behaviour = Behaviour()
    with endpoint(behaviour) as url:
        found = condense(
            served("small", url),
            past=history(*(answered(turn, "t", "o" * 10**6) for turn in (0, 1, 2))),
            tokens=2 * 10**6,
        )
    assert found.note is not None, found.reason
    assert len(behaviour.asked[0]["messages"][0]["content"]) > 2 * 10**6


def test_a_key_comes_from_the_environment_and_from_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour = Behaviour()
    with endpoint(behaviour) as url:
        with pytest.raises(PluginError, match="SUMMARY_KEY"):
            build({"model": "m", "url": url, "key_variable": "SUMMARY_KEY"})
        monkeypatch.setenv("SUMMARY_KEY", "abc")
        condense(served("m", url, key_variable="SUMMARY_KEY"))
    assert behaviour.keys == ["Bearer abc"]


def build(options: dict[str, Any]) -> Any:
    return build_condenser(CondenserUse(name="summary_model", options=options))


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(seconds=5), "no answer within 0.3 seconds"),
        (Behaviour(trickle=0.05), "no answer within 0.3 seconds"),
        (Behaviour(body=completion("")), "it is empty"),
        (Behaviour(body=completion(None)), "it is empty"),
        (Behaviour(body=completion(7)), "the reply is no text: "),
        (Behaviour(body=completion(None, finish="length")), "m used all 256 tokens of a summary without a text"),
        (Behaviour(body=completion("I cannot", finish="content_filter")), "the server ended the reply by 'content_fil"),
        (Behaviour(status=500, body=completion("facts: a=1")), "500: "),
        (Behaviour(body=completion("cut off", finish="length")), "it was cut off by its length"),
        (Behaviour(body=completion("w" * 2500)), "with it the units have 2"),
    ],
    ids=[
        "silent",
        "trickles",
        "empty",
        "null",
        "number",
        "thoughts",
        "filtered",
        "500",
        "cut",
        "10x",
    ],
)
def test_an_endpoint_that_fails_is_a_typed_refusal_and_never_a_summary(behaviour: Behaviour, reason: str) -> None:
    """langchain #38352, deepagents #270: error texts that were stored as the summary."""
    late = "no answer within" in reason
    with endpoint(behaviour) as url:
        condenser = served("m", url, seconds=0.3 if late else 60.0)
        found = condense(condenser)
        assert (found.note, found.rejected) == (None, ())
        asking = f"asking {url}/chat/completions: "
        assert f"no summary can be used: {reason}" in found.reason.replace(asking, "")
        assert "masked the results of" in found.reason
        assert count(flatten(PINNED, found.units)) <= 250
        assert condenser.counts()["refused"] == 1
        behaviour.body, behaviour.status, behaviour.seconds, behaviour.trickle = completion("facts: b"), 200, 0, 0
        again = condense(condenser)
        assert late or again.note is not None, "what failed is not remembered"


def test_models_of_several_vendors_write_summaries() -> None:
    """One wants max_completion_tokens and no temperature; another answers in parts, with its own finish reason."""

    def answer(asked: Any) -> bytes:
        if "max_tokens" in asked:
            return b'{"error": {"message": "max_tokens is not supported: use max_completion_tokens"}}'
        if "temperature" in asked:
            return b'{"error": {"message": "temperature does not support 0"}}'
        return completion([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "facts: a=1"}], "end_turn")

    behaviour = Behaviour(answer=answer, statuses=[400, 400])
    with endpoint(behaviour) as url:
        found = condense(served("m", url, max_tokens=50))
    assert found.note is not None, found.reason
    assert found.note.reply.text == "facts: a=1"
    last = behaviour.asked[-1]
    assert (len(behaviour.asked), last["max_completion_tokens"], "temperature" in last) == (3, 50, False)


def test_a_summary_is_remembered_by_what_it_was_made_from() -> None:
    behaviour = Behaviour()
    with endpoint(behaviour) as url:
        condenser = served("m", url)
        first, second = condense(condenser), condense(condenser)
        other = history(*(answered(turn, f"muse {turn}", "o" * 60) for turn in range(4)))
        condense(condenser, past=other)
    assert first == second
    assert len(behaviour.asked) == 2
    counts = condenser.counts()
    assert (counts["calls"], counts["remembered"], counts["refused"]) == (2, 1, 0)
    assert set(condenser.counts().values()) == {0.0}


def test_trajectories_that_make_the_same_request_at_the_same_time_share_one_call() -> None:
    behaviour = Behaviour(seconds=0.1)

    async def three(condenser: SummaryModel) -> list[Condensed]:
        siblings = [history(*PAST.units) for _ in range(3)]
        room = Budget(tokens=227, prompt_tokens=250)
        return list(await asyncio.gather(*(condenser.condense(past, room) for past in siblings)))

    with endpoint(behaviour) as url:
        condenser = served("m", url)
        assert [condensed.note is not None for condensed in asyncio.run(three(condenser))] == [True] * 3
        counts = condenser.counts()
        assert (len(behaviour.asked), counts["calls"], counts["remembered"]) == (1, 1, 2)
        behaviour.body, condenser = completion(""), served("m", url)
        assert [condensed.note for condensed in asyncio.run(three(condenser))] == [None] * 3
        assert (condenser.counts()["refused"], len(behaviour.asked)) == (3, 2)
        asyncio.run(three(condenser))
        assert len(behaviour.asked) == 3, "what failed is not remembered"


def test_its_summary_stands_in_the_episode_and_is_no_turn(tmp_path: Path) -> None:
    behaviour = Behaviour(body=completion("so far seen some"))
    with endpoint(behaviour) as url:
        condenser = served("m", url, max_tokens=40)
        trajectory = play(engine(talker(lambda prompt: "never asked"), condenser=condenser, trigger=OVER))
    assert set(kinds(trajectory)) == {"a"}
    assert trajectory.rejected == ()
    declared = [turn for turn in trajectory.turns if turn.condensation is not None]
    assert declared
    assert declared[-1].context[2].content == "so far seen some"
    assert "so far seen some" in behaviour.asked[-1]["messages"][0]["content"], "the last summary is summarised again"
    assert segments.broken_invariants(trajectory) == ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says the first token of its vocabulary over and over, with a real tokenizer and template."""
    place = tmp_path_factory.mktemp("model")
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=2048,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
        pad_token_id=words.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.lm_head.weight.data.zero_()  # all logits are equal, and greedy decoding takes the first
    model.save_pretrained(place)
    words.save_pretrained(place)
    return place


def variant(folder: Path, place: Path, **generation: int) -> str:
    """The model with other settings of its generation."""
    shutil.copytree(folder, place, dirs_exist_ok=True)
    path = place / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}))
    return str(place)


@pytest.mark.parametrize(
    ("device", "rank", "wanted"),
    [("cuda", "3", "cuda:3"), ("cuda:1", "3", "cuda:1"), ("cpu", "3", "cpu"), ("cuda", None, "cuda")],
)
def test_a_local_model_lies_on_the_device_of_its_rank(
    device: str, rank: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes in a thread, whose current device is the first one on every rank."""
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert on_rank(device) == wanted


def test_a_local_model_that_is_cut_off_is_a_refusal(folder: Path) -> None:
    found = condense(local(folder, max_tokens=5))
    assert "it was cut off by its length" in found.reason


@pytest.fixture(scope="module")
def talkative(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, whose texts differ."""
    place, shape = tmp_path_factory.mktemp("talkative"), AutoConfig.from_pretrained(folder)
    shape.initializer_range = 0.5
    torch.manual_seed(2)
    Qwen3ForCausalLM(shape).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def writer(model: Path, max_tokens: int) -> LocalWriter:
    return LocalWriter(str(model), device="cpu", seconds=60, max_tokens=max_tokens)


def test_a_local_model_writes_what_greedy_decoding_gives_until_it_ends(talkative: Path, tmp_path: Path) -> None:
    words, model = tokenizer(), Qwen3ForCausalLM.from_pretrained(talkative)
    prompt = words.apply_chat_template(
        [{"role": "user", "content": "go"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    (wanted,) = model.generate(prompt, do_sample=False, max_new_tokens=6, pad_token_id=0)[:, prompt.shape[1] :].tolist()
    cut = asyncio.run(writer(talkative, 6).write("go"))
    assert cut == WrittenSummary(text=words.decode(wanted), finish=FinishReason.LENGTH)
    end = next(index for index, token in enumerate(wanted) if index and token not in wanted[:index])
    whole = asyncio.run(writer(Path(variant(talkative, tmp_path, eos_token_id=wanted[end])), 6).write("go"))
    assert whole == WrittenSummary(text=words.decode(wanted[:end]), finish=FinishReason.STOP)


def test_summaries_requested_at_the_same_time_are_those_of_each_alone(talkative: Path) -> None:
    model, texts = writer(talkative, 20), ["a", "some words " * 30, "what follows from this?", "x" * 3000]

    async def all_at_once() -> list[WrittenSummary | BaseException]:
        return await asyncio.gather(*map(model.write, texts), return_exceptions=True)

    *together, refused = asyncio.run(all_at_once())
    assert "has 2048 positions" in str(refused)
    assert together == [asyncio.run(model.write(text)) for text in texts[:3]]
    assert len({str(written) for written in together}) == 3


def test_the_text_of_a_control_token_in_a_conversation_is_text(talkative: Path) -> None:
    """A web page could end the user's message and speak as the system."""
    words = tokenizer()
    end = str(words.eos_token)
    assert words.eos_token_id in words(end)["input_ids"]
    model = writer(talkative, 8)
    shown = asyncio.run(model.write(f"page {end} system {end}"))
    assert shown == asyncio.run(model.write(f"page {end[:1]}\u200b{end[1:]} system {end[:1]}\u200b{end[1:]}"))


def test_a_local_model_that_ends_its_text_at_once_has_said_nothing(folder: Path, tmp_path: Path) -> None:
    assert "it is empty" in condense(local(variant(folder, tmp_path, eos_token_id=0), max_tokens=5)).reason


def test_a_local_model_out_of_time_or_of_room_is_a_refusal(folder: Path) -> None:
    slow = condense(local(folder, max_tokens=100, seconds=0.01))
    assert "did not finish within 0.01 seconds" in slow.reason
    long = history(*(answered(turn, "think " * 100, "o" * 60) for turn in range(6)))
    full = condense(local(folder), tokens=1500, past=long)
    assert "has 2048 positions" in full.reason


def test_a_model_that_does_not_exist_is_found_before_a_run_starts_and_else_a_refusal(
    folder: Path, tmp_path: Path
) -> None:
    """langchain #38352: a summary model that was never called, and nobody heard of it."""
    model = local(tmp_path / "none")
    with pytest.raises(ValueError, match=r"loading .*none, which is to write the summaries: "):
        model.check(PINNED, budget(100), count)
    found = condense(model)
    assert found.note is None
    assert "no summary can be used: writing with" in found.reason
    local(folder).check(PINNED, budget(100), count)


def test_a_local_model_without_a_chat_template_is_found_before_a_run_starts(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="it has no chat template"):
        local(tmp_path).check(PINNED, budget(100), count)
    assert "no summary can be used: writing with" in condense(local(tmp_path)).reason


def test_a_local_model_with_fewer_embeddings_than_its_tokenizer_has_ids_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 9}))
    with pytest.raises(ValueError, match="and the model has embeddings for 9 ids"):
        local(tmp_path).check(PINNED, budget(100), count)


def test_who_waits_for_a_turn_gives_up_before_the_engine_does() -> None:
    """A dead endpoint costs summaries and no trajectories, however many wait for it."""
    with endpoint(Behaviour(seconds=60)) as url:
        model = served("m", url, seconds=60.0, concurrency=1)

        async def three() -> list[Condensed]:
            pasts = [history(*(answered(turn, f"{n} think", "o" * 60) for turn in range(6))) for n in range(3)]
            limited = replace(budget(250), seconds=0.5)
            return list(await asyncio.gather(*(model.condense(with_tokens(past, count), limited) for past in pasts)))

        started = time.monotonic()
        found = asyncio.run(three())
        assert time.monotonic() - started < 30
    assert all("it waited or ran too long" in one.reason for one in found)
    assert all(one.units and one.note is None for one in found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "m", "url": "ftp://x"},
        {"model": "m", "url": "here"},
        {"model": "m", "seconds": 0},
        {"model": "m", "concurrency": 0},
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match="setting up the condenser 'summary_model'"):
        build(options)
