"""The benchmark of attention: work that grows with the length, and correlations that can be checked by hand."""

import asyncio
import json
import re
from pathlib import Path

import attention
import pytest
import torch
import yaml
from attention import compared, costs, histories, interval, random_model
from builders import trajectory
from command import succeed
from talk import END, said, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from condensegrpo.assembly.build import build
from condensegrpo.attention.capture import SUPPORTED
from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Trajectory, Turn
from condensegrpo.episodes.render import Renderer
from condensegrpo.samplers.transformers import TransformersSampler

ROOT = Path(__file__).resolve().parent.parent


def test_an_interval_draws_problems_whole() -> None:
    low, high = interval({"a": [0.0] * 50, "b": [1.0] * 50})
    assert (low, high) == (0.0, 1.0), "with the values drawn one by one it would be near 0.4 … 0.6"
    assert interval({"a": [0.3], "b": [0.3]}) == pytest.approx((0.3, 0.3))


# --- cost -------------------------------------------------------------------------------------------------------------


def test_watching_adds_work_that_grows_with_the_length_and_all_attention_with_its_square() -> None:
    model = random_model()
    by_length = [costs(model, length, repeats=1) for length in (64, 128, 256)]
    watching = [found.watched.products - found.plain.products for found in by_length]
    everything = [found.everything.products - found.plain.products for found in by_length]
    assert watching[2] - watching[1] == 2 * (watching[1] - watching[0])
    assert everything[2] == 4 * everything[1] == 16 * everything[0]


def test_the_script_prints_its_table() -> None:
    out = succeed("cost", "--lengths", "64", "--repeats", "1", program=attention.main)
    assert "| 64 | 0." in out


# --- oracle -----------------------------------------------------------------------------------------------------------


def episode(*texts: str) -> Trajectory:
    """An episode whose whole history was always in sight."""
    pinned = (Message(role="user", content="which?"),)
    return trajectory(
        *(
            Turn(
                prompt_ids=(1,),
                output_ids=tuple(said(text)),
                logprobs=(0.0,) * len(said(text)),
                policy_version=0,
                context=pinned,
                reply=Message(role="assistant", content=text),
                observations=(Message(role="user", content=f"seen {text}"),),
            )
            for text in texts
        )
    )


def test_histories_are_those_before_each_turn_that_are_long_enough() -> None:
    found = histories(episode("a", "b", "c", "d", "e", "f"))
    assert [(turn, [unit.reply.content for unit in past.units]) for turn, past in found] == [
        (4, ["a", "b", "c", "d"]),
        (5, ["a", "b", "c", "d", "e"]),
    ]


def test_a_real_model_is_compared_with_the_oracle_at_every_turn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=len(tokenizer()), hidden_size=16, intermediate_size=32, eos_token_id=END, **shape)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    sampler = TransformersSampler(str(tmp_path))
    played = [episode("a", "hello", "c", "dd", "e", "one")]
    found = asyncio.run(compared(played, sampler, Renderer(tokenizer()), tokens=300))
    sampler.close()
    counted = {name: [len(values) for values in by_problem.values()] for name, by_problem in found.items()}
    assert counted == {
        "attention, every reply": [2],
        "recency, every reply": [2],
        "attention, last reply": [1],
        "recency, last reply": [1],
    }
    assert all(-1 <= value <= 1 for by_problem in found.values() for values in by_problem.values() for value in values)


# --- docs/explanation/attention.md

PAGE = (ROOT / "docs" / "explanation" / "attention.md").read_text(encoding="utf-8")


def test_the_page_names_the_models_that_were_verified() -> None:
    assert f"for {', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]};" in " ".join(PAGE.split())


def test_the_configuration_on_the_page_is_one_of_a_run() -> None:
    page = (ROOT / "docs" / "how-to" / "evaluate.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "answer_form" in block)
    given = [
        f"{section}.{key}={json.dumps(value)}"
        for section, keys in yaml.safe_load(block).items()
        for key, value in keys.items()
    ]
    build(load_config(find_config("quickstart"), given))
