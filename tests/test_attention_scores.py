"""From attention to scores, on numbers that can be checked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from condensegrpo.attention.scorer import unit_scores
from condensegrpo.core.protocols.sampler import TokenAttention


def attention(question: list[float], blank: list[float]) -> TokenAttention:
    return TokenAttention(question=tuple(question), calibration=tuple(blank))


def test_a_score_is_what_the_question_looks_at_beyond_the_blank_times_the_tokens_of_the_prompt() -> None:
    found = unit_scores(attention([0.1, 0.3, 0.1], [0.1, 0.1, 0.1]), [(0,), (1,), (2,)], sinks=0)
    assert found == pytest.approx((0.0, 3 * (0.3 - 0.1), 0.0))


def test_what_draws_attention_whatever_is_asked_scores_nothing() -> None:
    assert unit_scores(attention([0.6, 0.1], [0.6, 0.1]), [(0,), (1,)], sinks=0) == pytest.approx((0.0, 0.0))


def test_the_first_tokens_and_the_template_are_not_scored() -> None:
    # places 0 … 3 are sinks, 4 and 7 the template's
    found = unit_scores(attention([9, 9, 9, 9, 9, 0.1, 0.3, 9], [5, 5, 5, 5, 5, 0.1, 0.1, 5]), [(2, 3), (5,), (6,)])
    assert found == pytest.approx((0.0, 0.0, 8 * 0.2))


def test_a_unit_is_worth_the_mean_of_its_best_fifth() -> None:
    asked = [0.0] * 8 + [0.3, 0.5] + [0.1] * 10  # of ten tokens the two best
    found = unit_scores(attention(asked, [0.09] * 20), [range(10), range(10, 20)], sinks=0)
    assert found == pytest.approx((20 * (0.4 - 0.09), 20 * 0.01))


@pytest.mark.parametrize("units", [[], [()], [(), (0,)]])
def test_units_without_tokens_score_nothing(units: list[tuple[int, ...]]) -> None:
    assert unit_scores(attention([0.0], [0.0]), units, sinks=0) == (0.0,) * len(units)


def test_a_page_on_which_the_question_finds_nothing_scores_less_than_one_with_what_it_asks_for() -> None:
    # place 0 is a sink; behind it one page of noise that differs a little, and one with a token that is asked for
    noise, wanted, blank = [0.96, 0.02, 0.01, 0.01], [0.56, 0.42, 0.01, 0.01], [0.97, 0.01, 0.01, 0.01]
    (best_of_noise, *_), (found, *_) = (
        unit_scores(attention(asked, blank), [(1,), (2,), (3,)], sinks=1) for asked in (noise, wanted)
    )
    assert found == pytest.approx(4 * 0.41)
    assert best_of_noise == pytest.approx(4 * 0.01)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30), st.integers(1, 5))
def test_scores_of_a_prompt_repeated_are_the_same(pairs: list[tuple[float, float]], times: int) -> None:
    question, blank = (list(column) for column in zip(*pairs, strict=True))
    units = [(place,) for place in range(len(pairs))]
    once = unit_scores(attention(question, blank), units, sinks=0)
    spread = [[value / times for value in column] * times for column in (question, blank)]  # attention sums as before
    assert unit_scores(attention(*spread), units, sinks=0) == pytest.approx(once, rel=1e-6, abs=1e-6)
    assert all(score >= 0 for score in once)
