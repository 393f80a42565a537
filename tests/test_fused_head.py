"""The one-pass head: the loss and gradients of autograd through all logits, for every objective that it may take."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from estimating import LOSSES
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import collate, computed
from test_head import WIDE, Largest, wide
from tiny import VOCABULARY, llama, qwen3, rows, segment, surrogate
from torch import Tensor
from transformers import PreTrainedModel

from condensegrpo.algorithms.losses import KL
from condensegrpo.algorithms.objective import (
    MicroBatchLoss,
    Objective,
    ObjectiveFunction,
    ObjectiveValue,
    PerToken,
    SummedLoss,
    supervised,
)
from condensegrpo.algorithms.packing import PackedBatch, lay_out
from condensegrpo.learner import head as fused_head
from condensegrpo.learner.logprobs import TrainedLogprobs

HIDDEN = 6
CLIPPED = Objective(loss=LOSSES["clipped"])
CORRECTED = replace(CLIPPED, importance_cap=1.5)
OBJECTIVES: dict[str, ObjectiveFunction] = {
    "supervised": supervised,
    **{
        name: Objective(loss=LOSSES[name])
        for name in sorted(name for name, plugin in LOSSES.items() if not plugin.whole_turns)
    },
    **{name: replace(CLIPPED, kl_estimator=name, kl_coefficient=0.3) for name in KL},
    "corrected": CORRECTED,
    "first_update": replace(CORRECTED, first_update=True),
}


def trained(tokens: int, *, seed: int = 0) -> PackedBatch:
    """A micro-batch of that many trained tokens with random columns, log-probabilities near those of a new model."""
    generator = torch.Generator().manual_seed(seed)
    batch = collate([segment([1, *(place % VOCABULARY for place in range(tokens))], range(1, tokens + 1))])

    def column() -> Tensor:
        return torch.randn(tokens, generator=generator)

    return replace(
        batch,
        target=torch.randint(VOCABULARY, (tokens,), generator=generator),
        turns=torch.arange(tokens) // 2,
        logprobs=column() / 3 - 3.5,
        old=column() / 3 - 3.5,
        reference=column() / 3 - 3.5,
        advantages=column(),
        weights=column().abs() / 10,
    )


def inputs(tokens: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states and a head's weight."""
    generator = torch.Generator().manual_seed(seed + 100)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    return hidden, (torch.randn(VOCABULARY, HIDDEN, generator=generator) / 2).requires_grad_()


def plain(hidden: Tensor, weight: Tensor, share: MicroBatchLoss, temperature: float) -> SummedLoss:
    """Σ w·l the long way, all logits at once."""
    logp_TV = (hidden @ weight.t() / temperature).log_softmax(dim=-1)
    return share(logp_TV.gather(1, share.batch.target[:, None])[:, 0])


def assert_close(found: Tensor | None, wanted: Tensor | None) -> None:
    """The same to 1e-5, or to 1e-6 of all numbers together; infinities and NaN in the same places."""
    assert found is not None
    assert wanted is not None
    scale = max(1.0, float(torch.where(wanted.isfinite(), wanted, 0.0).abs().sum()))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * scale, equal_nan=True)


def assert_equal(objective: ObjectiveFunction, batch: PackedBatch, *, temperature: float = 1.0, tile: int = 4) -> None:
    """Loss, statistics and both gradients in one pass are those of autograd, here for a loss that is doubled."""
    hidden, weight = inputs(len(batch.target))
    wanted = plain(hidden, weight, MicroBatchLoss(objective, batch), temperature)
    (2 * wanted.loss).backward()
    hidden_once, weight_once = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    share = MicroBatchLoss(PerToken(objective), batch)
    found = fused_head.summed(hidden_once, weight_once, batch.target, temperature=temperature, loss=share, tile=tile)
    (2 * found.loss).backward()
    assert found.statistics.keys() == wanted.statistics.keys()
    assert_close(found.loss.detach(), wanted.loss.detach())
    assert_close(hidden_once.grad, hidden.grad)
    assert_close(weight_once.grad, weight.grad)
    for name, statistic_T in wanted.statistics.items():
        assert_close(found.statistics[name], statistic_T)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@settings(max_examples=15)
@given(
    tokens=st.integers(0, 13),
    tile=st.sampled_from([1, 4, 99]),
    temperature=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_those_of_autograd_through_all_logits(
    objective: ObjectiveFunction, tokens: int, tile: int, temperature: float, seed: int
) -> None:
    assert_equal(objective, trained(tokens, seed=seed), temperature=temperature, tile=tile)


def test_a_loss_by_hand() -> None:
    """Two words with logits (0, 0) and the first is right: log π = −ln 2, d loss / d logits = (−½, ½)."""
    hidden, weight = torch.zeros(1, 2, requires_grad=True), torch.tensor([[3.0, 0.0], [1.0, 4.0]], requires_grad=True)
    batch = replace(collate([segment([1, 0], [1])]), weights=torch.tensor([10.0]))
    share = MicroBatchLoss(PerToken(supervised), batch)
    found = fused_head.summed(hidden, weight, batch.target, temperature=1.0, loss=share, tile=4)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(10 * math.log(2))
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[10 * (-1.5 + 0.5), 10 * 2.0]]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0], [0, 0]]  # the hidden state is 0


@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["logprobs", "old", "reference", "advantages"])
def test_what_is_not_finite_at_a_token_of_weight_0_makes_of_the_others_what_autograd_makes(
    planted: float, column: str
) -> None:
    """OpenRLHF#1240: NaN · 0 = NaN. The tile that holds such a token gets no other gradient than without tiles."""
    batch = trained(9)
    values, weights = getattr(batch, column).clone(), batch.weights.clone()
    values[5], weights[5] = planted, 0.0
    for objective in (CORRECTED, OBJECTIVES["k3"]):
        assert_equal(objective, replace(batch, **{column: values, "weights": weights}))


def test_a_token_that_the_sampler_gave_probability_0_adds_nothing_at_weight_0() -> None:
    batch = trained(9)
    old, weights = batch.old.clone(), batch.weights.clone()
    old[5], weights[5] = -math.inf, 0.0
    hidden, weight = inputs(9)
    share = MicroBatchLoss(PerToken(CLIPPED), replace(batch, old=old, weights=weights))
    found = fused_head.summed(hidden, weight, batch.target, temperature=1.0, loss=share, tile=4)
    found.loss.backward()
    assert found.loss.isfinite()
    assert hidden.grad is not None
    assert hidden.grad[5].tolist() == [0] * HIDDEN
    assert hidden.grad.isfinite().all()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_a_hidden_state_that_is_not_finite_reaches_the_loss_and_no_other_token() -> None:
    batch, (hidden, weight) = trained(9), inputs(9)
    with torch.no_grad():
        hidden[5, 0] = math.nan
    share = MicroBatchLoss(PerToken(CLIPPED), batch)
    found = fused_head.summed(hidden, weight, batch.target, temperature=1.0, loss=share, tile=4)
    found.loss.backward()
    assert found.loss.isnan()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all(dim=1).tolist() == [place != 5 for place in range(9)]


def test_large_logits_neither_overflow_nor_lose_a_certain_word() -> None:
    batch = replace(trained(2), target=torch.tensor([0, 1]))
    hidden = torch.tensor([[1e4] + [0.0] * (HIDDEN - 1)] * 2, requires_grad=True)
    weight = torch.eye(VOCABULARY, HIDDEN).requires_grad_()  # the first word is certain
    share = MicroBatchLoss(PerToken(supervised), batch)
    found = fused_head.summed(hidden, weight, batch.target, temperature=1.0, loss=share, tile=4)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(1e4 * float(batch.weights[1]))
    assert hidden.grad is not None
    assert hidden.grad[0].tolist() == [0] * HIDDEN
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_a_second_backward_is_refused() -> None:
    batch, (hidden, weight) = trained(3), inputs(3)
    share = MicroBatchLoss(PerToken(supervised), batch)
    found = fused_head.summed(hidden, weight, batch.target, temperature=1.0, loss=share, tile=4)
    found.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.loss.backward()


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_theirs() -> None:
    batch, (hidden, weight) = trained(9), inputs(9)
    plain(hidden, weight, MicroBatchLoss(CLIPPED, batch), 1.0).loss.backward()
    once = hidden.detach().clone().requires_grad_()
    weight = weight.detach()
    share = MicroBatchLoss(PerToken(CLIPPED), batch)
    fused_head.summed(once, weight, batch.target, temperature=1.0, loss=share, tile=4).loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(once.grad, hidden.grad, rtol=1e-5, atol=1e-6)


def test_tiles_in_bfloat16_are_added_up_in_fp32() -> None:
    """A thousand times the same token: summed in bfloat16 the gradient would stop growing at the 256th."""
    batch = collate([segment([1] * 1001, range(1, 1001))])
    generator = torch.Generator().manual_seed(0)
    hidden_1 = torch.randn(1, HIDDEN, generator=generator)
    share, gradients = MicroBatchLoss(PerToken(supervised), batch), []
    for tile in (1, 1000):
        hidden = hidden_1.expand(1000, HIDDEN).bfloat16().requires_grad_()
        weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        fused_head.summed(hidden, weight, batch.target, temperature=1.0, loss=share, tile=tile).loss.backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.bfloat16
        gradients.append(weight.grad.float())
    exact = weight.detach().float().requires_grad_()
    plain(
        hidden_1.bfloat16().float().expand(1000, HIDDEN), exact, MicroBatchLoss(supervised, batch), 1.0
    ).loss.backward()
    for found in gradients:
        assert (found - exact.grad).norm() < 0.02 * exact.grad.norm()


def counting(objective: ObjectiveFunction, seen: list[int]) -> ObjectiveFunction:
    """The same objective, which notes how many tokens it is given at a time."""

    def noted(logp_T: Tensor, batch: PackedBatch) -> ObjectiveValue:
        seen.append(len(logp_T))
        return objective(logp_T, batch)

    return noted


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}


@pytest.mark.parametrize("make", [qwen3, llama])
def test_gradients_of_whole_models_in_one_pass_are_those_of_chunks(make: Callable[[], PreTrainedModel]) -> None:
    """With embeddings that the head shares, and with a head of its own."""
    batch = collate(rows(40))
    found: list[dict[str, Tensor]] = []
    seen: list[int] = []
    objective = counting(CLIPPED, seen)
    for one in (objective, PerToken(objective)):
        module = TrainedLogprobs(make())
        module.head.chunk_tokens = 50
        computed(module, batch, 0.9, objective=one).loss.backward()
        found.append(gradients_of(module.policy))
    whole, *tiles = seen
    assert whole == sum(tiles) == len(batch.target)
    assert len(tiles) > 2
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-5, atol=1e-6)


def biased() -> TrainedLogprobs:
    model = llama()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
    return TrainedLogprobs(model)


def soft_capped() -> TrainedLogprobs:
    module = TrainedLogprobs(llama())
    module.head.softcap = 2.0
    return module


@pytest.mark.parametrize("make", [biased, soft_capped])
def test_a_head_that_does_more_than_multiply_takes_the_long_way_and_is_right(
    make: Callable[[], TrainedLogprobs],
) -> None:
    batch, seen = collate(rows(40)), list[int]()
    module, apart = make(), make()
    objective = counting(CLIPPED, seen)
    computed(module, batch, 1.0, objective=PerToken(objective)).loss.backward()
    assert seen == [len(batch.target)]
    logp_T = computed(apart, batch, 1.0)
    (batch.weights * CLIPPED(logp_T, batch).loss_T).sum().backward()
    for name, wanted in gradients_of(apart.policy).items():
        torch.testing.assert_close(gradients_of(module.policy)[name], wanted, rtol=1e-5, atol=1e-6)


def test_an_objective_that_does_not_promise_to_look_at_tokens_alone_sees_all_of_them() -> None:
    batch, seen = collate(rows(40)), list[int]()
    objective = counting(Objective(loss=LOSSES["gspo"]), seen)
    computed(TrainedLogprobs(qwen3()), batch, 1.0, objective=objective).loss.backward()
    assert seen == [len(batch.target)]


def test_no_tensor_of_tokens_by_vocabulary_is_made_in_forward_or_backward() -> None:
    module = TrainedLogprobs(wide())
    some = [segment([3, 4, *range(100 * number, 100 * number + 100)], range(2, 102)) for number in range(1, 6)]
    batch = lay_out([tuple(some)])
    with Largest() as seen:
        computed(module, batch, 1.0, objective=PerToken(supervised)).loss.backward()
    assert len(batch.target) == 500
    assert seen.elements == max(fused_head.CPU_TILE * WIDE, WIDE * 8)  # a tile's logits, the gradient of the weight


def test_rows_without_trained_tokens_give_a_loss_of_0_with_the_usual_statistics() -> None:
    batch = collate([segment([3, 4, 5], [])])
    found = computed(TrainedLogprobs(qwen3()), batch, 1.0, objective=PerToken(CLIPPED))
    found.loss.backward()
    assert float(found.loss.detach()) == 0
    assert {name: len(values) for name, values in found.statistics.items()} == dict.fromkeys(
        ("ratio", "low", "high", "entropy", "kl", "gap"), 0
    )


def test_a_loss_with_a_derivative_of_every_field_of_a_token_gets_that_tokens_fields() -> None:
    """Were columns shifted against tiles, an objective of all of them would show it."""
    assert_equal(
        lambda logp_T, batch: ObjectiveValue(surrogate(logp_T, batch) * batch.target * batch.turns, {}), trained(11)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_measured_before_an_update_is_bit_for_bit_what_the_update_sees(dtype: torch.dtype) -> None:
    """So that ratios of unchanged weights are 1 and divergences 0, and not nearly so."""
    batch, module = collate(rows(40)), TrainedLogprobs(qwen3().to(dtype))
    with torch.no_grad():
        measured_T = computed(module, batch, 0.9)
    found = computed(module, replace(batch, old=measured_T), 0.9, objective=PerToken(CLIPPED))
    assert measured_T.dtype == torch.float32
    assert len(measured_T) > fused_head.CPU_TILE
    assert torch.equal(found.statistics["ratio"], torch.ones(len(measured_T)))
    assert torch.equal(found.statistics["entropy"], -measured_T)
    near = computed(module, batch, 0.9).detach()  # with gradient, chunk by chunk
    torch.testing.assert_close(measured_T, near, rtol=1e-5, atol=1e-5)
