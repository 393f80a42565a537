"""The weight of a token's loss against numbers worked out by hand, and Σ w·l whatever the micro-batches."""

import math
from typing import get_args

import pytest
import torch
from estimating import LOSSES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.objective import Totals, summary_weight, token_weights, totals, with_summary_share
from condensegrpo.algorithms.settings import Aggregation

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
def test_every_aggregation_has_its_closed_form(mode: Aggregation, wanted: list[list[float]]) -> None:
    found = token_weights(mode, TOKENS_NK, totals=Totals(2, 3, 9), max_tokens=10)
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
def test_what_a_trajectory_weighs(mode: Aggregation, first: float, second: float) -> None:
    weight_NK = token_weights(mode, TOKENS_NK, totals=Totals(2, 3, 9), max_tokens=10)
    assert (weight_NK * TOKENS_NK).sum(dim=1).tolist() == pytest.approx([first, second])


@pytest.mark.parametrize("mode", ["trajectory_constant", "trajectory_mean", "token_mean"])
def test_more_turns_of_the_same_tokens_do_not_weigh_more(mode: Aggregation) -> None:
    # SkyRL#1529: the same six tokens in one turn, or in six
    whole = token_weights(mode, torch.tensor([[6]]), totals=Totals(1, 1, 6), max_tokens=8)
    split = token_weights(mode, torch.tensor([[1] * 6]), totals=Totals(1, 6, 6), max_tokens=8)
    assert float(whole[0, 0]) * 6 == pytest.approx(float(split.sum()))


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_what_sampled_nothing_weighs_nothing_and_divides_nothing(mode: Aggregation) -> None:
    tokens_NK = torch.tensor([[0, 0], [0, 5], [0, 0]])
    weight_NK = token_weights(mode, tokens_NK, totals=Totals(3, 3, 5), max_tokens=10)
    assert (weight_NK > 0).tolist() == [[False, False], [False, True], [False, False]]
    nothing_NK = torch.zeros(1, 1, dtype=torch.int64)
    assert token_weights(mode, nothing_NK, totals=Totals(1, 1, 0), max_tokens=10).tolist() == [[0]]
    empty_NK = torch.zeros(0, 0, dtype=torch.int64)
    assert token_weights(mode, empty_NK, totals=Totals(0, 0, 0), max_tokens=10).shape == (0, 0)


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_two_ranks_with_the_totals_of_both_weigh_as_one(mode: Aggregation) -> None:
    # trl#3021, prime-rl#2358: means of means; here 1 and 3 trajectories on two ranks
    tokens_NK, turns_N = torch.tensor([[7, 1], [2, 0], [3, 3], [1, 0]]), torch.tensor([2, 1, 2, 1])
    parts = [totals(tokens_NK[:1], turns_N[:1]), totals(tokens_NK[1:], turns_N[1:])]
    both = Totals(*(sum(column) for column in zip(*parts, strict=True)))
    alone = token_weights(mode, tokens_NK, totals=totals(tokens_NK, turns_N), max_tokens=10)
    shared = [token_weights(mode, part, totals=both, max_tokens=10) for part in (tokens_NK[:1], tokens_NK[1:])]
    assert torch.equal(torch.cat(shared), alone)


@pytest.mark.parametrize("length", [None, 0, -1])
def test_the_constant_must_be_given(length: float | None) -> None:
    with pytest.raises(ValueError, match="trajectory_constant needs max_tokens > 0"):
        token_weights("trajectory_constant", TOKENS_NK, totals=Totals(2, 3, 9), max_tokens=length)


def test_other_aggregations_need_no_constant() -> None:
    assert token_weights("token_mean", TOKENS_NK, totals=Totals(2, 3, 9)).sum().item() == pytest.approx(3 / 9)


@pytest.mark.parametrize("length", [math.inf, math.nan])
def test_a_constant_that_is_no_length_is_refused(length: float) -> None:
    with pytest.raises(ValueError, match="needs max_tokens > 0, found"):
        token_weights("trajectory_constant", TOKENS_NK, totals=Totals(2, 3, 9), max_tokens=length)


def summed(name: str, logp_T: Tensor, columns: dict[str, Tensor], places: list[int]) -> Tensor:
    """Σ w·l of the tokens at some places, as one micro-batch."""
    part = {column: value[places] for column, value in columns.items()}
    options = {"turn_T": part["turn"]} if name == "gspo" else {}
    found = LOSSES[name](logp_T[places], part["old"], part["advantage"], **options)
    return (part["weight"] * found.loss_T).sum()


@pytest.mark.parametrize("mode", get_args(Aggregation))
@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(max_examples=10)
@given(
    counts=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    micro_batches=st.integers(1, 5),
)
def test_micro_batches_add_up_to_the_whole_batch(
    name: str, mode: Aggregation, counts: list[list[int]], seed: int, micro_batches: int
) -> None:
    # trl#3021, open-instruct#1161: a mean of means. Turns are dealt out to micro-batches at random, some get none, and
    # within a micro-batch tokens stand in any order: loss and gradient are those of the whole.
    tokens_NK = torch.tensor(counts)
    random = torch.Generator().manual_seed(seed)
    weight_NK = token_weights(mode, tokens_NK, totals=totals(tokens_NK, (tokens_NK > 0).sum(1)), max_tokens=9)
    turn_T = torch.repeat_interleave(torch.arange(tokens_NK.numel()), tokens_NK.flatten())
    old_T = -3 * torch.rand(len(turn_T), generator=random, dtype=torch.float64)
    advantage_K = torch.randn(tokens_NK.numel(), generator=random, dtype=torch.float64)
    columns = {
        "old": old_T,
        "advantage": advantage_K[turn_T],
        "turn": turn_T,
        "weight": weight_NK.flatten()[turn_T],
    }
    logp_T = (old_T + 0.3 * torch.randn(len(turn_T), generator=random, dtype=torch.float64)).requires_grad_()
    home_K = torch.randint(micro_batches, (tokens_NK.numel(),), generator=random)
    order = torch.randperm(len(turn_T), generator=random).tolist()
    shares = [[place for place in order if home_K[turn_T[place]] == batch] for batch in range(micro_batches)]

    whole = summed(name, logp_T, columns, list(range(len(turn_T))))
    parts = [summed(name, logp_T, columns, share) for share in shares]
    (whole_T,) = torch.autograd.grad(whole, logp_T)
    (parts_T,) = torch.autograd.grad(sum(parts, torch.tensor(0.0)), logp_T)
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12, abs=1e-15)
    assert torch.allclose(parts_T, whole_T, rtol=1e-12, atol=1e-15)


# --- the share of summaries -------------------------------------------------------------------------------------------

TOKENS_2 = torch.tensor([[2, 3, 1], [4, 0, 0]])
WROTE = torch.tensor([[False, True, False], [False, False, False]])


def shared(share: float, weight_NK: Tensor, wrote: Tensor = WROTE) -> Tensor:
    whole, summaries = summary_weight(weight_NK, TOKENS_2, wrote)
    return with_summary_share(weight_NK, wrote, share=share, total=whole, summaries=summaries)


def test_summaries_get_the_share_of_all_weight_that_is_asked_for() -> None:
    weight_NK = torch.full((2, 3), 0.1, dtype=torch.float64)
    found = shared(0.5, weight_NK)
    assert summary_weight(weight_NK, TOKENS_2, WROTE) == pytest.approx((1.0, 0.3))
    assert summary_weight(found, TOKENS_2, WROTE) == pytest.approx((1.0, 0.5))
    assert found[0].tolist() == pytest.approx([0.1 * 0.5 / 0.7, 0.1 * 0.5 / 0.3, 0.1 * 0.5 / 0.7])


def test_their_natural_share_changes_nothing_and_none_takes_all_of_it_away() -> None:
    weight_NK = torch.full((2, 3), 0.1, dtype=torch.float64)
    assert shared(0.3, weight_NK).flatten().tolist() == pytest.approx([0.1] * 6)
    assert shared(0.0, weight_NK)[0].tolist() == pytest.approx([1 / 7, 0.0, 1 / 7])


def test_without_summaries_there_is_nothing_to_share_out() -> None:
    weight_NK = torch.full((2, 3), 0.1, dtype=torch.float64)
    assert torch.equal(shared(0.5, weight_NK, torch.zeros_like(WROTE)), weight_NK)
    assert torch.equal(shared(0.5, weight_NK, torch.ones_like(WROTE)), weight_NK)
