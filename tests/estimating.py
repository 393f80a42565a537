"""Calls of the estimators for tests: lists in, and only the columns that the test is about."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.advantages import Batch, Estimate, EstimatorPlugin, Term
from condensegrpo.algorithms.credit import Estimator, Scores
from condensegrpo.algorithms.losses import LossPlugin
from condensegrpo.core.plugins import installed, load_plugin

LOSSES: dict[str, LossPlugin] = {point.name: load_plugin("losses", point.name) for point in installed("losses")}
ESTIMATORS: dict[str, EstimatorPlugin] = {
    point.name: load_plugin("estimators", point.name) for point in installed("estimators")
}

# One scalar a trajectory, which sums to zero over its group.
SCALAR = ("grpo", "grpo_merged", "rloo", "reinforce")
# Everything that only looks at differences of rewards within a group, without discount.
NORMALISED = (*SCALAR, "ms_grpo", "mt_grpo", "ms_po")
WITH_SINGLETON = (*NORMALISED, "turn_discounted")

Row = tuple[float, float, int, int, int]  # outcome, turn reward, group, turns, result turn


def estimate(
    estimator: str | EstimatorPlugin,
    outcomes: Sequence[float],
    *,
    groups: Sequence[int] | None = None,
    turns: Sequence[int] | None = None,
    turn_rewards: Sequence[float] | None = None,
    results: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Tensor:
    """The table of an estimator. Unless given: one group, one turn each, no turn rewards, no results.

    ``efficient`` gets equal contexts, and ``gigpo`` the index of a turn as its state, unless they are given; of
    ``fold_grpo`` the first turn is paid all turn rewards.
    """
    count = len(outcomes)
    turns_N = torch.tensor([1] * count if turns is None else turns, dtype=torch.int64)
    if estimator == "efficient":
        contexts = options.pop("contexts", [500] * count)
        options = {
            "context_N": torch.tensor(contexts, dtype=torch.float64),
            **{name: torch.zeros(count) for name in ("uncached_N", "cached_N", "output_N")},
            "truncated_N": torch.zeros(count, dtype=torch.bool),
            "context_low": 100,
            "context_high": 1000,
        } | options
    if estimator == "gigpo":
        place_K = torch.arange(max(turns_N.tolist(), default=0))
        options = {"state_NK": torch.where(place_K < turns_N[:, None], place_K, -1)} | options
    if estimator == "fold_grpo":
        paid_NK = torch.zeros((count, max(turns_N.tolist(), default=0)), dtype=torch.float64)
        if turn_rewards is not None:
            paid_NK[:, :1] = torch.tensor(turn_rewards, dtype=torch.float64)[:, None]
        options = {"turn_reward_NK": paid_NK} | options
    plugin = ESTIMATORS[estimator] if isinstance(estimator, str) else estimator
    batch = Batch(
        torch.tensor(outcomes, dtype=dtype),
        torch.tensor([0.0] * count if turn_rewards is None else turn_rewards, dtype=dtype),
        torch.tensor([0] * count if groups is None else groups, dtype=torch.int64),
        turns_N,
        torch.tensor([-1] * count if results is None else results, dtype=torch.int64),
    )
    estimate = plugin(batch, **options)
    assert_terms_add_up(estimate)
    return estimate.advantage_NK


def assert_terms_add_up(estimate: Estimate) -> None:
    """What is stored as the terms of an advantage adds up to it, beyond the last turn too if there is one."""
    if estimate.terms and estimate.advantage_NK.dtype == torch.float64:
        added = sum(value if value.dim() == 2 else value[:, None] for value in map(Term.added, estimate.terms))
        assert isinstance(added, Tensor)
        has_turn = estimate.advantage_NK != 0
        assert torch.allclose(added.expand_as(estimate.advantage_NK)[has_turn], estimate.advantage_NK[has_turn])


def of_scores(estimator: str, options: Mapping[str, object] | None = None) -> Callable[[Scores], Tensor]:
    """The table of an estimator as a function of scores, as training computes it."""
    chosen = Estimator(ESTIMATORS[estimator], options or {})
    return lambda scores: chosen(scores).advantage_NK


def run(estimator: str, rows: Sequence[Row], **options: Any) -> Tensor:
    """The table of an estimator for trajectories that were drawn by ``batches``."""
    outcomes, rewards, groups, turns, results = zip(*rows, strict=True)
    return estimate(estimator, outcomes, turn_rewards=rewards, groups=groups, turns=turns, results=results, **options)


@st.composite
def batches(draw: st.DrawFn, *, unit: bool = False, least: int = 1, turns: int = 1) -> list[Row]:
    """Trajectories of up to three groups.

    Rewards lie on a grid of quarters, so that unequal ones differ by more than rounding; with ``unit``, outcomes are
    0, ½ or 1. Every trajectory has ``turns`` turns or up to three more, and a result at one of them or none.
    """
    quarters = st.integers(-32, 32).map(lambda n: n / 4)
    rows: list[Row] = []
    for _ in range(draw(st.integers(least, 10))):
        outcome = draw(st.sampled_from([0.0, 0.5, 1.0]) if unit else quarters)
        length = draw(st.integers(turns, turns + 3))
        result = draw(st.integers(-1, length - 1))
        rows.append((outcome, draw(quarters), draw(st.sampled_from([-7, 0, 40])), length, result))
    return rows


def same(found: Tensor, wanted: Tensor | Sequence[Any], atol: float = 1e-5) -> bool:
    """Whether two tables are of one shape and equal but for rounding."""
    other = torch.as_tensor(wanted, dtype=found.dtype)
    return found.shape == other.shape and torch.allclose(found, other, atol=atol, rtol=0)
