"""Who gets the weight of a batch, and how much of it can teach: rows made by hand, with the arithmetic beside them."""

import math
import pickle
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_page import tables

from condensegrpo.core.trajectory import Handling
from condensegrpo.metrics.credit import Credited, credit_metrics, gini


def row(
    group: str,
    outcome: float,
    advantages: Sequence[float] = (0.0,),
    weights: Sequence[float] | None = None,
    *,
    correct: float | None = None,
    tokens: int = 1,
    handling: Handling = "train",
    dropped: bool = False,
    wrote: str = "",
) -> Credited:
    """A trajectory; its weight is 1 a turn, and its outcome is its correctness, unless they are said."""
    return Credited(
        group_id=group,
        outcome=outcome,
        correct=outcome if correct is None else correct,
        tokens=tokens,
        advantages=tuple(advantages),
        turn_weights=(1.0,) * len(advantages) if weights is None else tuple(weights),
        handling=handling,
        dropped=dropped,
        condense=tuple(letter == "c" for letter in wrote),
    )


AMOUNTS = st.floats(0, 1e6).filter(lambda value: value == 0 or value > 1e-6)


@st.composite
def rows(draw: st.DrawFn) -> Credited:
    turns = draw(st.integers(0, 20))
    return Credited(
        group_id=draw(st.sampled_from("abcd")),
        outcome=draw(st.sampled_from([0.0, 0.5, 1.0])),
        correct=draw(st.sampled_from([0.0, 0.5, 1.0])),
        tokens=draw(st.integers(0, 100)),
        advantages=tuple(draw(st.lists(st.floats(-3, 3), min_size=turns, max_size=turns))),
        turn_weights=tuple(draw(st.lists(AMOUNTS, min_size=turns, max_size=turns))),
        handling=draw(st.sampled_from(["train", "mask", "penalise"])),
        dropped=draw(st.booleans()),
    )


# --- groups and signal


def test_the_example_of_the_docstring() -> None:
    found = credit_metrics(
        [row("a", 1, [0.5], [0.25]), row("a", 0, [-0.5], [0.25]), row("b", 1, [0], [0.25]), row("b", 1, [0], [0.25])]
    )
    assert found["groups_of_equal_reward"] == 0.5
    assert found["groups_without_advantage"] == 0.5
    assert found["trajectories_without_advantage"] == 0.5
    assert found["weight/correct"] == 0.75
    assert found["update/correct"] == 0.5


def test_groups_of_one_have_equal_outcomes() -> None:
    # a: all correct; b: mixed; c: alone
    batch = [row("a", 1), row("a", 1), row("b", 1, [0.5]), row("b", 0, [-0.5]), row("c", 0)]
    assert credit_metrics(batch)["groups_of_equal_reward"] == pytest.approx(2 / 3)
    assert credit_metrics(batch)["trajectories_without_advantage"] == pytest.approx(3 / 5)


def test_a_group_of_equal_outcomes_may_still_teach_and_one_of_unequal_ones_teach_nothing() -> None:
    # a: all correct, efficient tells contexts apart at the second turn; b: equal; c: unequal and, under a clamp, idle
    batch = [
        *(row("a", 1, [0.0, 0.1]), row("a", 1, [0.0, 0.0])),
        *(row("b", 0), row("b", 0)),
        *(row("c", 20), row("c", 30)),
        *(row("d", 1, [0.5]), row("d", 0, [-0.5])),
    ]
    found = credit_metrics(batch)
    assert found["groups_of_equal_reward"] == 0.5  # a and b
    assert found["groups_without_advantage"] == 0.5  # b and c


def test_only_trajectories_that_learn_give_a_group_an_advantage() -> None:
    # a: what is masked counts nowhere; b: masked as a whole; c: dropped
    batch = [
        *(row("a", 1), row("a", 0, [-0.5], handling="mask")),
        row("b", 0, [0.5], handling="mask"),
        row("c", 1, [0.5], dropped=True),
        *(row("d", 1, [0.5]), row("d", 0, [-0.5])),
    ]
    assert credit_metrics(batch)["groups_without_advantage"] == 0.5  # a, of a and d


def test_outcomes_that_differ_by_rounding_alone_are_equal() -> None:
    """As the estimators have it: 0.1 + 0.2 is not 0.3, and 1e-11 of a reward is a difference."""
    assert credit_metrics([row("a", 0.1 + 0.2), row("a", 0.3)])["groups_of_equal_reward"] == 1
    assert credit_metrics([row("a", 0.3 + 3e-12), row("a", 0.3)])["groups_of_equal_reward"] == 0
    assert credit_metrics([row("a", 1e-20), row("a", 0.0)])["groups_of_equal_reward"] == 0


def test_groups_count_once_however_many_rows_or_turns_they_make() -> None:
    """Group statistics over rows not trajectories: the turns of one trajectory must not make its group heavier."""
    short = [row("a", 1, [0.5]), row("a", 0, [-0.5]), row("b", 1, [0.0]), row("b", 1, [0.0])]
    long = [row("a", 1, [0.5] * 9), row("a", 0, [-0.5] * 7), row("b", 1, [0.0]), row("b", 1, [0.0])]
    for key in (
        "groups_of_equal_reward",
        "groups_without_advantage",
        "trajectories_without_advantage",
        "correct_with_negative_advantage",
    ):
        assert credit_metrics(long)[key] == credit_metrics(short)[key]


def test_the_outcome_that_the_estimator_got_makes_a_group_equal_and_not_correctness() -> None:
    # all correct, but paid by 1/C: there is variance, and the longest is pushed down although it is right
    batch = [
        row("a", 1 / 100, [1.3], correct=1),
        row("a", 1 / 200, [0.2], correct=1),
        row("a", 1 / 400, [-0.3], correct=1),
        row("a", 0.0, [-1.2], correct=0),
    ]
    found = credit_metrics(batch)
    assert found["groups_of_equal_reward"] == 0
    assert found["correct_with_negative_advantage"] == pytest.approx(1 / 3)


def test_turns_of_one_trajectory_may_pull_both_ways_and_their_sum_decides() -> None:
    batch = [row("a", 1, [0.9, -1.0]), row("a", 1, [1.0, -0.9]), row("b", 1, [0.5, -0.5]), row("b", 0, [-1.0])]
    found = credit_metrics(batch)
    assert found["correct_with_negative_advantage"] == pytest.approx(1 / 3)
    assert found["trajectories_without_advantage"] == 0  # ½ − ½ is not the same as nothing at either turn


def test_a_trajectory_without_turns_has_no_advantage_and_no_weight() -> None:
    found = credit_metrics([row("a", 0, [], tokens=0), row("a", 1, [0.7], [2.0])])
    assert found["trajectories_without_advantage"] == 0.5
    assert found["weight/gini"] == 0  # of the one that sampled anything
    assert {key for key in found if key.startswith("weight/turns")} == {"weight/turns_1"}


def test_dropped_groups_are_counted_and_stand_apart() -> None:
    # DAPO's dynamic sampling: of four groups sampled two were dropped; of the kept two none is equal
    kept = [row("a", 1, [0.5]), row("a", 0, [-0.5]), row("b", 1, [0.5]), row("b", 0, [-0.5])]
    gone = [row("c", 1, dropped=True), row("c", 1, dropped=True), row("d", 0, dropped=True)]
    found = credit_metrics([*kept, *gone])
    assert found["groups_dropped"] == 0.5
    assert {key: value for key, value in found.items() if key != "groups_dropped"} == {
        key: value for key, value in credit_metrics(kept).items() if key != "groups_dropped"
    }


def test_a_masked_trajectory_of_a_dropped_group_is_dropped_with_it() -> None:
    batch = [row("a", 1, [0.5]), row("a", 0, [-0.5]), row("b", 1, dropped=True), row("b", 0, handling="mask")]
    assert credit_metrics(batch)["groups_dropped"] == 0.5
    assert credit_metrics(batch)["masked"] == 0


def test_masked_trajectories_are_a_share_of_the_kept_ones_and_carry_no_weight() -> None:
    # a: 1 and 1 learn, 0 is masked, so the group is equal; 30 of 60 sampled tokens are lost
    batch = [
        row("a", 1, [0.0], [3.0], tokens=10),
        row("a", 1, [0.0], [1.0], tokens=20),
        row("a", 0, [-9.0], [9.0], tokens=30, handling="mask"),
    ]
    found = credit_metrics(batch)
    assert found["masked"] == pytest.approx(1 / 3)
    assert found["masked_tokens"] == 0.5
    assert found["groups_of_equal_reward"] == 1
    assert found["trajectories_without_advantage"] == 1
    assert found["weight/correct"] == 1
    assert found["weight/gini"] == pytest.approx(0.25)  # 1 and 3: (−1·1 + 1·3) / (2·4)
    assert found["update/correct"] == 0


def test_a_group_that_is_masked_as_a_whole_is_neither_equal_nor_dropped() -> None:
    batch = [row("a", 1, [0.5]), row("a", 0, [-0.5]), row("b", 0, handling="mask"), row("b", 0, handling="mask")]
    found = credit_metrics(batch)
    assert (found["groups_of_equal_reward"], found["groups_dropped"], found["masked"]) == (0, 0, 0.5)


def test_penalised_trajectories_learn() -> None:
    found = credit_metrics([row("a", 1, [0.5]), row("a", -1, [-0.5], correct=0, handling="penalise")])
    assert found["penalised"] == 0.5
    assert found["masked"] == 0
    assert found["weight/correct"] == 0.5


def test_shares_of_nothing_are_zero() -> None:
    assert set(credit_metrics([]).values()) == {0.0}
    only_masked = credit_metrics([row("a", 1, handling="mask")])
    assert only_masked == {**credit_metrics([]), "masked": 1.0, "masked_tokens": 1.0}
    only_dropped = credit_metrics([row("a", 1, dropped=True)])
    assert only_dropped == {**credit_metrics([]), "groups_dropped": 1.0}


def test_rows_travel_between_ranks() -> None:
    one = row("a", 1, [0.5, 0.25], [1.0, 2.0])
    assert pickle.loads(pickle.dumps(one)) == one


# --- where the weight lies


def test_a_long_failure_outweighs_a_short_success() -> None:
    """More turns, more weight: under one weight a token a wrong trajectory three times as long has ¾ of everything."""
    found = credit_metrics([row("a", 1, [0.5], [1.0]), row("a", 0, [-0.5] * 3, [1.0] * 3)])
    assert found["weight/correct"] == 0.25
    assert found["update/correct"] == 0.25  # ½·1 of ½·1 + 3·½·1
    assert found["weight/turns_1"] == 0.25
    assert found["weight/turns_3_4"] == 0.75


def test_the_pull_weighs_every_turn_by_its_own_advantage() -> None:
    # correct: 2·1 + 0·5 = 2; wrong: |−1|·6 = 6
    found = credit_metrics([row("a", 1, [2.0, 0.0], [1.0, 5.0]), row("a", 0, [-1.0], [6.0])])
    assert found["update/correct"] == 0.25
    assert found["weight/correct"] == 0.5


def test_turns_are_counted_in_powers_of_two() -> None:
    batch = [row("a", 1, [1.0] * turns, [1.0, *[0.0] * (turns - 1)]) for turns in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33)]
    shares = {key: value for key, value in credit_metrics(batch).items() if key.startswith("weight/turns")}
    assert shares == pytest.approx(
        {
            "weight/turns_1": 0.1,
            "weight/turns_2": 0.1,
            "weight/turns_3_4": 0.2,
            "weight/turns_5_8": 0.2,
            "weight/turns_9_16": 0.2,
            "weight/turns_17_32": 0.1,
            "weight/turns_33_64": 0.1,
        }
    )
    assert list(shares) == sorted(shares, key=lambda key: int(key.split("_")[1]))


def test_partly_correct_is_not_correct() -> None:
    found = credit_metrics([row("a", 0.99, [-0.1]), row("a", 1, [0.1])])
    assert found["weight/correct"] == 0.5
    assert found["correct_with_negative_advantage"] == 0


@settings(max_examples=40)
@given(st.lists(rows(), max_size=12), st.integers(1, 3), st.randoms(use_true_random=False))
def test_any_number_of_ranks_in_any_order_says_the_same(batch: list[Credited], ranks: int, draw: random.Random) -> None:
    mixed = draw.sample(batch, len(batch))
    gathered = [one for rank in range(ranks) for one in mixed[rank::ranks]]
    assert credit_metrics(gathered) == credit_metrics(batch)


@settings(max_examples=40)
@given(st.lists(rows(), max_size=12))
def test_every_figure_is_a_share_and_the_turns_add_up(batch: list[Credited]) -> None:
    found = credit_metrics(batch)
    assert all(0 <= value <= 1 + 1e-12 for value in found.values())
    by_turns = [value for key, value in found.items() if key.startswith("weight/turns")]
    assert sum(by_turns) == pytest.approx(1) or not any(by_turns)


@settings(max_examples=25)
@given(st.lists(rows(), max_size=12), st.sampled_from([2.0**-20, 0.5, 8.0]))
def test_the_scale_of_weights_and_advantages_is_nobodys_business(batch: list[Credited], scale: float) -> None:
    scaled = [
        row(
            one.group_id,
            one.outcome,
            [scale * value for value in one.advantages],
            [scale * value for value in one.turn_weights],
            correct=one.correct,
            tokens=one.tokens,
            handling=one.handling,
            dropped=one.dropped,
        )
        for one in batch
    ]
    assert credit_metrics(scaled) == pytest.approx(credit_metrics(batch), abs=1e-9)


# --- the Gini coefficient


def test_gini_of_the_docstring() -> None:
    assert gini([1, 1, 2]) == pytest.approx(1 / 6)
    assert gini([2, 1, 1]) == gini([1, 1, 2])


@settings(max_examples=25)
@given(st.lists(AMOUNTS, min_size=1, max_size=12))
def test_gini_is_half_the_mean_difference_over_the_mean(values: list[float]) -> None:
    differences = math.fsum(abs(x - y) for x in values for y in values)
    whole = math.fsum(values)
    wanted = differences / (2 * len(values) * whole) if whole else 0.0
    assert gini(values) == pytest.approx(wanted, abs=1e-9)


def test_gini_of_nothing_is_zero() -> None:
    assert gini([]) == gini([0.0, 0.0]) == 0


# --- groups without signal


def no_signal(pass_rate: float, samples: int) -> float:
    """The formula of reference/metrics.md: all of ``samples`` independent trajectories are right, or all wrong."""
    return pass_rate**samples + (1 - pass_rate) ** samples


def test_the_table_of_the_page_follows_the_formula() -> None:
    table = tables()["How many groups teach nothing?"]
    assert [line[0] for line in table] == ["0.3", "0.7", "0.97"]
    for rate, *cells in table:
        assert cells == [f"{no_signal(float(rate), samples):.1%}".replace("%", " %") for samples in (2, 4, 8, 16)]


def test_the_measured_share_meets_the_chance() -> None:
    # 4000 groups of four at p = 0.7: 24.8 % ± 0.7 % (one standard deviation)
    draw = random.Random(2)
    batch = [row(str(group), float(draw.random() < 0.7)) for group in range(4000) for _ in range(4)]
    assert credit_metrics(batch)["groups_of_equal_reward"] == pytest.approx(no_signal(0.7, 4), abs=0.02)


# --- summaries


def test_the_weight_and_the_pull_of_summaries_are_those_of_their_turns() -> None:
    found = credit_metrics(
        [
            row("g", 1, (1.0, 0.5, 1.0), (1.0, 2.0, 1.0), wrote="aca"),
            row("g", 0, (-1.0,)),
            row("h", 1, wrote="c", dropped=True),
        ]
    )
    assert found["weight/summaries"] == 2 / 5
    assert found["update/summaries"] == 1 / 4


def test_without_summaries_nothing_is_said_of_them() -> None:
    assert not {"weight/summaries", "update/summaries"} & credit_metrics([row("g", 1), row("g", 0)]).keys()
