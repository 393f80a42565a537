"""The loss of a token and its gradient, against numbers worked out by hand; bad columns and bounds."""

import math

import pytest
import torch
from estimating import LOSSES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.losses import TokenLoss, cispo, clipped, gspo, reinforce


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


@settings(max_examples=100)
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


def column(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def of(name: str, logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, turn_T: Tensor | None = None) -> TokenLoss:
    """A loss of the table by its name; without turns, all tokens are of one turn."""
    turn_T = torch.zeros(len(logp_T), dtype=torch.int64) if turn_T is None else turn_T
    options = {"turn_T": turn_T} if name == "gspo" else {}
    return LOSSES[name](logp_T, old_T, advantage_T, **options)


def gradient(loss_T: Tensor, logp_T: Tensor) -> list[float]:
    """d Σ loss / d logp of every token."""
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logp_T)
    found: list[float] = gradient_T.tolist()
    return found


# reinforce


def test_reinforce_is_minus_the_advantage_times_the_log_probability() -> None:
    logp_T = column(-0.5, -2.0).requires_grad_()
    found = reinforce(logp_T, column(-0.5, -2.0 - math.log(2)), column(3.0, -1.0))
    assert found.loss_T.tolist() == [1.5, -2.0]
    assert gradient(found.loss_T, logp_T) == [-3.0, 1.0]
    assert found.ratio_T.tolist() == pytest.approx([1, 2])  # reported, and nothing more
    assert not found.low_T.any()
    assert not found.high_T.any()


# cispo: a token that was sampled with probability 0.1


@pytest.mark.parametrize(
    ("ratio", "loss", "slope", "low", "high"),  # for A = 1, bounds 0.8 and 1.5
    [
        (1.2, -1.2 * math.log(0.12), -1.2, False, False),  # inside
        (0.5, -0.8 * math.log(0.05), -0.8, True, False),  # raised to the lower bound
        (8.0, -1.5 * math.log(0.8), -1.5, False, True),  # lowered to the upper bound
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 2.5])
def test_cispo_bounds_the_factor_and_keeps_the_gradient(
    advantage: float, ratio: float, loss: float, slope: float, low: bool, high: bool
) -> None:
    logp_T = column(math.log(0.1 * ratio)).requires_grad_()
    found = cispo(logp_T, column(math.log(0.1)), column(advantage), clip_low=0.2, clip_high=0.5)
    assert found.loss_T.item() == pytest.approx(advantage * loss)
    assert gradient(found.loss_T, logp_T) == pytest.approx([advantage * slope])
    assert (bool(found.low_T), bool(found.high_T)) == (low, high)
    assert found.ratio_T.item() == pytest.approx(ratio)


def test_cispo_by_default_bounds_the_upper_side_only() -> None:
    logp_T = column(math.log(0.5), math.log(0.001)).requires_grad_()
    found = cispo(logp_T, column(math.log(0.5 / 8), math.log(0.1)), column(1.0, 1.0))
    assert found.loss_T.tolist() == pytest.approx([5 * math.log(2), 0.01 * math.log(1000)])  # 3.47 and 0.07
    assert gradient(found.loss_T, logp_T) == pytest.approx([-5, -0.01])
    assert (found.low_T.tolist(), found.high_T.tolist()) == ([False, False], [True, False])


@settings(max_examples=100)
@given(st.floats(-1e4, 0), st.floats(-1e4, 0), st.floats(1e-3, 5), st.sampled_from([-1, 1]))
def test_cispo_never_drops_a_token_that_has_an_advantage(logp: float, old: float, size: float, sign: int) -> None:
    logp_T = column(logp).requires_grad_()
    (slope,) = gradient(cispo(logp_T, column(old), column(sign * size)).loss_T, logp_T)
    assert 0 < -sign * slope <= 5 * size * (1 + 1e-12)


# gspo: a turn of two tokens, whose ratio is the square root of the product of theirs


def two_tokens(
    ratio: float, advantage: float, **bounds: float
) -> tuple[list[float], list[float], list[bool], list[bool]]:
    """(losses, gradients, low, high) of a turn whose first token moved by ratio² and whose second stood still."""
    logp_T = column(-3 + 2 * math.log(ratio), -1).requires_grad_()
    turn_T = torch.tensor([5, 5])
    found = gspo(logp_T, column(-3, -1), column(advantage, advantage), turn_T=turn_T, **bounds)
    assert found.ratio_T.tolist() == pytest.approx([ratio, ratio])
    return found.loss_T.tolist(), gradient(found.loss_T, logp_T), found.low_T.tolist(), found.high_T.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "low", "high"),  # of either token; bounds 0.8 and 1.5
    [
        (1.25, 1.0, -1.25, -1.25, False, False),  # inside
        (0.9, -1.0, 0.9, 0.9, False, False),  # inside
        (2.0, 1.0, -1.5, 0.0, False, True),  # raised enough
        (0.5, 1.0, -0.5, -0.5, False, False),  # to be raised, fell: full gradient
        (0.5, -1.0, 0.8, 0.0, True, False),  # lowered enough
        (2.0, -1.0, 2.0, 2.0, False, False),  # to be lowered, rose: full gradient
        (2.0, 0.0, 0.0, 0.0, False, False),  # no advantage
    ],
)
def test_gspo_bounds_the_turn_and_not_its_tokens(
    ratio: float, advantage: float, loss: float, slope: float, low: bool, high: bool
) -> None:
    losses, slopes, lows, highs = two_tokens(ratio, advantage, clip_low=0.2, clip_high=0.5)
    assert losses == pytest.approx([loss, loss])
    assert slopes == pytest.approx([slope, slope])
    assert (lows, highs) == ([low, low], [high, high])


def test_gspo_has_the_narrow_bounds_of_its_paper() -> None:
    assert two_tokens(1 + 3.9e-4, 1.0)[3] == [False, False]
    assert two_tokens(1 + 4.1e-4, 1.0)[3] == [True, True]
    assert two_tokens(1 - 2.9e-4, -1.0)[2] == [False, False]
    assert two_tokens(1 - 3.1e-4, -1.0)[2] == [True, True]


def test_gspo_keeps_turns_apart_whatever_their_labels() -> None:
    # turn 9: ln 4 and 0, so 2; turn −4: ln ½ alone, so ½
    old_T = column(-2, -2, -2)
    turn_T = torch.tensor([9, -4, 9])
    found = gspo(old_T + column(math.log(4), -math.log(2), 0), old_T, column(1, 1, 1), turn_T=turn_T)
    assert found.ratio_T.tolist() == pytest.approx([2, 0.5, 2])


@settings(max_examples=100)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=8), st.floats(-3, 3))
def test_gspo_has_the_size_of_a_token_level_loss(moves: list[float], advantage: float) -> None:
    # Σ over the turn = −n·s·A, and its gradient −s·A in every token, however many there are
    logp_T = column(*moves).requires_grad_()
    turn_T = torch.ones(len(moves), dtype=torch.int32)
    advantage_T = torch.full_like(logp_T, advantage)
    found = gspo(logp_T, torch.zeros_like(logp_T), advantage_T, turn_T=turn_T, clip_low=1, clip_high=9)
    ratio = math.exp(sum(moves) / len(moves))
    assert found.loss_T.sum().item() == pytest.approx(-len(moves) * ratio * advantage)
    assert gradient(found.loss_T, logp_T) == pytest.approx([-ratio * advantage] * len(moves))


def test_gspo_with_unequal_weights_acts_by_their_mean() -> None:
    logp_T = column(-1, -1).requires_grad_()
    found = gspo(logp_T, column(-1, -1), column(1, 1), turn_T=torch.tensor([0, 0]))
    assert gradient(column(0.25, 0.75) * found.loss_T, logp_T) == [-0.5, -0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gspo_with_turns_of_one_token_is_clipped(dtype: torch.dtype) -> None:
    moved = [math.log(ratio) for ratio in (1.1, 1.5, 0.5, 0.5, 1.5, 1e-12)]
    logp_T = column(*moved, dtype=dtype).requires_grad_()
    old_T, advantage_T = torch.zeros_like(logp_T), column(1, 1, 1, -1, -1, -1, dtype=dtype)
    one = gspo(logp_T, old_T, advantage_T, turn_T=torch.tensor([3, 1, 4, 15, 9, 2]), clip_low=0.2, clip_high=0.2)
    other = clipped(logp_T, old_T, advantage_T)
    assert [part.tolist() for part in one] == [part.tolist() for part in other]
    assert gradient(one.loss_T, logp_T) == gradient(other.loss_T, logp_T)
    assert one.loss_T.dtype == dtype


# all of them


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_on_policy_all_losses_have_the_gradient_of_reinforce(name: str, advantage: float) -> None:
    logp_T = column(-0.5, -3.0, -0.1).requires_grad_()
    found = of(name, logp_T, logp_T.detach(), torch.full_like(logp_T, advantage), torch.tensor([1, 1, 0]))
    assert found.ratio_T.tolist() == [1, 1, 1]
    assert gradient(found.loss_T, logp_T) == pytest.approx([-advantage] * 3)
    assert not any(part.requires_grad for part in found[1:])


FAR = [0.0, -1.0, -30.0, -1e4, -math.inf]


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("one_turn", [True, False])
def test_log_probabilities_far_apart_or_infinite_make_no_nan(
    name: str, advantage: float, dtype: torch.dtype, one_turn: bool
) -> None:
    # OpenRLHF#1240: NaN × 0 is NaN, so neither a loss of weight 0 nor a gradient behind torch.where may hold one
    pairs = [(logp, old) for logp in FAR for old in FAR]
    logp_T = column(*(logp for logp, _ in pairs), dtype=dtype).requires_grad_()
    old_T = column(*(old for _, old in pairs), dtype=dtype)
    turn_T = torch.zeros(len(pairs), dtype=torch.int64) if one_turn else torch.arange(len(pairs))
    found = of(name, logp_T, old_T, torch.full_like(old_T, advantage), turn_T)
    assert found.loss_T.isfinite().all()
    assert found.ratio_T.isfinite().all()
    assert (found.ratio_T > 0).all()
    assert all(map(math.isfinite, gradient(found.loss_T, logp_T)))
    silent_T = torch.zeros_like(old_T) * of(name, logp_T, old_T, torch.full_like(old_T, advantage), turn_T).loss_T
    assert gradient(silent_T, logp_T) == [0] * len(pairs)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_probability_of_zero_has_the_largest_ratio_the_smallest_or_one(name: str) -> None:
    logp_T = column(-1, -math.inf, -math.inf).requires_grad_()
    found = of(name, logp_T, column(-math.inf, -1, -math.inf), column(1, 1, 1), torch.tensor([0, 1, 2]))
    assert found.ratio_T.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1])
    assert gradient(found.loss_T, logp_T)[1:] == [0, 0]  # of probability 0 under the learner: no gradient


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_nan_of_the_model_is_not_hidden(name: str) -> None:
    found = of(name, column(math.nan, -1), column(-1, -1), column(1, 1), torch.tensor([0, 1]))
    assert found.loss_T.isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_trained_tokens_have_a_loss_of_zero_and_an_empty_gradient(name: str) -> None:
    logp_T = column().requires_grad_()
    found = of(name, logp_T, column(), column())
    assert [part.shape for part in found] == [(0,)] * 4
    assert found.loss_T.sum().item() == 0
    assert gradient(found.loss_T, logp_T) == []


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("lengths", [(2, 3, 2), (2, 2, 1), (3, 2, 2)])
def test_columns_of_different_lengths_are_refused(name: str, lengths: tuple[int, int, int]) -> None:
    shapes = rf"logp_T \({lengths[0]},\), old_T \({lengths[1]},\), advantage_T \({lengths[2]},\)"
    with pytest.raises(ValueError, match=f"computing the loss {name}: found the shapes {shapes}"):
        of(name, *(torch.zeros(length) for length in lengths))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_rows_of_tokens_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"wanted one shape \(T,\)"):
        of(name, torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_turns_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"turn_T is of type {dtype}, wanted an integer type"):
        gspo(column(-1), column(-1), column(1), turn_T=torch.zeros(1, dtype=dtype))


def test_turns_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"turn_T \(2,\), wanted one shape"):
        gspo(column(-1), column(-1), column(1), turn_T=torch.tensor([0, 0]))
