import math
from collections.abc import Callable

import pytest
import torch
from packed import collate, computed, trained_logprobs
from tiny import VOCABULARY, llama, plain_logprobs, qwen3, rows, segment
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
)
from transformers.utils import ModelOutput

from condensegrpo.algorithms.packing import dummy
from condensegrpo.core.errors import LearnerError
from condensegrpo.learner.logprobs import TrainedLogprobs

MODELS = pytest.mark.parametrize("make", [qwen3, llama])


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}


@MODELS
def test_packed_rows_give_what_each_row_gives_alone(make: Callable[[], PreTrainedModel]) -> None:
    model, some = make(), rows(7)
    wanted = torch.cat([plain_logprobs(model, row) for row in some])
    torch.testing.assert_close(trained_logprobs(model, collate(some)), wanted, rtol=1e-5, atol=1e-5)


@MODELS
def test_packed_rows_give_the_gradient_of_the_rows_alone(make: Callable[[], PreTrainedModel]) -> None:
    model, some = make(), rows(7)
    wanted = gradients(model, sum(plain_logprobs(model, row).sum() for row in some))
    found = gradients(model, trained_logprobs(model, collate(some)).sum())
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5)


def along_paths(module: TrainedLogprobs) -> None:
    """As it is made."""


def in_line(module: TrainedLogprobs) -> None:
    module.why_plain_rows, module.separates_rows_by_position = "for this test", True


def side_by_side(module: TrainedLogprobs) -> None:
    module.why_plain_rows, module.separates_rows_by_position = "for this test", False


WAYS = pytest.mark.parametrize("way", [along_paths, in_line, side_by_side])


@WAYS
def test_rows_see_only_themselves_however_they_are_laid_out(way: Callable[[TrainedLogprobs], None]) -> None:
    model, some = qwen3(), [segment([5, 6, 7, 8], [2, 3]), segment([9, 10], [1]), segment([11, 12, 13], [1, 2])]
    batch, module = collate(some), TrainedLogprobs(model)
    way(module)
    found = computed(module, batch, 1.0)
    torch.testing.assert_close(found, torch.cat([plain_logprobs(model, row) for row in some]), rtol=1e-5, atol=1e-5)
    other = collate([segment([1, 2, 3, 4], [2, 3]), *some[1:]])  # another first row changes nothing after it
    changed = computed(module, other, 1.0)
    torch.testing.assert_close(changed[2:], found[2:], rtol=1e-6, atol=1e-6)
    assert (changed[:2] - found[:2]).abs().min() > 1e-3


def test_the_order_of_rows_only_orders_the_result() -> None:
    model, (first, second, third) = qwen3(), rows(3)
    sizes = [row.trained for row in (first, second, third)]
    one, two, three = trained_logprobs(model, collate([first, second, third])).split(sizes)
    turned = trained_logprobs(model, collate([third, first, second]))
    torch.testing.assert_close(turned, torch.cat([three, one, two]), rtol=1e-5, atol=1e-5)


def test_temperature_divides_the_logits() -> None:
    model, row = llama(), rows(1)[0]
    found = trained_logprobs(model, collate([row]), temperature=0.5)
    torch.testing.assert_close(found, plain_logprobs(model, row, temperature=0.5), rtol=1e-5, atol=1e-5)
    flat = trained_logprobs(model, collate([row]), temperature=1e6)
    torch.testing.assert_close(flat, torch.full_like(flat, -math.log(VOCABULARY)), rtol=1e-4, atol=1e-4)


def test_mask_off_by_one_the_logits_that_get_gradient_are_those_before_trained_tokens() -> None:
    model, row = llama(), segment([3, 4, 5, 6, 7, 8], [2, 5])
    seen: list[Tensor] = []

    def watch(_: object, inputs: tuple[Tensor], output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    handle = model.get_output_embeddings().register_forward_hook(watch)
    trained_logprobs(model, collate([row])).sum().backward()
    handle.remove()
    (logits,) = seen
    assert logits.shape == (2, VOCABULARY)  # the head ran on two places, not on six
    hidden = model.model(input_ids=torch.tensor([row.token_ids]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(logits, model.lm_head(hidden)[[1, 4]], rtol=1e-5, atol=1e-5)
    assert logits.grad is not None
    assert (logits.grad[0].argmax(), logits.grad[1].argmax()) == (5, 8)  # 1 − p at the trained token, −p elsewhere


def test_gradient_is_non_zero_exactly_for_trained_tokens() -> None:
    """Finite differences: move what predicts each token of the row in turn, and watch the loss."""
    model, row = llama(), segment([3, 4, 5, 6, 7, 8], [2, 5])
    still = trained_logprobs(model, collate([row])).sum().item()
    moved = []
    for place in range(1, 6):

        def shift(_: object, __: object, output: ModelOutput, place: int = place) -> ModelOutput:
            output.last_hidden_state[0, place - 1] += 0.5
            return output

        handle = model.model.register_forward_hook(shift)
        with torch.no_grad():
            moved.append(abs(trained_logprobs(model, collate([row])).sum().item() - still) > 1e-3)
        handle.remove()
    assert moved == [False, True, False, False, True]


def test_a_dummy_gives_every_parameter_a_gradient_of_exactly_zero() -> None:
    model, batch = qwen3(), dummy()
    found = gradients(model, -(batch.weights * trained_logprobs(model, batch)).sum())
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(bool((grad == 0).all()) for grad in found.values())


def test_chunks_equal_the_whole_and_are_recomputed_in_backward() -> None:
    model, batch = llama(), collate(rows(5))
    module = TrainedLogprobs(model)
    whole = computed(module, batch, 0.7)
    wanted = gradients(model, whole.sum())
    calls: list[int] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda _, __, output: calls.append(len(output)))
    module.head.chunk_tokens = 4
    chunked = computed(module, batch, 0.7)
    chunks = [4] * (len(whole) // 4) + [len(whole) % 4] * (len(whole) % 4 > 0)
    assert calls == chunks
    found = gradients(model, chunked.sum())
    handle.remove()
    assert sorted(calls) == sorted(chunks * 2)
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def test_a_final_softcap_is_applied() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=1.0,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    model, some = Gemma2ForCausalLM(config).eval(), rows(3)
    TrainedLogprobs(model).check()
    wanted = torch.cat([plain_logprobs(model, row) for row in some])
    torch.testing.assert_close(trained_logprobs(model, collate(some)), wanted, rtol=1e-4, atol=1e-4)
    assert wanted.min().item() > -4.0 - math.log(VOCABULARY)  # logits lie within ±2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_calls_its_sizes_by_other_names_gives_what_its_full_logits_give(attention: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=1,
        attn_implementation=attention,
    )
    model, some = GPT2LMHeadModel(config).eval(), rows(7)
    batch = collate(some)
    wanted = torch.cat([plain_logprobs(model, row) for row in some])
    for way in (along_paths, in_line, side_by_side):
        module = TrainedLogprobs(model)
        module.check()
        assert module.computes_trees == (attention == "sdpa")
        if module.computes_trees:
            way(module)
        torch.testing.assert_close(computed(module, batch, 1.0), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("logit_scale", [0.25, 0.997])
def test_a_model_that_does_more_to_its_logits_is_refused(logit_scale: float) -> None:
    config = CohereConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=1.0,
        logit_scale=logit_scale,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    with pytest.raises(LearnerError, match=r"CohereForCausalLM .* processes them further"):
        TrainedLogprobs(CohereForCausalLM(config).eval()).check()


def test_a_model_whose_decoder_cannot_be_told_from_it_is_refused_by_name() -> None:
    config = Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        pad_token_id=0,
    )
    with pytest.raises(LearnerError, match=r"Llama4ForCausalLM .* its decoder cannot be separated from the model"):
        TrainedLogprobs(Llama4ForCausalLM(config).eval())


def test_a_model_whose_rows_touch_each_other_even_side_by_side_is_refused_by_name() -> None:
    """What no configuration tells: here, every state moves by what the first row of the batch says."""
    model = llama()
    model.set_attn_implementation("eager")
    model.model.norm.register_forward_hook(lambda _, given, found: found + found[:1].mean())
    with pytest.raises(LearnerError, match="LlamaForCausalLM makes something else of rows side by side than of each"):
        TrainedLogprobs(model).check()


def test_the_check_leaves_the_attention_as_it_was() -> None:
    model = llama()
    model.set_attn_implementation("flex_attention")
    TrainedLogprobs(model).check()
    assert model.config._attn_implementation == "flex_attention"
    assert TrainedLogprobs(model).separates_rows_by_position  # such attention skips other rows by itself
