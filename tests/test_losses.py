"""The loss of a token, and the weight of a token's loss, against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.losses import LOSSES, WEIGHTS, Totals, clipped, nll, token_weights, totals


def one_token(ratio: float, advantage: float, **bounds: float) -> tuple[float, float, bool, bool]:
    """(loss, d loss / d logp, held at the lower bound, at the upper) of a token sampled with probability ½."""
    old_T = torch.tensor([math.log(0.5)], dtype=torch.float64)
    logp_T = (old_T + math.log(ratio)).requires_grad_()
    found = clipped(logp_T, old_T, torch.tensor([advantage], dtype=torch.float64), **bounds)
    (gradient_T,) = torch.autograd.grad(found.loss_T.sum(), logp_T)
    return found.loss_T.item(), gradient_T.item(), bool(found.low_T), bool(found.high_T)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_on_policy_the_gradient_is_minus_the_advantage(advantage: float) -> None:
    assert one_token(1.0, advantage) == pytest.approx((-advantage, -advantage, False, False))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        (1.1, 1.0, -1.1, -1.1, False, False),  # inside
        (1.5, 1.0, -1.2, 0.0, False, True),  # raised enough
        (0.5, 1.0, -0.5, -0.5, False, False),  # to be raised, fell: full gradient
        (0.5, -1.0, 0.8, 0.0, True, False),  # lowered enough
        (1.5, -1.0, 1.5, 1.5, False, False),  # to be lowered, rose: full gradient
        (5.0, 0.0, 0.0, 0.0, False, False),  # no advantage
    ],
)
def test_clipping_is_one_sided(
    ratio: float, advantage: float, loss: float, gradient: float, low: bool, high: bool
) -> None:
    assert one_token(ratio, advantage) == pytest.approx((loss, gradient, low, high))


def test_the_bounds_are_set_apart() -> None:
    assert one_token(1.5, 1.0, clip_high=0.6) == pytest.approx((-1.5, -1.5, False, False))
    assert one_token(1.5, 1.0, clip_high=0.28) == pytest.approx((-1.28, 0.0, False, True))
    assert one_token(0.5, -1.0, clip_low=0.6) == pytest.approx((0.5, 0.5, False, False))


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_rose() -> None:
    assert one_token(5.0, -1.0) == pytest.approx((5.0, 5.0, False, False))
    assert one_token(5.0, -1.0, dual_clip=3.0) == pytest.approx((3.0, 0.0, False, True))
    assert one_token(2.0, -1.0, dual_clip=3.0) == pytest.approx((2.0, 2.0, False, False))
    assert one_token(5.0, 1.0, dual_clip=3.0) == pytest.approx((-1.2, 0.0, False, True))


def test_a_ratio_beyond_all_measure_stays_finite_and_has_no_gradient() -> None:
    # trl#4772: the ratio of sampler and learner explodes
    logp_T = torch.tensor([-1.0, -500.0], requires_grad=True)
    found = clipped(logp_T, torch.tensor([-500.0, -1.0]), torch.tensor([-1.0, 1.0]))
    found.loss_T.sum().backward()
    assert found.ratio_T.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)
    assert found.loss_T.isfinite().all()
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [0, 0]


def test_statistics_carry_no_gradient_and_a_weight_of_zero_silences_a_token() -> None:
    logp_T = torch.tensor([-0.5, -0.7], requires_grad=True)
    found = clipped(logp_T, torch.tensor([-0.5, -0.1]), torch.tensor([1.0, 1.0]))
    assert not any(statistic_T.requires_grad for statistic_T in found[1:])
    (torch.tensor([1.0, 0.0]) * found.loss_T).sum().backward()
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [-1, 0]


def test_no_tokens_have_no_loss() -> None:
    empty_T = torch.zeros(0, requires_grad=True)
    assert clipped(empty_T, torch.zeros(0), torch.zeros(0)).loss_T.sum().item() == 0
    assert nll(empty_T).loss_T.sum().item() == 0


@settings(deadline=None, max_examples=100)
@given(st.floats(-30, 0), st.floats(-30, 0), st.floats(-5, 5))
def test_clipping_never_lowers_the_loss(logp: float, old: float, advantage: float) -> None:
    def as_tensor(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64)

    plain = -math.exp(max(-20.0, min(20.0, logp - old))) * advantage
    found = clipped(as_tensor(logp), as_tensor(old), as_tensor(advantage)).loss_T.item()
    dual = clipped(as_tensor(logp), as_tensor(old), as_tensor(advantage), dual_clip=3.0).loss_T.item()
    assert found >= plain - 1e-9 * abs(plain)
    assert dual <= found
    assert math.isfinite(dual)


def test_the_supervised_loss_is_the_negative_log_probability() -> None:
    logp_T = torch.tensor([-0.5, -2.0], requires_grad=True)
    found = nll(logp_T)
    found.loss_T.sum().backward()
    assert found.loss_T.tolist() == [0.5, 2.0]
    assert found.ratio_T.tolist() == [1, 1]
    assert not found.low_T.any()
    assert not found.high_T.any()
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [-1, -1]


def test_the_table_names_the_losses_of_the_configuration() -> None:
    assert dict(LOSSES) == {"clipped": clipped}


# Two trajectories: one of two turns with 2 and 4 tokens, one of a single turn with 3.
TOKENS_NK = torch.tensor([[2, 4], [3, 0]])
TURNS_N = torch.tensor([2, 1])


def test_totals_count_trajectories_turns_and_tokens() -> None:
    assert totals(TOKENS_NK, TURNS_N) == Totals(trajectories=2, turns=3, tokens=9)


def test_totals_count_what_sampled_nothing() -> None:
    found = totals(torch.tensor([[0, 0], [0, 5], [0, 0]]), torch.tensor([0, 2, 1]))
    assert found == Totals(trajectories=3, turns=3, tokens=5)


def test_totals_of_no_trajectory_are_zero() -> None:
    assert totals(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) == Totals(0, 0, 0)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("trajectory_constant", [[1 / (2 * 10), 1 / (2 * 10)], [1 / (2 * 10), 0]]),  # 1/(B·L)
        ("trajectory_mean", [[1 / (2 * 6), 1 / (2 * 6)], [1 / (2 * 3), 0]]),  # 1/(B·N_i)
        ("token_mean", [[1 / 9, 1 / 9], [1 / 9, 0]]),  # 1/ΣN_i
        ("turn_mean", [[1 / (3 * 2), 1 / (3 * 4)], [1 / (3 * 3), 0]]),  # 1/(ΣK_i·n_it)
    ],
)
def test_every_aggregation_has_its_closed_form(mode: str, wanted: list[list[float]]) -> None:
    found = token_weights(mode, TOKENS_NK, totals=Totals(2, 3, 9), max_tokens=10)  # type: ignore[arg-type]
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-14)
    assert found.dtype == torch.float64


@pytest.mark.parametrize(
    ("mode", "first", "second"),  # what the loss of a trajectory weighs: Σ w over its tokens
    [
        ("trajectory_constant", 6 / 20, 3 / 20),
        ("trajectory_mean", 1 / 2, 1 / 2),
        ("token_mean", 6 / 9, 3 / 9),
        ("turn_mean", 2 / 3, 1 / 3),
    ],
)
def test_what_a_trajectory_weighs(mode: str, first: float, second: float) -> None:
    weight_NK = token_weights(mode, TOKENS_NK, totals=Totals(2, 3, 9), max_tokens=10)  # type: ignore[arg-type]
    assert (weight_NK * TOKENS_NK).sum(dim=1).tolist() == pytest.approx([first, second])


@pytest.mark.parametrize("mode", ["trajectory_constant", "trajectory_mean", "token_mean"])
def test_more_turns_of_the_same_tokens_do_not_weigh_more(mode: str) -> None:
    # SkyRL#1529: the same six tokens in one turn, or in six
    whole = token_weights(mode, torch.tensor([[6]]), totals=Totals(1, 1, 6), max_tokens=8)  # type: ignore[arg-type]
    split = token_weights(mode, torch.tensor([[1] * 6]), totals=Totals(1, 6, 6), max_tokens=8)  # type: ignore[arg-type]
    assert float(whole[0, 0]) * 6 == pytest.approx(float(split.sum()))


@pytest.mark.parametrize("mode", sorted(WEIGHTS))
def test_what_sampled_nothing_weighs_nothing_and_divides_nothing(mode: str) -> None:
    tokens_NK = torch.tensor([[0, 0], [0, 5], [0, 0]])
    weight_NK = token_weights(mode, tokens_NK, totals=Totals(3, 3, 5), max_tokens=10)  # type: ignore[arg-type]
    assert (weight_NK > 0).tolist() == [[False, False], [False, True], [False, False]]
    nothing_NK = torch.zeros(1, 1, dtype=torch.int64)
    assert token_weights(mode, nothing_NK, totals=Totals(1, 1, 0), max_tokens=10).tolist() == [[0]]  # type: ignore[arg-type]
    empty_NK = torch.zeros(0, 0, dtype=torch.int64)
    assert token_weights(mode, empty_NK, totals=Totals(0, 0, 0), max_tokens=10).shape == (0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", sorted(WEIGHTS))
def test_two_ranks_with_the_totals_of_both_weigh_as_one(mode: str) -> None:
    # trl#3021, prime-rl#2358: means of means; here 1 and 3 trajectories on two ranks
    tokens_NK, turns_N = torch.tensor([[7, 1], [2, 0], [3, 3], [1, 0]]), torch.tensor([2, 1, 2, 1])
    parts = [totals(tokens_NK[:1], turns_N[:1]), totals(tokens_NK[1:], turns_N[1:])]
    both = Totals(*(sum(column) for column in zip(*parts, strict=True)))
    alone = token_weights(mode, tokens_NK, totals=totals(tokens_NK, turns_N), max_tokens=10)  # type: ignore[arg-type]
    shared = [token_weights(mode, part, totals=both, max_tokens=10) for part in (tokens_NK[:1], tokens_NK[1:])]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(shared), alone)


@pytest.mark.parametrize("length", [None, 0, -1])
def test_the_constant_must_be_given(length: float | None) -> None:
    with pytest.raises(ValueError, match="trajectory_constant needs max_tokens > 0"):
        token_weights("trajectory_constant", TOKENS_NK, totals=Totals(2, 3, 9), max_tokens=length)


def test_other_aggregations_need_no_constant() -> None:
    assert token_weights("token_mean", TOKENS_NK, totals=Totals(2, 3, 9)).sum().item() == pytest.approx(3 / 9)
