"""What an optimiser step minimises: the loss, the importance weight before it and the KL term after it."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import segment

from condensegrpo.losses import LOSSES, clipped, gspo, importance, k1, reinforce
from condensegrpo.objective import bound, corrected, first_update, policy, supervised, with_kl
from condensegrpo.packing import PackedBatch, collate

HALF, QUARTER = math.log(0.5), math.log(0.25)


def two_tokens(*, advantage: float = 1.0) -> PackedBatch:
    """Two tokens of one turn that the sampler gave a probability of ½."""
    return collate([segment([1, 2, 3], [1, 2], advantage=advantage, logprob=HALF)])


def test_ratios_are_taken_against_the_old_log_probabilities_and_kl_to_the_reference() -> None:
    batch = replace(two_tokens(), old=torch.tensor([QUARTER, HALF]), reference=torch.tensor([HALF, QUARTER]))
    found = policy(torch.tensor([HALF, HALF]), batch, loss=bound(reinforce, {}))
    assert found.statistics["ratio"].tolist() == pytest.approx([2, 1])
    # k3 = exp(ref − logp) − (ref − logp) − 1: 0, then ½ + ln 2 − 1
    assert found.statistics["kl"].tolist() == pytest.approx([0, 0.5 + math.log(2) - 1])
    assert found.statistics["entropy"].tolist() == pytest.approx([-HALF, -HALF])


def test_without_other_knowledge_old_and_reference_are_the_samplers() -> None:
    batch = two_tokens()
    found = policy(torch.tensor([HALF, HALF]), batch, loss=bound(clipped, {}))
    assert found.statistics["ratio"].tolist() == [1, 1]
    assert found.statistics["kl"].tolist() == [0, 0]


def test_gspo_sees_the_turns_and_the_others_do_not() -> None:
    one_turn = two_tokens()
    two_turns = replace(one_turn, turns=torch.tensor([0, 1]))
    logp_T = torch.tensor([HALF + 0.0002, HALF])
    # one turn: mean of 0.0002 and 0; two turns: each its own
    assert policy(logp_T, one_turn, loss=bound(gspo, {})).statistics["ratio"].tolist() == pytest.approx([1.0001] * 2)
    assert policy(logp_T, two_turns, loss=bound(gspo, {})).statistics["ratio"].tolist() == pytest.approx([1.0002, 1])
    assert torch.equal(
        policy(logp_T, one_turn, loss=bound(clipped, {})).loss_T,
        policy(logp_T, two_turns, loss=bound(clipped, {})).loss_T,
    )


def test_options_reach_the_loss() -> None:
    batch = two_tokens()
    logp_T = torch.full((2,), HALF + math.log(1.5))
    assert policy(logp_T, batch, loss=bound(clipped, {"clip_high": 0.1})).loss_T.tolist() == pytest.approx([-1.1, -1.1])


def test_importance_compares_the_learner_before_its_update_with_the_sampler() -> None:
    """TIS: the sampler said ½, the learner of that time 1/4 and 5/6; weights ½ and min(5/3, 1.5)."""
    batch = replace(two_tokens(), old=torch.tensor([QUARTER, math.log(5 / 6)]))
    correction = partial(importance, cap=1.5, level="token", mode="truncate")
    found = corrected(batch.old, batch, loss=bound(clipped, {}), correction=correction)
    assert found.statistics["ratio"].tolist() == [1, 1]  # the weights did not change since
    assert found.loss_T.tolist() == pytest.approx([-0.5, -1.5])
    assert found.statistics["importance"].tolist() == pytest.approx([0.5, 5 / 3])
    assert found.statistics["importance_bounded"].tolist() == [False, True]


def test_the_first_update_needs_no_measured_log_probabilities() -> None:
    batch = replace(two_tokens(), old=torch.tensor([math.nan, math.nan]))  # would show if it were read
    logp_T = torch.tensor([QUARTER, HALF], requires_grad=True)
    correction = partial(importance, cap=2.0, level="token", mode="truncate")
    inner = partial(corrected, loss=bound(clipped, {}), correction=correction)
    found = first_update(logp_T, batch, objective=inner)
    assert found.statistics["ratio"].tolist() == [1, 1]
    (gradient_T,) = torch.autograd.grad(found.loss_T.sum(), logp_T)
    assert gradient_T.tolist() == pytest.approx([-0.5, -1.0])  # −v·A


def test_the_kl_term_is_added_and_not_weighted_by_importance() -> None:
    batch = replace(two_tokens(), old=torch.tensor([QUARTER, HALF]), reference=torch.tensor([QUARTER, QUARTER]))
    correction = partial(importance, cap=1.0, level="token", mode="truncate")
    inner = partial(corrected, loss=bound(clipped, {}), correction=correction)
    found = with_kl(torch.tensor([QUARTER, HALF]), batch, objective=inner, penalty=k1, coefficient=0.1)
    assert found.loss_T.tolist() == pytest.approx([-0.5, -1.0 + 0.1 * math.log(2)])


def test_a_kl_term_trains_where_the_advantage_is_zero() -> None:
    """trl#7068: groups of equal reward still get the gradient of the KL term."""
    batch = replace(two_tokens(advantage=0.0), reference=torch.tensor([QUARTER, QUARTER]))
    logp_T = torch.tensor([HALF, HALF], requires_grad=True)
    inner = partial(policy, loss=bound(clipped, {}))
    found = with_kl(logp_T, batch, objective=inner, penalty=k1, coefficient=0.1)
    (gradient_T,) = torch.autograd.grad(found.loss_T.sum(), logp_T)
    assert gradient_T.tolist() == pytest.approx([0.1, 0.1])


def test_statistics_carry_no_gradient() -> None:
    logp_T = torch.tensor([HALF, QUARTER], requires_grad=True)
    for loss in LOSSES.values():
        found = policy(logp_T, two_tokens(), loss=bound(loss, {}))
        assert found.loss_T.requires_grad
        assert not any(value_T.requires_grad for value_T in found.statistics.values())


def test_a_token_of_probability_zero_does_not_make_the_entropy_infinite() -> None:
    # 1e4, what an infinite difference counts as; the ratio is e^-20, and NaN stays visible
    found = policy(torch.tensor([-math.inf, HALF]), two_tokens(), loss=bound(clipped, {}))
    assert found.statistics["entropy"].tolist() == pytest.approx([1e4, -HALF])
    assert all(value_T.float().isfinite().all() for value_T in found.statistics.values())
    assert (
        policy(torch.tensor([math.nan, HALF]), two_tokens(), loss=bound(clipped, {})).statistics["entropy"][0].isnan()
    )


def test_supervised_raises_every_token() -> None:
    assert supervised(torch.tensor([HALF, QUARTER]), two_tokens()).loss_T.tolist() == pytest.approx([-HALF, -QUARTER])
