"""Whitening over the trained tokens of a batch, against numbers worked out by hand."""

import math

import pytest
import torch
from estimating import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.advantages import Moments, moments, whiten
from condensegrpo.core.errors import ScoreError


def whitened(advantages: list[list[float]], tokens: list[list[int]], eps: float = 0.0) -> Tensor:
    """A batch on one rank."""
    advantage_NK, tokens_NK = torch.tensor(advantages, dtype=torch.float64), torch.tensor(tokens)
    return whiten(advantage_NK, tokens_NK, moments=moments(advantage_NK, tokens_NK), eps=eps)


def test_moments_count_a_turn_by_its_tokens() -> None:
    # 4 tokens; 3·1 − 1·1 = 2; 3·1 + 1·1 = 4
    assert moments(torch.tensor([[1.0], [-1.0]]), torch.tensor([[3], [1]])) == Moments(tokens=4, total=2, square=4)


def test_advantages_are_centred_and_scaled_over_tokens() -> None:
    # mean ½; variance (4 − 4/4)/3 = 1
    assert same(whitened([[1], [-1]], [[3], [1]]), [[0.5], [-1.5]], atol=1e-12)


def test_turns_of_a_trajectory_count_each_by_their_own_tokens() -> None:
    # tokens 1, 1, 2 with 2, 0, −1: mean 0; squares 4 + 0 + 2 = 6, variance 6/3 = 2; the turn beyond stays 0
    root2 = math.sqrt(2)
    assert same(whitened([[2, 0], [-1, 0]], [[1, 1], [2, 0]]), [[root2, 0], [-1 / root2, 0]], atol=1e-12)


def test_eps_is_added_to_the_deviation() -> None:
    assert same(whitened([[1], [-1]], [[3], [1]], eps=0.25), [[0.4], [-1.2]], atol=1e-12)


def test_a_turn_without_tokens_is_zero_again() -> None:
    """Where it was not masked a second time, the mean moved padding to −mean/std."""
    found = whitened([[3, 7, 0], [-1, 0, 0]], [[1, 0, 0], [1, 0, 0]])
    assert found[:, 1:].tolist() == [[0, 0], [0, 0]]
    # mean 1, variance 8: the 7 without tokens counts nowhere
    assert same(found[:, :1], [[math.sqrt(0.5)], [-math.sqrt(0.5)]], atol=1e-12)


def test_what_stands_at_a_turn_without_tokens_does_not_matter() -> None:
    """NaN × 0 is NaN (OpenRLHF#1240)."""
    planted = whitened([[1, math.nan], [-1, math.inf]], [[3, 0], [1, 0]])
    assert same(planted, [[0.5, 0], [-1.5, 0]], atol=1e-12)


def test_zero_advantages_get_one_that_is_not_and_a_group_no_longer_sums_to_zero() -> None:
    """What the docstring warns of. Groups [1, −1] with 3 and 1 tokens, and [0, 0] with one each.

    T = 6, mean 2/6 = ⅓, variance (4 − 4/6)/5 = ⅔.
    """
    found = whitened([[1], [-1], [0], [0]], [[3], [1], [1], [1]])
    scale = math.sqrt(1.5)
    assert same(found, [[2 / 3 * scale], [-4 / 3 * scale], [-1 / 3 * scale], [-1 / 3 * scale]], atol=1e-12)
    assert float(found[:2].sum()) == pytest.approx(-2 / 3 * scale)


@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e-9, 1e50, 1e100])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_advantages_give_exactly_zero(value: float, eps: float) -> None:
    assert whitened([[value, value], [value, 0]], [[1000, 37], [3, 0]], eps=eps).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("value", "tokens"), [(0.1, (55, 52)), (1 / 3, (17, 8)), (0.7, (32, 49))])
def test_rounding_in_the_sums_is_no_deviation(value: float, tokens: tuple[int, int]) -> None:
    """Here Σ A² − (Σ A)²/T comes to 4e-16 or 7e-15 and not to 0, which makes a deviation of 2e-9."""
    assert whitened([[value], [value]], [[count] for count in tokens]).tolist() == [[0], [0]]


def test_advantages_that_differ_by_a_hundred_thousandth_are_not_equal() -> None:
    found = whitened([[1.0], [1.00001]], [[1], [1]])
    assert same(found, [[-math.sqrt(0.5)], [math.sqrt(0.5)]], atol=1e-4)


@pytest.mark.parametrize("tokens", [[[0], [0]], [[1], [0]]])
def test_fewer_than_two_tokens_give_zero(tokens: list[list[int]]) -> None:
    assert whitened([[1], [-1]], tokens).tolist() == [[0], [0]]


def test_an_empty_batch_stays_empty() -> None:
    assert moments(torch.zeros(0, 0), torch.zeros(0, 0)) == Moments(tokens=0, total=0, square=0)
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3), moments=Moments(0, 0, 0)).shape == (0, 3)


def test_the_type_of_the_advantages_is_kept_and_the_sums_are_double() -> None:
    # in float32, 10⁷ tokens of 1 and then ones of −1 would stop counting; mean 0, variance T/(T − 1)
    advantage_NK, tokens_NK = torch.tensor([[1.0], [-1.0]]), torch.tensor([[20_000_001], [20_000_001]])
    found = moments(advantage_NK, tokens_NK)
    assert found == Moments(tokens=40_000_002, total=0, square=40_000_002)
    assert whiten(advantage_NK, tokens_NK, moments=found).dtype == torch.float32


def test_ranks_that_add_their_moments_agree_with_one_that_has_all() -> None:
    advantage_NK, tokens_NK = (
        torch.tensor([[1.0, 2.0], [-1.0, 0.0], [0.5, 0.0]]),
        torch.tensor([[3, 1], [1, 0], [4, 0]]),
    )
    parts = [moments(advantage_NK[:1], tokens_NK[:1]), moments(advantage_NK[1:], tokens_NK[1:])]
    added = Moments(*(sum(field) for field in zip(*parts, strict=True)))
    whole = whiten(advantage_NK, tokens_NK, moments=moments(advantage_NK, tokens_NK))
    assert torch.equal(whiten(advantage_NK[:1], tokens_NK[:1], moments=added), whole[:1])
    assert torch.equal(whiten(advantage_NK[1:], tokens_NK[1:], moments=added), whole[1:])


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(-40, 40), st.integers(0, 30)), min_size=1, max_size=12))
def test_over_tokens_the_mean_is_zero_and_the_variance_one(turns: list[tuple[int, int]]) -> None:
    found = whitened([[value / 8] for value, _ in turns], [[count] for _, count in turns]).flatten().tolist()
    per_token = [value for value, (_, count) in zip(found, turns, strict=True) for _ in range(count)]
    if len({value for value, count in turns if count}) > 1:
        assert math.fsum(per_token) == pytest.approx(0, abs=1e-9)
        assert math.fsum(value**2 for value in per_token) / (len(per_token) - 1) == pytest.approx(1)
    else:
        assert set(found) == {0}


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(-40, 40), st.integers(1, 30)), min_size=2, max_size=8), st.sampled_from([-5, 3]))
def test_a_shift_and_a_positive_scale_of_the_whole_batch_change_nothing(
    turns: list[tuple[int, int]], shift: int
) -> None:
    tokens = [[count] for _, count in turns]
    plain = whitened([[value / 8] for value, _ in turns], tokens)
    assert same(whitened([[7 * (value / 8 + shift)] for value, _ in turns], tokens), plain, atol=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.1e100])
def test_an_advantage_that_would_poison_the_batch_names_its_trajectory(value: float) -> None:
    with pytest.raises(ScoreError, match=r"trajectory 1 \(of 2.*wanted finite numbers"):
        whitened([[0, 0], [0, value]], [[1, 1], [1, 1]])


def test_shapes_are_checked() -> None:
    nothing = Moments(0, 0, 0)
    with pytest.raises(ValueError, match=r"found \(1, 2\) and \(2, 1\)"):
        whiten(torch.zeros(1, 2), torch.zeros(2, 1), moments=nothing)
    with pytest.raises(ValueError, match=r"found \(3,\) and \(3,\)"):
        moments(torch.zeros(3), torch.zeros(3))
