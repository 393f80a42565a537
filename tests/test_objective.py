"""What an optimiser step minimises: the loss, the importance weight before it and the KL term after it."""

import itertools
import math
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from estimating import LOSSES
from packed import collate
from tiny import segment
from torch import Tensor

from condensegrpo.algorithms.losses import KL
from condensegrpo.algorithms.objective import (
    MicroBatchLoss,
    Objective,
    ObjectiveFunction,
    PerToken,
    supervised,
)
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.algorithms.settings import Level

HALF, QUARTER = math.log(0.5), math.log(0.25)


def two_tokens(*, advantage: float = 1.0) -> PackedBatch:
    """Two tokens of one turn that the sampler gave a probability of ½."""
    return collate([segment([1, 2, 3], [1, 2], advantage=advantage, logprob=HALF)])


def test_ratios_are_taken_against_the_old_log_probabilities_and_kl_to_the_reference() -> None:
    batch = replace(two_tokens(), old=torch.tensor([QUARTER, HALF]), reference=torch.tensor([HALF, QUARTER]))
    found = Objective(loss=LOSSES["reinforce"])(torch.tensor([HALF, HALF]), batch)
    assert found.statistics["ratio"].tolist() == pytest.approx([2, 1])
    # k3 = exp(ref − logp) − (ref − logp) − 1: 0, then ½ + ln 2 − 1
    assert found.statistics["kl"].tolist() == pytest.approx([0, 0.5 + math.log(2) - 1])
    assert found.statistics["entropy"].tolist() == pytest.approx([-HALF, -HALF])


def test_without_other_knowledge_old_and_reference_are_the_samplers() -> None:
    batch = two_tokens()
    found = Objective(loss=LOSSES["clipped"])(torch.tensor([HALF, HALF]), batch)
    assert found.statistics["ratio"].tolist() == [1, 1]
    assert found.statistics["kl"].tolist() == [0, 0]


def test_the_gap_is_to_the_sampler_whatever_ratios_are_taken_against() -> None:
    batch = replace(two_tokens(), old=torch.tensor([QUARTER, QUARTER]))
    found = Objective(loss=LOSSES["clipped"])(torch.tensor([HALF, QUARTER]), batch)
    assert found.statistics["gap"].tolist() == pytest.approx([0, math.log(2)])
    never = Objective(loss=LOSSES["clipped"])(torch.tensor([HALF, -math.inf]), batch)
    assert never.statistics["gap"].tolist() == [0, 1e4]  # finite, so that the mean is


def test_gspo_sees_the_turns_and_the_others_do_not() -> None:
    one_turn = two_tokens()
    two_turns = replace(one_turn, turns=torch.tensor([0, 1]))
    logp_T = torch.tensor([HALF + 0.0002, HALF])
    # one turn: mean of 0.0002 and 0; two turns: each its own
    assert Objective(loss=LOSSES["gspo"])(logp_T, one_turn).statistics["ratio"].tolist() == pytest.approx([1.0001] * 2)
    assert Objective(loss=LOSSES["gspo"])(logp_T, two_turns).statistics["ratio"].tolist() == pytest.approx([1.0002, 1])
    assert torch.equal(
        Objective(loss=LOSSES["clipped"])(logp_T, one_turn).loss_T,
        Objective(loss=LOSSES["clipped"])(logp_T, two_turns).loss_T,
    )


def test_options_reach_the_loss() -> None:
    batch = two_tokens()
    logp_T = torch.full((2,), HALF + math.log(1.5))
    assert Objective(loss=LOSSES["clipped"], loss_options={"clip_high": 0.1})(
        logp_T, batch
    ).loss_T.tolist() == pytest.approx([-1.1, -1.1])


def test_importance_compares_the_learner_before_its_update_with_the_sampler() -> None:
    """TIS: the sampler said ½, the learner of that time 1/4 and 5/6; weights ½ and min(5/3, 1.5)."""
    batch = replace(two_tokens(), old=torch.tensor([QUARTER, math.log(5 / 6)]))
    found = Objective(loss=LOSSES["clipped"], importance_cap=1.5)(batch.old, batch)
    assert found.statistics["ratio"].tolist() == [1, 1]  # the weights did not change since
    assert found.loss_T.tolist() == pytest.approx([-0.5, -1.5])
    assert found.statistics["importance"].tolist() == pytest.approx([0.5, 5 / 3])
    assert found.statistics["importance_bounded"].tolist() == [False, True]


def test_the_first_update_needs_no_measured_log_probabilities() -> None:
    batch = replace(two_tokens(), old=torch.tensor([math.nan, math.nan]))  # would show if it were read
    logp_T = torch.tensor([QUARTER, HALF], requires_grad=True)
    found = Objective(loss=LOSSES["clipped"], importance_cap=2.0, first_update=True)(logp_T, batch)
    assert found.statistics["ratio"].tolist() == [1, 1]
    (gradient_T,) = torch.autograd.grad(found.loss_T.sum(), logp_T)
    assert gradient_T.tolist() == pytest.approx([-0.5, -1.0])  # −v·A


def test_the_kl_term_is_added_and_not_weighted_by_importance() -> None:
    batch = replace(two_tokens(), old=torch.tensor([QUARTER, HALF]), reference=torch.tensor([QUARTER, QUARTER]))
    objective = Objective(loss=LOSSES["clipped"], importance_cap=1.0, kl_coefficient=0.1, kl_estimator="k1")
    summed = MicroBatchLoss(objective, batch)(torch.tensor([QUARTER, HALF]))
    assert summed.loss.item() == pytest.approx(-0.5 - 1.0 + 0.1 * math.log(2))
    assert summed.statistics["kl_loss"].tolist() == pytest.approx([0, 0.1 * math.log(2)])


def test_the_kl_term_has_token_weights_of_its_own() -> None:
    """Losses −1 and −1 with weights 1 and 2; terms 0.1·ln 2 with weights ½ and ¼."""
    batch = replace(
        two_tokens(),
        reference=torch.tensor([QUARTER, QUARTER]),
        weights=torch.tensor([1.0, 2.0]),
        kl_weights=torch.tensor([0.5, 0.25]),
    )
    logp_T = torch.tensor([HALF, HALF], requires_grad=True)
    share = MicroBatchLoss(Objective(loss=LOSSES["clipped"], kl_coefficient=0.1, kl_estimator="k1"), batch)
    summed = share(logp_T)
    assert summed.loss.item() == pytest.approx(-3 + 0.075 * math.log(2))
    assert summed.statistics["kl_loss"].tolist() == pytest.approx([0.05 * math.log(2), 0.025 * math.log(2)])
    (gradient_T,) = torch.autograd.grad(summed.loss, logp_T)
    assert gradient_T.tolist() == pytest.approx([-1 + 0.05, -2 + 0.025])
    assert "kl_loss" not in MicroBatchLoss(Objective(loss=LOSSES["clipped"]), batch)(logp_T).statistics


def test_a_kl_term_trains_where_the_advantage_is_zero() -> None:
    """trl#7068: groups of equal reward still get the gradient of the KL term."""
    batch = replace(two_tokens(advantage=0.0), reference=torch.tensor([QUARTER, QUARTER]))
    logp_T = torch.tensor([HALF, HALF], requires_grad=True)
    share = MicroBatchLoss(Objective(loss=LOSSES["clipped"], kl_coefficient=0.1, kl_estimator="k1"), batch)
    (gradient_T,) = torch.autograd.grad(share(logp_T).loss, logp_T)
    assert gradient_T.tolist() == pytest.approx([0.1, 0.1])


def test_statistics_carry_no_gradient() -> None:
    logp_T = torch.tensor([HALF, QUARTER], requires_grad=True)
    for loss in LOSSES:
        found = Objective(loss=LOSSES[loss])(logp_T, two_tokens())
        assert found.loss_T.requires_grad
        assert not any(value_T.requires_grad for value_T in found.statistics.values())


def test_a_token_of_probability_zero_does_not_make_the_entropy_infinite() -> None:
    # 1e4, what an infinite difference counts as; the ratio is e^-20, and NaN stays visible
    found = Objective(loss=LOSSES["clipped"])(torch.tensor([-math.inf, HALF]), two_tokens())
    assert found.statistics["entropy"].tolist() == pytest.approx([1e4, -HALF])
    assert all(value_T.float().isfinite().all() for value_T in found.statistics.values())
    assert (
        Objective(loss=LOSSES["clipped"])(torch.tensor([math.nan, HALF]), two_tokens()).statistics["entropy"][0].isnan()
    )


def test_supervised_raises_every_token() -> None:
    logp_T = torch.tensor([HALF, QUARTER], requires_grad=True)
    loss_T = supervised(logp_T, two_tokens()).loss_T
    loss_T.sum().backward()
    assert loss_T.tolist() == pytest.approx([-HALF, -QUARTER])
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [-1, -1]


def put_together(loss: str, level: Level) -> dict[str, Objective]:
    """Every objective that a configuration can ask for with this loss and this level of importance weights."""
    plain = Objective(loss=LOSSES[loss])
    weighted = replace(plain, importance_cap=1.2, importance_level=level)
    objectives = {"plain": plain, "corrected": weighted, "first": replace(weighted, first_update=True)}
    return objectives | {
        f"{name} {kind}": replace(objectives[name], kl_estimator=kind, kl_coefficient=0.5)
        for name in ("plain", "first")
        for kind in KL
    }


def four_tokens() -> tuple[Tensor, PackedBatch]:
    """Two turns of two tokens, the columns different everywhere."""
    batch = collate([segment([1, 2, 3, 4, 5], [1, 2, 3, 4])])
    logp_T = torch.tensor([-1.0, -2.0, -0.5, -0.7])
    return logp_T, replace(
        batch,
        turns=torch.tensor([0, 0, 1, 1]),
        logprobs=logp_T + torch.tensor([0.1, -0.3, 0.05, 0.2]),
        old=logp_T + torch.tensor([-0.1, 0.15, 0.02, -0.05]),
        reference=logp_T + torch.tensor([0.2, 0.1, -0.4, 0.3]),
        advantages=torch.tensor([1.0, -1.0, 0.5, 2.0]),
        weights=torch.tensor([0.1, 0.2, 0.3, 0.4]),
        kl_weights=torch.tensor([0.4, 0.1, 0.2, 0.3]),
    )


def in_parts(objective: ObjectiveFunction, ends: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, statistics and gradient of a share taken in parts that end at these tokens."""
    logp_T, batch = four_tokens()
    logp_T.requires_grad_()
    share = MicroBatchLoss(objective, batch)
    parts = [share.part(slice(start, end))(logp_T[start:end]) for start, end in pairwise((0, *ends))]
    loss = torch.stack([part.loss for part in parts]).sum()
    loss.backward()
    assert logp_T.grad is not None
    statistics = {name: torch.cat([part.statistics[name] for part in parts]) for name in parts[0].statistics}
    return loss.detach(), statistics, logp_T.grad


@pytest.mark.parametrize("ends", [(1, 4), (1, 2, 3, 4), (0, 3, 4)])
@pytest.mark.parametrize("loss", sorted(name for name, plugin in LOSSES.items() if not plugin.whole_turns))
def test_an_objective_of_tokens_is_the_sum_of_its_parts(loss: str, ends: tuple[int, ...]) -> None:
    for objective in (*put_together(loss, "token").values(), supervised):
        torch.testing.assert_close(in_parts(objective, ends), in_parts(objective, (4,)))


def test_an_objective_of_turns_is_not() -> None:
    """gspo looks at turns, and so do importance weights of turns, if the objective has any."""
    for loss, level in itertools.product(LOSSES, get_args(Level)):
        for name, objective in put_together(loss, level).items():
            together = LOSSES[loss].whole_turns or (level == "turn" and not name.startswith("plain"))
            differ = not torch.allclose(in_parts(objective, (1, 4))[2], in_parts(objective, (4,))[2])
            assert differ == together, (loss, level, name)
            assert objective.tokenwise != together, (loss, level, name)


def test_only_an_objective_that_says_so_is_tokenwise() -> None:
    _, batch = four_tokens()
    assert not MicroBatchLoss(supervised, batch).tokenwise
    assert MicroBatchLoss(PerToken(supervised), batch).tokenwise


def test_a_part_has_its_own_tokens_and_the_whole_context() -> None:
    _, batch = four_tokens()
    part = MicroBatchLoss(supervised, batch).part(slice(1, 3)).batch
    assert (part.target.tolist(), part.source.tolist(), part.turns.tolist()) == ([3, 4], [1, 2], [0, 1])
    assert part.weights.tolist() == pytest.approx([0.2, 0.3])
    assert part.token_ids.tolist() == [[1, 2, 3, 4, 5]]
