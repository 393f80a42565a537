"""Ten families as a user tries them: play an episode, then train two steps, with a tool, a thought and ``last_k``.

Models are random and tiny, of the real classes; tokenizers are made on the spot; templates are those of real models.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from calling_sampler import CallingSampler
from model_families import QUESTION, SYSTEM, family_tokenizer, tekken_folder, written
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner
from vision_models import image_processor

from condensegrpo.assembly.build import build
from condensegrpo.assembly.objects import Parts, configured
from condensegrpo.cli.app import app
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.families import renderer_for_model
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.toolcalls import tool_schema
from condensegrpo.episodes.toolformats import JSON_FORMATS
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.training.train import run_training

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GEMMA = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512, "global_head_dim": 16}
GROUPS = {"head_dim": 8, "n_group": 1, "topk_group": 1}
EXPERTS = {"n_routed_experts": 4, "first_k_dense_replace": 1}
FAMILIES: Mapping[str, tuple[str, str, str, dict[str, Any]]] = {  # tokens, template, type and shape of the model
    "qwen3": ("qwen", "qwen3", "qwen3", TEXT),
    "qwen3.5": ("qwen", "qwen3_5_think", "qwen3_5", {"text_config": TEXT | LINEAR, "vision_config": TOWER}),
    "qwen3-vl": ("qwen", "qwen3_vl", "qwen3_vl", {"text_config": TEXT | THREE_AXES, "vision_config": TOWER}),
    "gemma4": ("gemma", "gemma4_v5", "gemma4_text", TEXT | SLIDING | GEMMA),
    "gpt-oss": ("gpt-oss", "gptoss", "gpt_oss", TEXT | SLIDING | ROUTED | {"num_local_experts": 4}),
    "glm-4.5": ("glm", "glm4moe", "glm4_moe", TEXT | ROUTED | EXPERTS),
    "llama-3": ("llama", "llama3_1", "llama", TEXT),
    "lfm2": ("lfm", "lfm2_v2", "lfm2", TEXT | {"layer_types": ["conv", "full_attention"]}),
    "mistral": ("mistral", "", "mistral", TEXT | {"sliding_window": None}),
    "deepseek-r1": ("deepseek", "deepseek_r1_distill", "deepseek_v3", TEXT | ROUTED | EXPERTS | LATENT | GROUPS),
}


ANSWERS = {"qwen3.5": "ok</think>", "gpt-oss": "<|channel|>final<|message|>"}  # what is before an answer
UNREAD = ("lfm2", "mistral")  # whose native calls are refused
CHOSEN = {
    "gpt-oss": "the chat template, and replies are read as by gpt-oss",
    **dict.fromkeys((*UNREAD, "deepseek-r1"), "the chat template"),
}
CALL = ToolCall(id="call_0", name="look", arguments='{"words": "a b"}')
CALLING = Message(role="assistant", content="", reasoning="hm", tool_calls=(CALL,))
NATIVE_PARTS = ("<tool_call>", "arguments", "</tool_call>")


def look(words: str) -> str:
    """Look at words.

    Args:
        words: to look at.
    """
    return f"seen {words}"


def uneven(trajectory: Trajectory, problem: Problem) -> Mapping[str, float]:
    """A reward that differs between replies that were sampled."""
    return {"uneven": float(sum(trajectory.turns[-1].output_ids) % 101)}


def family_folder(family: str, folder: Path) -> str:
    """A tiny model of a family with its tokenizer."""
    tokens, template, model_type, shape = FAMILIES[family]
    if family == "mistral":
        vocabulary = tekken_folder(folder)
    else:
        family_tokenizer(tokens, template).save_pretrained(folder)
        vocabulary = len(family_tokenizer(tokens, template))
    size = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    seen = "vision_config" in shape
    shape = shape | ({"text_config": shape["text_config"] | size} if seen else size)
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if seen else AutoModelForCausalLM
    auto.from_config(AutoConfig.for_model(model_type, **shape)).save_pretrained(folder)
    if family == "qwen3-vl":
        image_processor("qwen3_vl").save_pretrained(folder)
    return str(folder)


def reply_of(made: Renderer, form: str) -> list[int]:
    """A reply with a thought and a call, as a model of the family samples it."""
    tokenizer, prompt = made._tokenizer, made.prompt((SYSTEM, QUESTION))
    if form == "native" and made._template.shows_tools:
        _, reply = written(made, CALLING)
        text = tokenizer.decode(reply)
    else:
        opening, key, closing = ("<tool>", "args", "</tool>") if form == "tagged" else NATIVE_PARTS
        text = f'{opening}{{"name": "look", "{key}": {{"words": "a b"}}}}{closing}'
    if "hm" not in text:  # the template shows no thoughts
        before, after = ("[THINK]", "[/THINK]") if "[THINK]" in tokenizer.get_vocab() else ("<think>", "</think>")
        opened = tokenizer.decode(prompt).endswith("<think>\n")
        text = f"{'' if opened else before}hm{after}{text}"
    reply = tokenizer.encode(text, add_special_tokens=False)
    end = "<|observation|>" if "<|observation|>" in tokenizer.get_vocab() else tokenizer.eos_token
    return reply if reply[-1] in made.stop_ids else [*reply, tokenizer.convert_tokens_to_ids(end)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = [{"question": f"what is {number}?", "answer": str(number)} for number in range(4)]
    for name, part in (("rows", rows[1:]), ("held", rows[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    tree = {
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "task": {"name": "jsonl", "data": str(tmp_path / "rows.jsonl"), "eval_data": str(tmp_path / "held.jsonl")},
        "condenser": {"name": "last_k", "options": {"keep_last": 1}},
        "rollout": {
            "limits": {"max_turns": 3, "max_context_tokens": 4096, "max_output_tokens": 200},
            "tools": {"use": [f"{__file__}:look"]},
        },
        "learner": {"threads": 1, "optimiser": {"lr": 1e-3}},
        "train": {"steps": 2, "problems_per_step": 1, "samples_per_problem": 3, "eval_every": 0, "save_every": 0},
        "evaluate": {"problems": 1},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(tree | {"train": tree["train"] | {"eval_on_start": False}}))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_played_and_trained_with_a_tool_a_thought_and_last_k(
    family: str, config: Path, tmp_path: Path
) -> None:
    folder = family_folder(family, tmp_path / "model")
    tokenizer, model_type = load_tokenizer(folder), FAMILIES[family][2]
    form = "tagged" if family in UNREAD else "native"
    options = {"tools": (tool_schema("look", look),), "tool_format": JSON_FORMATS[form]}
    made = renderer_for_model(tokenizer, model_type=model_type, **options)
    assert made.chosen.startswith(CHOSEN.get(family, f"{family} of renderers"))
    reply = reply_of(made, form)

    # played
    answer = ANSWERS.get(family, "") + "<answer>0</answer>"
    (tmp_path / "replies.yaml").write_text(json.dumps([tokenizer.decode(reply), answer]))
    arguments = ["play", str(config), f"rollout.tools.format={form}", "--replies", str(tmp_path / "replies.yaml")]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert 'look({"words": "a b"})' in shown
    assert "1 of 1 call succeeded" in shown
    assert "score 1   answered '0'" in shown

    # trained: two calls, then what the model samples
    parts: Parts = {"reward": uneven, "sampler": {"name": CallingSampler, "options": {"reply": reply}}}
    lines = (f"rollout.tools.format={form}", "algorithm.advantage.estimator=grpo")
    chosen, objects = configured(config, lines, parts)
    run = RunFolder.create(tmp_path / "run")
    run_training(build(chosen, objects=objects), run, observer=Observer(), stopping=lambda: False)
    steps = [line for line in read_metrics(run.metrics) if "loss" in line]
    assert [line["grad_norm"] > 0 for line in steps] == [True, True]
    assert [line["ratio_max"] for line in steps] == pytest.approx([1, 1], abs=1e-4)
    for each in read_trajectories(run.trajectories(1)):
        first, second, third = each.trajectory.turns
        for turn in (first, second):
            assert [(call.name, json.loads(call.arguments)) for call in turn.reply.tool_calls] == [
                ("look", {"words": "a b"})
            ]
            assert (turn.reply.reasoning, turn.tool_attempts, turn.tool_successes) == ("hm", 1, 1)
        if second.condensation is None:
            assert second.prompt_ids[: len(first.prompt_ids) + len(reply)] == (*first.prompt_ids, *reply)
        else:
            assert second.condensation.condenser == "chat_template"
        assert third.condensation is not None
        assert third.condensation.condenser == "last_k"
        kept = reply[:-1] if second.condensation is None else reply[-20:-1]  # the template takes the thought away
        assert any(third.prompt_ids[at : at + len(kept)] == tuple(kept) for at in range(len(third.prompt_ids)))
