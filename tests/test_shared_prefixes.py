"""Shared prefixes computed once give what the rows give apart: log-probabilities, and every parameter's gradient."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from packed import collate, computed
from tiny import VOCABULARY, forking_rows, llama, plain_logprobs, qwen3, segment
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from condensegrpo.algorithms.packing import PackedBatch, blocks, lay_out, micro_batches
from condensegrpo.core.errors import LearnerError
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.logprobs import TrainedLogprobs

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}


def qwen2() -> PreTrainedModel:
    """Biases on queries, keys and values."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SMALL)).eval()


def gpt2() -> PreTrainedModel:
    """Learned positions."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = GPT2Config(vocab_size=VOCABULARY, initializer_range=0.3, bos_token_id=1, eos_token_id=1, **sizes)
    return GPT2LMHeadModel(config).eval()


MODELS = pytest.mark.parametrize("make", [qwen3, llama, qwen2, gpt2])

CASES: dict[str, list[Segment]] = {
    "siblings that diverge within their outputs": [
        segment([3, 4, 5, 6, 7, 8], [3, 4, 5], weight=0.5),
        segment([3, 4, 5, 6, 7, 9], [3, 4, 5], weight=-0.25),
        segment([3, 4, 5, 10, 11], [3, 4]),
        segment([3, 4, 5, 6, 12], [3, 4], advantage=-2.0),
    ],
    "rows that begin others": [
        segment([3, 4, 5], [2]),
        segment([3, 4, 5, 6, 7], [4]),
        segment([3, 4], [1]),
        segment([3, 4, 5, 6, 7, 8, 9], [2, 4, 6]),
    ],
    "equal rows": [segment([3, 4, 5, 6], [2, 3], weight=weight) for weight in (0.5, 1.0, -2.0)],
    "turns of a trajectory": [
        segment([3, 4, 5, 6, 7], [3, 4]),
        segment([3, 4, 5, 6, 7, 8, 9, 10, 11], [7, 8]),
        segment([3, 4, 12, 13, 8, 9, 10, 11, 5, 6], [8, 9]),
    ],
    "nothing shared": [segment([3, 4, 5], [1, 2]), segment([6, 4, 5, 7], [3]), segment([8, 4], [1])],
    "a token trained in one row and context in another": [
        segment([3, 4, 5, 6], [2]),
        segment([3, 4, 5, 6], [3]),
        segment([3, 4, 5, 7], []),
    ],
}


def loss(logp_T: Tensor, batch: PackedBatch) -> Tensor:
    return (batch.weights * batch.advantages * (logp_T - batch.logprobs).clamp(max=3).exp()).sum()


def gradients(model: PreTrainedModel, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
    model.zero_grad()
    module = TrainedLogprobs(model)
    for batch in batches:
        loss(computed(module, batch, 1.0), batch).backward()
    return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}


def gradients_of_rows(model: PreTrainedModel, rows: Sequence[Segment]) -> dict[str, Tensor]:
    """One plain row after another, full logits: nothing of ours but the loss."""
    model.zero_grad()
    for row in rows:
        if row.trained:
            loss(plain_logprobs(model, row), collate([row])).backward()
    return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    scale = max(float(each.abs().max()) for each in wanted.values())
    assert scale > 1e-3, "there is a gradient to compare"
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-5 * scale)


@MODELS
@pytest.mark.parametrize("case", CASES)
def test_a_tree_gives_the_gradient_of_its_rows_apart(make: Callable[[], PreTrainedModel], case: str) -> None:
    model, rows = make(), CASES[case]
    assert_same(gradients(model, [lay_out([tuple(rows)])]), gradients_of_rows(model, rows))


@MODELS
def test_blocks_within_a_budget_give_the_gradient_of_all_rows(make: Callable[[], PreTrainedModel]) -> None:
    model, rows = make(), forking_rows(24, seed=1)
    wanted = gradients_of_rows(model, rows)
    for share in (True, False):
        batches = micro_batches(blocks(rows, max_tokens=40, share=share), max_tokens=40)
        assert len(batches) > 1
        assert_same(gradients(model, batches), wanted)


def test_log_probabilities_are_those_of_the_rows() -> None:
    model, rows = qwen3(), forking_rows(24, seed=2)
    wanted = torch.cat([plain_logprobs(model, row) for row in rows])
    batch = lay_out([tuple(rows[:9]), tuple(rows[9:10]), tuple(rows[10:])])
    assert batch.token_ids.numel() < sum(len(row.token_ids) for row in rows) / 2
    torch.testing.assert_close(computed(TrainedLogprobs(model), batch, 1.0), wanted, rtol=1e-5, atol=1e-5)


def test_a_sibling_s_tokens_change_nothing_for_the_others() -> None:
    model = qwen3()
    first, second = segment([3, 4, 5, 6, 7], [3, 4]), segment([3, 4, 8, 9, 10], [3, 4])
    module = TrainedLogprobs(model)
    found = computed(module, lay_out([(first, second)]), 1.0)
    other = replace(first, token_ids=(3, 4, 11, 12, 13))
    changed = computed(module, lay_out([(other, second)]), 1.0)
    torch.testing.assert_close(changed[2:], found[2:], rtol=1e-6, atol=1e-6)
    assert (changed[:2] - found[:2]).abs().min() > 1e-3


def test_in_bfloat16_a_tree_is_as_near_to_its_rows_as_the_precision() -> None:
    model, rows = qwen3().to(torch.bfloat16), forking_rows(8, seed=3)
    module = TrainedLogprobs(model)
    module.check()
    assert module.why_plain_rows is None
    wanted = torch.cat([plain_logprobs(model, row) for row in rows])
    found = computed(module, lay_out([tuple(rows)]), 1.0)
    exact = torch.cat([plain_logprobs(qwen3(), row) for row in rows])
    assert (found - exact).abs().mean() <= 1.5 * (wanted - exact).abs().mean()


@MODELS
def test_models_with_full_attention_compute_trees(make: Callable[[], PreTrainedModel]) -> None:
    module = TrainedLogprobs(make())
    module.check()
    assert module.computes_trees


def sliding() -> PreTrainedModel:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)).eval()


def alternating() -> PreTrainedModel:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, sliding_window=4, attn_implementation="eager")).eval()


@pytest.mark.parametrize(
    ("make", "reason"),
    [(sliding, "its sliding_window is 4"), (alternating, "layers of sliding_attention, which look back by index")],
)
def test_models_that_look_back_by_index_take_plain_rows_and_say_why(
    make: Callable[[], PreTrainedModel], reason: str
) -> None:
    model, rows = make(), forking_rows(24, seed=4)
    module = TrainedLogprobs(model)
    module.check()
    assert not module.computes_trees
    assert reason in str(module.why_plain_rows)
    (batch,) = micro_batches(blocks(rows, max_tokens=999, share=module.computes_trees), max_tokens=999)
    assert max(len(row.token_ids) for row in rows) > 4 + 1  # the window is felt
    found = computed(module, batch, 1.0)
    assert found.sum().item() == pytest.approx(sum(plain_logprobs(model, row).sum().item() for row in rows), rel=1e-5)


def test_a_sliding_window_that_is_switched_off_does_not_matter() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL, sliding_window=4, use_sliding_window=False))
    assert TrainedLogprobs(model).why_plain_rows is None


def test_attention_that_skips_other_rows_by_itself_takes_plain_rows() -> None:
    model = llama()
    model.set_attn_implementation("flex_attention")
    module = TrainedLogprobs(model)
    assert module.separates_rows_by_position
    assert module.why_plain_rows == "flex_attention attention knows no trees"


def test_eager_attention_takes_plain_rows_and_gives_what_they_give() -> None:
    model, rows = qwen3(), forking_rows(24, seed=2)
    model.set_attn_implementation("eager")
    module = TrainedLogprobs(model)
    module.check()
    assert "eager attention knows no trees" in str(module.why_plain_rows)
    wanted = torch.cat([plain_logprobs(model, row) for row in rows])
    torch.testing.assert_close(computed(module, collate(rows), 1.0), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(LearnerError, match=r"takes plain rows only .* Pack its rows with share=False"):
        computed(module, lay_out([tuple(rows)]), 1.0)


def test_gradient_checkpointing_changes_nothing() -> None:
    model, rows = llama(), forking_rows(12, seed=5)
    batch = lay_out([tuple(rows)])
    wanted = gradients(model, [batch])
    calls: list[int] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    model.enable_input_require_grads()
    model.train()  # it is off otherwise; this model has no dropout
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same(gradients(model, [batch]), wanted)
    assert len(calls) == 4  # twice each: it was computed again in backward


def test_the_model_by_itself_is_as_before() -> None:
    """Whoever else uses the policy, to generate say, gives it no paths."""
    model, row = qwen3(), forking_rows(1)[0]
    wanted = plain_logprobs(model, row)
    TrainedLogprobs(model)
    torch.testing.assert_close(plain_logprobs(model, row), wanted, rtol=0, atol=0)
    padded = torch.tensor([[0, 0, 3, 4, 5]])
    ids = model.generate(
        padded, attention_mask=(padded > 0).long(), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    again = qwen3().generate(
        padded, attention_mask=(padded > 0).long(), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert ids.tolist() == again.tolist()


def test_a_window_that_the_configuration_does_not_tell_is_found_in_the_layer() -> None:
    model = qwen2()
    model.model.layers[1].self_attn.sliding_window = 4
    module = TrainedLogprobs(model)
    assert module.computes_trees
    module.check()
    assert "Qwen2Attention asks for sliding_window" in str(module.why_plain_rows)


def test_a_model_that_makes_something_else_of_a_tree_is_found_out() -> None:
    """What no key of the configuration tells: here, positions counted by place whatever it is told."""
    model = llama()
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, arguments, named: (
            arguments,
            {**named, "position_ids": torch.arange(named["position_ids"].shape[1])[None]},
        ),
        with_kwargs=True,
    )
    module = TrainedLogprobs(model)
    module.check()
    assert module.why_plain_rows == "LlamaForCausalLM makes something else of a prefix tree than of its rows"
