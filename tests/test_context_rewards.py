"""The context-efficiency rewards: what a right answer is worth, by the context that it took.

The figures of most tests come from the anchors 100 and 400 and λ = 0.4. On the logarithm 200 is half way, so u is 0 up
to 100 tokens, 1/2 at 200 and 1 from 400 on, and the tax is 0, 0.2 and 0.4.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
from builders import trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import PluginError
from condensegrpo.core.protocols.reward import GroupReward, Reward, RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.rewards.context import (
    InverseMaxContext,
    InverseScaled,
    LinearPassRate,
    Measure,
    Multiplicative,
    context_tokens,
)

SEVEN = Problem(id="p0", question="3 + 4?", answer="7")
ANCHORS: Mapping[str, float] = {"context_low": 100, "context_high": 400, "coefficient": 0.4}


def answered(*contexts: int, answer: str | None = "7", stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    """A trajectory whose turns have prompts of so many tokens."""
    return trajectory(*(turn(range(length), [1]) for length in contexts), answer=answer, stop=stop)


WRONG = answered(10, answer="8")
CUT_OFF = answered(10, stop=StopReason.OUTPUT_LENGTH)  # right, but its format is not valid
HUNG = answered(10, answer=None, stop=StopReason.SAMPLER_ERROR)
NEVER_BEGUN = answered(answer=None, stop=StopReason.ENVIRONMENT_ERROR)

SINGLE: Mapping[str, Callable[..., Reward]] = {
    "inverse_max_context": InverseMaxContext,
    "inverse_scaled": partial(InverseScaled, reference_tokens=50),
    "multiplicative": partial(Multiplicative, context_low=100, context_high=400, coefficient=0.4),
}


def total(reward: Reward, one: Trajectory) -> float:
    return RewardResult.of(reward(one, SEVEN)).total


def totals(reward: GroupReward, *group: Trajectory) -> list[float]:
    return [RewardResult.of(given).total for given in reward.score_group(group, SEVEN)]


# --- the measure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("measure", "tokens"), [("max", 40), ("sum", 75), ("last", 25)])
def test_context_is_the_largest_prompt_the_sum_of_all_or_the_last(measure: Measure, tokens: int) -> None:
    assert context_tokens(answered(10, 40, 25), measure) == tokens
    assert context_tokens(answered(12), measure) == 12
    assert context_tokens(NEVER_BEGUN, measure) == 0


# --- one trajectory at a time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "inverse", "scaled", "taxed"),
    [
        ("max", 1 / 400, 0.125, 0.6),  # C = 400; 50/400; at the upper anchor
        ("sum", 1 / 700, 50 / 700, 0.6),  # C = 100 + 400 + 200, above it
        ("last", 1 / 200, 0.25, 0.8),  # C = 200; 50/200; half way
    ],
)
def test_every_measure_reaches_the_formula(measure: Measure, inverse: float, scaled: float, taxed: float) -> None:
    one = answered(100, 400, 200)
    assert total(SINGLE["inverse_max_context"](measure=measure), one) == inverse
    assert total(SINGLE["inverse_scaled"](measure=measure), one) == scaled
    assert total(SINGLE["multiplicative"](measure=measure), one) == pytest.approx(taxed)


@pytest.mark.parametrize(("tokens", "worth"), [(1, 1.0), (49, 1.0), (50, 1.0), (100, 0.5), (400, 0.125)])
def test_inverse_scaled_is_one_up_to_its_reference_and_falls_as_one_over_c(tokens: int, worth: float) -> None:
    assert total(SINGLE["inverse_scaled"](), answered(tokens)) == worth


@pytest.mark.parametrize(
    ("tokens", "worth"), [(1, 1.0), (99, 1.0), (100, 1.0), (200, 0.8), (400, 0.6), (401, 0.6), (1600, 0.6)]
)
def test_multiplicative_taxes_between_its_anchors(tokens: int, worth: float) -> None:
    assert total(SINGLE["multiplicative"](), answered(tokens)) == pytest.approx(worth)


def test_the_tax_may_be_nothing_or_all() -> None:
    free = Multiplicative(context_low=100, context_high=400, coefficient=0)
    dear = Multiplicative(context_low=100, context_high=400, coefficient=1)
    assert [total(free, answered(tokens)) for tokens in (100, 400)] == [1.0, 1.0]
    assert [total(dear, answered(tokens)) for tokens in (100, 400)] == [1.0, 0.0]


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("one", [WRONG, CUT_OFF, HUNG, NEVER_BEGUN])
def test_a_wrong_answer_or_format_is_worth_nothing_however_short(name: str, one: Trajectory) -> None:
    result = RewardResult.of(SINGLE[name]()(one, SEVEN))
    assert (result.total, result.components, result.correct) == (0.0, {name: 0.0}, 0.0)
    assert result.format_valid is (one is WRONG)


@pytest.mark.parametrize("name", SINGLE)
def test_the_component_is_named_after_the_reward_and_right_stays_right(name: str) -> None:
    result = RewardResult.of(SINGLE[name]()(answered(400), SEVEN))
    assert result.components == {name: result.total}
    assert 0 < result.total < 1
    assert (result.correct, result.format_valid) == (1.0, True)


@pytest.mark.parametrize("name", SINGLE)
@given(contexts=st.lists(st.integers(1, 600), min_size=1, max_size=4), more=st.integers(0, 200))
@settings(max_examples=30)
def test_a_longer_context_is_never_worth_more(name: str, contexts: Sequence[int], more: int) -> None:
    for measure in ("max", "sum", "last"):
        reward = SINGLE[name](measure=measure)
        short, long = total(reward, answered(*contexts)), total(reward, answered(*contexts[:-1], contexts[-1] + more))
        assert 1 >= short >= long > 0


# --- with the siblings ----------------------------------------------------------------------------------------------


def test_where_all_are_right_the_whole_tax_is_due() -> None:
    """p = 1: 1 − 0.4·u."""
    found = totals(LinearPassRate(**ANCHORS), answered(50), answered(100), answered(200), answered(400), answered(999))
    assert found == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.6])


def test_where_a_quarter_is_right_a_quarter_of_the_tax_is_due() -> None:
    """p = 1/4: 1 − 0.4 · 0.25 · 1 = 0.9 at the upper anchor, 1 − 0.4 · 0.25 · 0.5 = 0.95 half way."""
    reward = LinearPassRate(**ANCHORS)
    assert totals(reward, WRONG, answered(400), WRONG, WRONG) == pytest.approx([0, 0.9, 0, 0])
    assert totals(reward, answered(200), WRONG, WRONG, WRONG) == pytest.approx([0.95, 0, 0, 0])


@pytest.mark.parametrize("sibling", [HUNG, NEVER_BEGUN, CUT_OFF, WRONG])
def test_a_hung_or_failed_sibling_counts_as_wrong_in_the_pass_rate(sibling: Trajectory) -> None:
    """p = 1/2: 1 − 0.4 · 0.5 · 1 = 0.8. It is neither left out of p (0.6) nor right."""
    assert totals(LinearPassRate(**ANCHORS), answered(400), sibling) == pytest.approx([0.8, 0.0])


def test_where_none_is_right_nobody_is_paid() -> None:
    assert totals(LinearPassRate(**ANCHORS), WRONG, HUNG, NEVER_BEGUN) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("one", "worth"), [(answered(400), 0.6), (WRONG, 0.0)])
def test_a_group_of_one_is_its_own_pass_rate(one: Trajectory, worth: float) -> None:
    assert totals(LinearPassRate(**ANCHORS), one) == pytest.approx([worth])


@pytest.mark.parametrize(("measure", "worth"), [("max", 0.6), ("sum", 0.6), ("last", 0.8)])
def test_the_group_reward_takes_the_same_measures(measure: Measure, worth: float) -> None:
    assert totals(LinearPassRate(**ANCHORS, measure=measure), answered(100, 400, 200)) == pytest.approx([worth])


def test_every_member_of_a_group_is_judged() -> None:
    right, wrong, hung = (
        RewardResult.of(given) for given in LinearPassRate(**ANCHORS).score_group([answered(100), WRONG, HUNG], SEVEN)
    )
    assert (right.format_valid, right.correct, right.components) == (True, 1.0, {"linear_pass_rate": 1.0})
    assert (wrong.format_valid, wrong.correct, wrong.components) == (True, 0.0, {"linear_pass_rate": 0.0})
    assert (hung.format_valid, hung.correct) == (False, 0.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 600)), min_size=1, max_size=8))
@settings(max_examples=40)
def test_it_does_not_matter_in_which_order_siblings_stand(drawn: list[tuple[bool, int]]) -> None:
    group = [answered(tokens, answer="7" if right else "8") for right, tokens in drawn]
    backwards = totals(LinearPassRate(**ANCHORS), *reversed(group))
    assert totals(LinearPassRate(**ANCHORS), *group) == backwards[::-1]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=6), st.integers(0, 6))
@settings(max_examples=40)
def test_a_harder_question_is_never_taxed_more(contexts: list[int], wrong: int) -> None:
    """More wrong siblings lower p; where nobody is wrong the tax is that of ``multiplicative``."""
    right = [answered(tokens) for tokens in contexts]
    easy = totals(LinearPassRate(**ANCHORS), *right)
    hard = totals(LinearPassRate(**ANCHORS), *right, *[WRONG] * wrong)[: len(right)]
    assert all(1 >= more >= less > 0 for more, less in zip(hard, easy, strict=True))
    assert easy == [total(Multiplicative(**ANCHORS), one) for one in right]


def test_linear_pass_rate_is_found_by_its_name_and_is_a_group_reward() -> None:
    assert isinstance(build_plugin("rewards", "linear_pass_rate", ANCHORS), GroupReward)
    assert not isinstance(InverseMaxContext(), GroupReward)


# --- options --------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name", ["multiplicative", "linear_pass_rate"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_low": 0}, "context_low is 0, wanted greater than 0"),
        ({"context_low": -5}, "context_low is -5"),
        ({"context_low": 400}, "context_low=400.0 and context_high=400.0: wanted context_low < context_high"),
        ({"context_low": NAN}, "context_low is nan, wanted a finite number"),
        ({"context_high": 99}, "context_high=99.0"),
        ({"context_high": INF}, "context_high is inf, wanted a finite number"),
        ({"context_high": NAN}, "context_high is nan"),
        ({"coefficient": -0.1}, "coefficient is -0.1, wanted at least 0"),
        ({"coefficient": 1.1}, "coefficient is 1.1, wanted at most 1"),
        ({"coefficient": NAN}, "coefficient is nan"),
        ({"measure": "mean"}, "measure is 'mean', wanted 'max', 'sum' or 'last'"),
        ({"match": "roughly"}, "match is 'roughly'"),
    ],
)
def test_anchors_coefficient_measure_and_match_are_checked(
    name: str, options: Mapping[str, object], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        build_plugin("rewards", name, {**ANCHORS, **options})


@pytest.mark.parametrize("tokens", [0, -1, NAN, INF])
def test_the_reference_must_be_a_finite_number_of_tokens(tokens: float) -> None:
    with pytest.raises(PluginError, match=f"reference_tokens is {tokens}, wanted (greater than 0|a finite number)"):
        build_plugin("rewards", "inverse_scaled", {"reference_tokens": tokens})


def test_an_unknown_measure_is_refused_by_every_reward_that_has_one() -> None:
    required: dict[str, dict[str, object]] = {"inverse_max_context": {}, "inverse_scaled": {"reference_tokens": 1}}
    for name, options in required.items():
        with pytest.raises(PluginError, match="measure is 'largest', wanted 'max', 'sum' or 'last'"):
            build_plugin("rewards", name, {**options, "measure": "largest"})
