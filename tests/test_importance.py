"""ImportanceWeights correction between sampler and learner, against numbers worked out by hand."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.objective import ImportanceWeights, importance
from condensegrpo.algorithms.settings import Level, Mode

# Turn 7 has two tokens, which the learner finds 4 times and half as likely; turn 2 has one, an eighth as likely.
SAMPLER_T = torch.tensor([-2.0, -1.0, -1.0], dtype=torch.float64)
LEARNER_T = SAMPLER_T + torch.tensor([4, 1 / 8, 1 / 2], dtype=torch.float64).log()
TURN_T = torch.tensor([7, 2, 7])


@pytest.mark.parametrize(
    ("level", "mode", "cap", "weight", "bounded"),
    [
        ("token", "truncate", 3.0, [3, 1 / 8, 1 / 2], [True, False, False]),
        ("token", "mask", 3.0, [0, 0, 1 / 2], [True, True, False]),
        ("token", "truncate", 5.0, [4, 1 / 8, 1 / 2], [False, False, False]),
        ("token", "mask", 5.0, [4, 0, 1 / 2], [False, True, False]),
        ("turn", "truncate", 3.0, [2, 1 / 8, 2], [False, False, False]),  # 4·½ = 2 for both tokens of turn 7
        ("turn", "mask", 3.0, [2, 0, 2], [False, True, False]),
        ("turn", "truncate", 1.5, [1.5, 1 / 8, 1.5], [True, False, True]),
        ("turn", "mask", 1.5, [0, 0, 0], [True, True, True]),
    ],
)
def test_every_level_and_mode_by_hand(
    level: Level, mode: Mode, cap: float, weight: list[float], bounded: list[bool]
) -> None:
    found = importance(LEARNER_T, SAMPLER_T, TURN_T, cap=cap, level=level, mode=mode)
    assert found.weight_T.tolist() == pytest.approx(weight)
    assert found.ratio_T.tolist() == pytest.approx([4, 1 / 8, 1 / 2] if level == "token" else [2, 1 / 8, 2])
    assert found.bounded_T.tolist() == bounded


def test_ratios_of_tokens_and_of_turns() -> None:
    assert token_ratio(LEARNER_T, SAMPLER_T, TURN_T).tolist() == pytest.approx([4, 1 / 8, 1 / 2])
    assert turn_ratio(LEARNER_T, SAMPLER_T, TURN_T).tolist() == pytest.approx([2, 1 / 8, 2])


def token_ratio(learner_T: Tensor, sampler_T: Tensor, turn_T: Tensor) -> Tensor:
    return importance(learner_T, sampler_T, turn_T, cap=2.0, level="token", mode="truncate").ratio_T


def turn_ratio(learner_T: Tensor, sampler_T: Tensor, turn_T: Tensor) -> Tensor:
    return importance(learner_T, sampler_T, turn_T, cap=2.0, level="turn", mode="truncate").ratio_T


def test_the_bounds_themselves_are_inside() -> None:
    learner_T, sampler_T = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1], dtype=torch.float64).log(), torch.zeros(5)
    columns = (learner_T, sampler_T, torch.arange(5))
    truncated = importance(*columns, cap=2.0, level="token", mode="truncate")
    masked = importance(*columns, cap=2.0, level="token", mode="mask")
    assert truncated.weight_T.tolist() == pytest.approx([0.4, 0.5, 1, 2, 2])
    assert masked.weight_T.tolist() == pytest.approx([0, 0.5, 1, 2, 0])


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("mode", get_args(Mode))
@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(-50, 0, width=32), st.integers(-3, 3)), max_size=12), st.floats(1, 10))
def test_equal_engines_need_no_correction(
    level: Level, mode: Mode, tokens: list[tuple[float, int]], cap: float
) -> None:
    # Flash-RL#19: a correction of e⁻¹ where there was nothing to correct
    logp_T = torch.tensor([logp for logp, _ in tokens])
    turn_T = torch.tensor([turn for _, turn in tokens], dtype=torch.int64)
    found = importance(logp_T, logp_T, turn_T, cap=cap, level=level, mode=mode)
    assert found.weight_T.tolist() == found.ratio_T.tolist() == [1] * len(tokens)
    assert not found.bounded_T.any()


@pytest.mark.parametrize("level", get_args(Level))
@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0), st.integers(-3, 3)), max_size=12),
    st.floats(1, 1e6),
)
def test_the_cap_is_honoured_and_its_share_can_be_logged(
    level: Level, tokens: list[tuple[float, float, int]], cap: float
) -> None:
    # trl#4772: ratios explode
    learner_T, sampler_T = (torch.tensor([token[side] for token in tokens], dtype=torch.float64) for side in (0, 1))
    turn_T = torch.tensor([turn for _, _, turn in tokens], dtype=torch.int64)
    cut = importance(learner_T, sampler_T, turn_T, cap=cap, level=level, mode="truncate")
    left_out = importance(learner_T, sampler_T, turn_T, cap=cap, level=level, mode="mask")
    ratios = cut.ratio_T.tolist()
    assert all(0 < weight <= cap for weight in cut.weight_T.tolist())
    assert all(weight == 0 or 1 / cap <= weight <= cap for weight in left_out.weight_T.tolist())
    assert cut.bounded_T.tolist() == [ratio > cap for ratio in ratios]
    assert left_out.bounded_T.tolist() == [not 1 / cap <= ratio <= cap for ratio in ratios]


def test_tokens_of_one_turn_share_their_ratio_in_any_order() -> None:
    order = torch.tensor([2, 0, 1])
    plain = turn_ratio(LEARNER_T, SAMPLER_T, TURN_T)
    mixed = turn_ratio(LEARNER_T[order], SAMPLER_T[order], TURN_T[order])
    assert mixed.tolist() == pytest.approx(plain[order].tolist())


@pytest.mark.parametrize("level", get_args(Level))
def test_micro_batches_cut_between_turns_change_nothing(level: Level) -> None:
    def weight_of(places: list[int]) -> Tensor:
        columns = (column[places] for column in (LEARNER_T, SAMPLER_T, TURN_T))
        return importance(*columns, cap=3.0, level=level, mode="truncate").weight_T

    whole_T = weight_of([0, 1, 2])
    assert weight_of([0, 2]).tolist() == whole_T[[0, 2]].tolist()
    assert weight_of([1]).tolist() == whole_T[[1]].tolist()


def test_nothing_carries_a_gradient() -> None:
    learner_T = LEARNER_T.clone().requires_grad_()
    for level in ("token", "turn"):
        found = importance(learner_T, SAMPLER_T, TURN_T, cap=3.0, level=level, mode="truncate")
        assert not any(part.requires_grad for part in found)
    assert not token_ratio(learner_T, SAMPLER_T, TURN_T).requires_grad
    assert not turn_ratio(learner_T, SAMPLER_T, TURN_T).requires_grad


def test_a_turn_ratio_is_not_bounded_token_by_token() -> None:
    # 25 and −24 nats in one turn: e, though either token alone is beyond 20
    sampler_T = torch.tensor([-26.0, -1.0], dtype=torch.float64)
    learner_T = torch.tensor([-1.0, -25.0], dtype=torch.float64)
    assert turn_ratio(learner_T, sampler_T, torch.tensor([0, 0])).tolist() == pytest.approx([math.e, math.e])
    assert token_ratio(learner_T, sampler_T, torch.tensor([0, 0])).tolist() == pytest.approx(
        [math.exp(20), math.exp(-20)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_zero_make_no_nan(dtype: torch.dtype) -> None:
    # OpenRLHF#1240. Found by the learner only, by the sampler only, by neither: largest, smallest, one.
    learner_T = torch.tensor([-1, -math.inf, -math.inf, -1e4, 0], dtype=dtype)
    sampler_T = torch.tensor([-math.inf, -1, -math.inf, 0, -1e4], dtype=dtype)
    largest, smallest = math.exp(20), math.exp(-20)
    ratio_T = token_ratio(learner_T, sampler_T, torch.arange(5))
    assert ratio_T.tolist() == pytest.approx([largest, smallest, 1, smallest, largest])
    found = importance(learner_T, sampler_T, torch.arange(5), cap=2.0, level="turn", mode="truncate")
    assert found.weight_T.tolist() == pytest.approx([2, smallest, 1, smallest, 2])
    found = importance(learner_T, sampler_T, torch.arange(5), cap=2.0, level="turn", mode="mask")
    assert found.weight_T.tolist() == [0, 0, 1, 0, 0]
    # in one turn the infinite ones cancel, as the ten thousands do: +1e4 − 1e4 + 0 − 1e4 + 1e4 = 0
    assert turn_ratio(learner_T, sampler_T, torch.zeros(5, dtype=torch.int64)).tolist() == [1] * 5


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("mode", get_args(Mode))
def test_no_tokens_need_no_correction(level: Level, mode: Mode) -> None:
    empty_T = torch.zeros(0)
    found = importance(empty_T, empty_T, torch.zeros(0, dtype=torch.int64), cap=2.0, level=level, mode=mode)
    assert [part.shape for part in found] == [(0,)] * 3


def corrected(learner_T: Tensor = LEARNER_T, turn_T: Tensor = TURN_T, **options: object) -> ImportanceWeights:
    return importance(learner_T, SAMPLER_T, turn_T, **{"cap": 2.0, "level": "token", "mode": "mask", **options})  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("cap", [0.0, 0.99, -1.0, math.inf, math.nan])
def test_a_cap_that_is_no_bound_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match=rf"cap is {cap}, wanted a finite number >= 1, or none \(0 in a conf"):
        corrected(cap=cap)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learner_T \(2,\), sampler_T \(3,\), turn_T \(3,\), wanted one shape"):
        corrected(torch.zeros(2))


def test_turns_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"turn_T is of type torch\.float32, wanted an integer type"):
        corrected(turn_T=torch.zeros(3))
