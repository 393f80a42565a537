"""From attention to scores, on numbers that can be checked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from condensegrpo.attention.scores import unit_scores
from condensegrpo.protocols import Attention


def attention(question: list[float], blank: list[float]) -> Attention:
    return Attention(question=tuple(question), blank=tuple(blank))


def test_a_score_is_what_the_question_looks_at_beyond_the_blank_in_even_shares() -> None:
    found = unit_scores(attention([0.1, 0.3, 0.1], [0.2, 0.2, 0.2]), [(0,), (1,), (2,)], sinks=0)
    assert found == pytest.approx((0.0, 3 * 0.6 - 1, 0.0))


def test_what_draws_attention_whatever_is_asked_scores_nothing() -> None:
    assert unit_scores(attention([0.6, 0.1], [0.6, 0.1]), [(0,), (1,)], sinks=0) == pytest.approx((0.0, 0.0))


def test_the_first_tokens_and_the_template_do_not_count() -> None:
    # places 0 … 3 are sinks, 4 and 7 the template's
    found = unit_scores(attention([9, 9, 9, 9, 9, 0.1, 0.3, 9], [5, 5, 5, 5, 5, 0.1, 0.1, 5]), [(2, 3), (5,), (6,)])
    assert found == pytest.approx((0.0, 0.0, 2 * 0.75 - 1))


def test_a_unit_is_worth_the_mean_of_its_best_fifth() -> None:
    asked = [0.0] * 8 + [0.3, 0.5] + [0.1] * 10  # of ten tokens the two best; even share of 20 tokens, sum 1.8
    found = unit_scores(attention(asked, [0.09] * 20), [range(10), range(10, 20)], sinks=0)
    assert found == pytest.approx((20 * 0.4 / 1.8 - 1, 20 * 0.1 / 1.8 - 1))


@pytest.mark.parametrize("units", [[], [()], [(), (0,)]])
def test_units_without_tokens_score_nothing(units: list[tuple[int, ...]]) -> None:
    assert unit_scores(attention([0.0], [0.0]), units, sinks=0) == (0.0,) * len(units)


SHARES = st.just(0.0) | st.floats(1e-9, 1)  # numbers that a factor takes to 0 are no shares of attention


@given(st.lists(st.tuples(SHARES, SHARES), min_size=1, max_size=30), st.floats(0.1, 10))
def test_scores_do_not_depend_on_how_much_attention_the_units_get_together(
    pairs: list[tuple[float, float]], factor: float
) -> None:
    question, blank = (list(column) for column in zip(*pairs, strict=True))
    units = [(place,) for place in range(len(pairs))]
    found = unit_scores(attention(question, blank), units, sinks=0)
    scaled = unit_scores(attention([factor * value for value in question], blank), units, sinks=0)
    assert scaled == pytest.approx(found, rel=1e-6, abs=1e-6)
    assert all(score >= 0 for score in found)
