"""Attention scorers in the rollout engine, with a real model: the policy's, a frozen model's, and the oracle."""

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from talk import CHATML, END, Counting, engine, problem, tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from condensegrpo.assembly.build import build
from condensegrpo.assembly.scorers import (
    check_frozen,
    check_models,
    check_scorers,
    frozen_model,
    open_scorers,
    split_layers,
)
from condensegrpo.attention.scorer import LeaveOneOut, losses
from condensegrpo.condensers.attention import AttentionCondenser
from condensegrpo.config.load import load_config
from condensegrpo.core.condenser import UnitScorer
from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols.sampler import AttentionQuery, TokenAttention
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.engine import AnswerProbe
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.samplers.transformers import TransformersSampler

BUDGET = 200
PINNED = (Message(role="system", content="be brief"), Message(role="user", content="which?"))
CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=64, eos_token_id=END, **shape)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # one dimension of every token is the same, and ends a reply after seven tokens or so
        model.model.embed_tokens.weight[:, 0] = 0.1
        model.lm_head.weight[END, 0] = 1.0
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def sampler(folder: str) -> Iterator[TransformersSampler]:
    one = TransformersSampler(folder)
    yield one
    one.close()


def scorers(name: str, sampler: TransformersSampler) -> Mapping[str, UnitScorer]:
    model = partial(frozen_model, dtype="float32")
    return open_scorers([name], sampler=sampler, renderer=Renderer(tokenizer()), open_model=model)


def play(sampler: TransformersSampler, name: str, *, episodes: int = 1) -> list[Trajectory]:
    parts = replace(
        engine(
            sampler,
            condenser=AttentionCondenser(scorer=name),
            max_turns=6,
            max_context_tokens=BUDGET,
            max_output_tokens=30,
            turn_seconds=120.0,
        ),
        scorers=scorers(name, sampler),
        probe=AnswerProbe(sampler=sampler, renderer=Renderer(tokenizer()), form="<answer>{answer}</answer>"),
    )

    async def one(number: int) -> Trajectory:
        return await run_episode(
            replace(problem(number), answer="5"),
            environment=Counting,
            engine=parts,
            group_id="g",
            sample=number,
            seed=lambda turn: 100 * number + turn,
        )

    async def every() -> list[Trajectory]:
        return list(await asyncio.gather(*(one(number) for number in range(episodes))))

    return asyncio.run(every())


@pytest.mark.parametrize("name", ["policy", "leave_one_out", "frozen"])
def test_an_episode_is_condensed_by_real_scores(name: str, sampler: TransformersSampler, folder: str) -> None:
    found = play(sampler, folder if name == "frozen" else name, episodes=4)
    reasons = {turn.condensation.reason for one in found for turn in one.turns if turn.condensation is not None}
    assert any("units by the attention of" in reason for reason in reasons), "nothing was condensed"
    for one in found:
        assert one.stop in (StopReason.TURN_LIMIT, StopReason.OUTPUT_LENGTH), one.detail
        assert one.max_context_tokens <= BUDGET
        assert all(turn.answer_logprob is not None and turn.answer_logprob < 0 for turn in one.turns)


def test_a_trajectory_does_not_depend_on_others_condensed_in_the_same_batch(sampler: TransformersSampler) -> None:
    (alone,), (first, *_) = play(sampler, "policy"), play(sampler, "policy", episodes=5)
    assert [turn.prompt_ids for turn in first.turns] == [turn.prompt_ids for turn in alone.turns]


def test_the_policys_attention_is_that_of_the_weights_in_use(folder: str, sampler: TransformersSampler) -> None:
    past = History(
        pinned=(Message(role="user", content="which?"),),
        units=tuple(Unit(turn=turn, reply=Message(role="assistant", content=f"hello {turn}")) for turn in range(4)),
    )
    own = TransformersSampler(folder)
    scorer = scorers("policy", own)["policy"]
    (before,) = asyncio.run(scorer.score([past], 500))
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    own.update(((name, tensor + torch.randn_like(tensor) / 4) for name, tensor in model.named_parameters()), 1)
    (after,) = asyncio.run(scorer.score([past], 500))
    own.close()
    assert list(after) != pytest.approx(list(before), abs=1e-3)


def test_the_oracle_scores_what_the_output_loses_without_a_unit(sampler: TransformersSampler) -> None:
    renderer = Renderer(tokenizer())
    past = History(
        pinned=(Message(role="user", content="which?"),),
        units=tuple(
            Unit(turn=turn, reply=Message(role="assistant", content=text)) for turn, text in enumerate(("one", "hello"))
        ),
    )
    output = renderer.reply_ids("x")

    async def logprob(*units: Unit) -> float:
        messages = [*past.pinned, *(message for unit in units for message in unit.messages)]
        return sum(await sampler.score(renderer.prompt(messages), output))

    whole, without_0, without_1 = (
        asyncio.run(logprob(*units)) for units in (past.units, past.units[1:], past.units[:1])
    )
    found = asyncio.run(losses(sampler, renderer, past, output))
    assert found == pytest.approx([whole - without_0, whole - without_1], abs=1e-5)
    newest = past.add(Unit(turn=2, reply=Message(role="assistant", content="x")))
    scorer = LeaveOneOut(sampler, renderer)
    (scores,) = asyncio.run(scorer.score([newest], 1))
    assert asyncio.run(scorer.score([newest], 2))[0] is scores  # measured once, whatever its tokens are
    assert list(scores) == pytest.approx([*(max(value, 0.0) for value in found), 0.0], abs=1e-5)


# --- what is refused before anything is loaded ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"), [("policy", "capture its model's attention"), ("leave_one_out", "measure the probability")]
)
def test_a_sampler_without_the_ability_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"the scorer '{name}' of the condenser: the sampler scripted .*{words}"):
        check_scorers([name], ScriptedSampler, "scripted")
    check_scorers(["some/model"], ScriptedSampler, "scripted")
    with pytest.raises(ConfigError, match=words):
        check_scorers([f"{name}@0"], ScriptedSampler, "scripted")
    check_scorers([name], TransformersSampler, "transformers")


@pytest.mark.parametrize(
    ("name", "model", "layers"),
    [
        ("policy", "policy", ()),
        ("policy@0", "policy", (0,)),
        ("a@b/model@14,18", "a@b/model", (14, 18)),
        ("a@b", "a@b", ()),
        ("policy@", "policy@", ()),
    ],
)
def test_the_name_of_a_scorer_selects_the_layers(name: str, model: str, layers: tuple[int, ...]) -> None:
    assert split_layers(name) == (model, layers)


def test_missing_layers_are_refused_before_anything_is_loaded(folder: str) -> None:
    check_models(["policy@0", f"{folder}@0"], folder)
    for name in ("policy@0,9", f"{folder}@9"):
        with pytest.raises(
            ConfigError, match=rf"scorer '{name}' .*capturing attention of the layers .*9\]: the model has \d"
        ):
            check_models([name], folder)


def test_other_layers_give_other_scores(sampler: TransformersSampler) -> None:
    pinned = (Message(role="user", content="x"),)
    units = [Unit(turn=turn, reply=Message(role="assistant", content=text)) for turn, text in enumerate("xyxy")]
    past = History(pinned=pinned, units=tuple(units))
    (lower,), (upper,) = (
        asyncio.run(scorers(name, sampler)[name].score([past], 200)) for name in ("policy@0", "policy@1")
    )
    assert lower != upper


def test_an_unverified_model_type_is_refused_by_name(tmp_path: Path, folder: str) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=40)).save_pretrained(tmp_path)
    for names, source in ((["policy"], str(tmp_path)), ([str(tmp_path)], folder)):
        with pytest.raises(ConfigError, match=r"a model of type 'gpt2': verified are gemma2"):
            check_models(names, source)
    check_models(["policy", "leave_one_out", folder], folder)
    with pytest.raises(ConfigError, match=r"setting up the scorer '/no/model' of the condenser: .* there is no folder"):
        check_models(["/no/model"], folder)


def test_a_frozen_model_that_cannot_show_the_conversation_is_refused_before_anything_is_sampled(
    folder: str, tmp_path: Path
) -> None:
    """Its chat template is not the policy's: it would fail in every trajectory."""
    with pytest.raises(ConfigError, match=r"has 32768 positions, and prompts up to 40000 tokens"):
        check_frozen(folder, PINNED, 40_000)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    (tmp_path / "chat_template.jinja").write_text(refusing)
    with pytest.raises(ConfigError, match=r"the scorer '.*' of the condenser: .*no system role.* Name a model whose"):
        check_frozen(str(tmp_path), PINNED, BUDGET)


class Failing(TransformersSampler):
    """A sampler whose model fails."""

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        raise SamplerError("reading a prompt: the model failed")


def test_a_failing_model_of_a_scorer_ends_the_episode_as_a_sampler_error(folder: str) -> None:
    failing = Failing(folder)
    found = play(failing, "policy", episodes=4)
    failing.close()
    failed = [one for one in found if one.stop is StopReason.SAMPLER_ERROR]
    assert failed
    assert {one.detail.partition(" (tests/")[0] for one in failed} == {
        "the condenser 'chosen': SamplerError: reading a prompt: the model failed"
    }
    assert all(one.turns for one in failed), "turns before the failure are kept"


NO_ATTENTION = """
from condensegrpo.samplers.scripted import ScriptedSampler

class NoAttention(ScriptedSampler):
    def __init__(self, *, model_path, dtype):
        pass
"""


def test_a_configuration_whose_sampler_cannot_serve_its_scorer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no_attention.py").write_text(NO_ATTENTION)
    attention = ["condenser={name: attention, options: {scorer: policy}}", "rollout.answer_form='{answer}'"]
    build(load_config(CONFIG, attention))
    for sampler_name in ("vllm", "vllm_server"):  # have no access to queries and keys
        with pytest.raises(ConfigError, match=rf"the sampler {sampler_name} cannot .* or name a frozen model"):
            build(load_config(CONFIG, [*attention[:1], f"sampler.name={sampler_name}"]))
        oracle = "condenser={name: attention, options: {scorer: leave_one_out}}"
        measured = "rollout.answer_form='<answer>{answer}</answer>'"
        for asked in (oracle, measured):  # the engine in this process can measure
            given = load_config(CONFIG, ["condenser={name: full}", asked, f"sampler.name={sampler_name}"])
            if sampler_name == "vllm":
                build(given)
            else:
                with pytest.raises(ConfigError, match=r"cannot measure the probability .* or vllm, "):
                    build(given)
        frozen = "condenser={name: attention, options: {scorer: some/model}}"
        build(load_config(CONFIG, [frozen, f"sampler.name={sampler_name}"]))
    staged = "condenser={name: pipeline, options: {stages: [{name: attention}, {name: last_k}]}}"
    for condenser in (*attention[:1], staged):
        with pytest.raises(ConfigError, match=r"the sampler .*no_attention.py:NoAttention cannot capture its"):
            build(load_config(CONFIG, [condenser, f"sampler.name={tmp_path / 'no_attention.py'}:NoAttention"]))
