"""What every estimator keeps to: its table, its refusals, its rules for odd groups, its invariances."""

import inspect
import math
from typing import Any

import pytest
import torch
from estimating import ESTIMATORS, NORMALISED, SCALAR, WITH_SINGLETON, Row, batches, estimate, run, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.advantages import Batch
from condensegrpo.algorithms.outcome_estimators import grpo
from condensegrpo.core.errors import ScoreError
from condensegrpo.core.trajectory import MAX_REWARD

ROOT_HALF = math.sqrt(0.5)
ALL = sorted(ESTIMATORS)
# No estimator but these treats a turn by how far it is from the end.
FROM_THE_END = ("turn_discounted", "gigpo")
# A clamp that touches none of the rewards drawn below: invariances hold between its bounds only.
WIDE: dict[str, dict[str, Any]] = {"reinforce": {"clamp": 1e6}}


def members(table: Tensor, rows: list[Row], group: int) -> Tensor:
    return table[[place for place, row in enumerate(rows) if row[2] == group]]


def test_every_entry_point_has_the_name_of_its_function() -> None:
    assert all(plugin.name == name for name, plugin in ESTIMATORS.items())


@pytest.mark.parametrize("name", ALL)
def test_the_formula_and_the_bias_are_written_down(name: str) -> None:
    text = ESTIMATORS[name].function.__doc__ or ""
    assert all(part in text for part in ("A_i", "Biased by:", "Example", "Returns:"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("grpo", {"scale": "std", "singleton": "zero", "eps": 1e-6}),
        ("grpo_merged", {"scale": "std", "singleton": "zero", "eps": 1e-4}),
        ("ms_grpo", {"coef": 1.0, "scale": "std", "singleton": "zero", "eps": 1e-4}),
        ("mt_grpo", {"coef": 1.0, "scale": "std", "singleton": "zero", "eps": 1e-4}),
        ("ms_po", {"gamma": 1.0, "scale": "std", "singleton": "zero", "eps": 1e-4}),
        ("rloo", {"singleton": "zero"}),
        ("reinforce", {"clamp": 10.0, "singleton": "zero", "eps": 1e-8}),
        ("turn_discounted", {"gamma": 0.9, "scale": "std", "singleton": "zero", "eps": 1e-6}),
        ("gigpo", {"coef": 1.0, "gamma": 0.95, "scale": "std", "eps": 1e-6}),
    ],
)
def test_options_and_their_defaults_are_those_that_runs_were_configured_by(name: str, wanted: dict[str, Any]) -> None:
    parameters = inspect.signature(ESTIMATORS[name].function).parameters
    assert {option: parameters[option].default for option in ESTIMATORS[name].options} == wanted


# Refusals


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ALL)
def test_one_reward_that_is_not_finite_is_an_error_and_spoils_no_sibling(name: str, value: float) -> None:
    """trl#5773: one NaN made NaN of its whole group. The clamp of ``reinforce`` would have hidden an infinity."""
    with pytest.raises(ScoreError, match=rf"outcome reward of trajectory 2 \(of 4, counted from 0\) is {value}"):
        estimate(name, [1, 0, value, 0])
    with pytest.raises(ScoreError, match=rf"turn reward of trajectory 1 \(of 2, counted from 0\) is {value}"):
        estimate(name, [1, 0], turn_rewards=[0, value])


@pytest.mark.parametrize("name", ALL)
def test_rewards_of_nan_only_are_an_error_too(name: str) -> None:
    with pytest.raises(ScoreError, match="outcome reward of trajectory 0"):
        estimate(name, [math.nan] * 3)


def test_a_turn_reward_that_is_not_finite_is_an_error_too() -> None:
    one_N = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ScoreError, match="turn reward of trajectory 1"):
        grpo(Batch(torch.zeros(2), torch.tensor([0.0, math.nan]), one_N, one_N, -one_N))


@pytest.mark.parametrize("name", ALL)
def test_a_reward_too_large_for_statistics_names_trajectory_and_value(name: str) -> None:
    with pytest.raises(
        ScoreError, match=r"outcome reward of trajectory 1 .*is -1e\+200, wanted a magnitude of at most"
    ):
        estimate(name, [0, -1e200])
    with pytest.raises(ScoreError, match=r"turn reward of trajectory 0 .*is 1.1e\+100"):
        estimate(name, [0, 0], turn_rewards=[1.1e100, 0])


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("efficient", "rloo")])
def test_the_largest_rewards_allowed_give_finite_advantages(name: str) -> None:
    high = [MAX_REWARD, -MAX_REWARD, MAX_REWARD, 0]
    found = estimate(name, high, turn_rewards=high, turns=[2, 2, 1, 1], results=[0, -1, 0, 0])
    assert found.isfinite().all()
    assert found[0, 0] > 0 > found[1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("efficient", "reinforce")])
def test_an_advantage_beyond_single_precision_is_an_error_whatever_the_type(name: str, dtype: torch.dtype) -> None:
    # single precision holds the rewards, and ends at 3.4e38; 3e38 less the mean of −1e38 is 4e38
    options = {} if name == "rloo" else {"scale": "none"}
    with pytest.raises(ScoreError, match=r"trajectory 0 .*wanted numbers of magnitude 3.4e\+38 at most"):
        estimate(name, [3e38, -3e38, -3e38], turn_rewards=[0.0, 0.0, 0.0], dtype=dtype, **options)
    assert estimate(name, [1e38, -1e38], dtype=dtype, **options).isfinite().all()


def test_an_advantage_too_large_for_the_type_asked_for_is_an_error_and_no_infinity() -> None:
    # float16 ends at 65504; 60000 − (−60000) does not fit
    with pytest.raises(ScoreError, match=r"trajectory 0 .*gets \[120000.0\], .*6.55e\+04 at most.*reward is 60000"):
        estimate("rloo", [60000, -60000], dtype=torch.float16)
    finite = "down, or divide by nothing that may be 0"
    with pytest.raises(ScoreError, match=f"scale the rewards of its group, or the estimator's options, {finite}"):
        estimate("ms_grpo", [0, 0], turn_rewards=[1e10, 0], results=[0, 0], scale="none", coef=1e300)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("result", "turns"), [(-2, 3), (3, 3), (0, 0), (9, 2)])
def test_a_result_outside_the_turns_names_its_trajectory(name: str, result: int, turns: int) -> None:
    with pytest.raises(ValueError, match=rf"result turn of trajectory 1 .*is {result}, wanted .*its {turns} turns"):
        estimate(name, [1, 0], turns=[3, turns], results=[-1, result])


@pytest.mark.parametrize("name", ALL)
def test_a_negative_number_of_turns_names_its_trajectory(name: str) -> None:
    with pytest.raises(ValueError, match=r"trajectory 1 \(of 2, counted from 0\) has -1 turns"):
        estimate(name, [1, 0], turns=[1, -1])


def test_tensors_of_different_shapes_are_refused() -> None:
    one_N = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one shape \(N,\), found \[\(3,\), \(2,\)"):
        grpo(Batch(torch.zeros(3), torch.zeros(2), one_N, one_N, -one_N))


@pytest.mark.parametrize("name", ALL)
def test_a_table_of_rewards_is_refused(name: str) -> None:
    square = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one shape \(N,\)"):
        ESTIMATORS[name](Batch(square.double(), square.double(), square, square, square))


# Groups of one, equal rewards, empty input


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_one_gives_zero_and_not_nan(name: str) -> None:
    """OpenRLHF asserts n > 1, elsewhere the deviation of one is NaN (axolotl#3353)."""
    found = estimate(
        name, [0.7, 1, 0], turn_rewards=[0.2, 0, 0], groups=[5, 6, 6], turns=[2, 1, 1], results=[0, -1, -1]
    )
    assert found[0].tolist() == [0, 0]
    assert found[1, 0] > 0 > found[2, 0]


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("grpo", {}, [0.7, 0.7]),
        ("grpo_merged", {}, [0.9, 0.9]),  # 0.2 + 0.7
        ("ms_grpo", {"coef": 2}, [1.1, 0.7]),  # 0.7 + 2·0.2, then 0.7
        ("mt_grpo", {"coef": 2}, [1.1, 0.7]),
        ("ms_po", {"gamma": 0.5}, [0.55, 0.7]),  # 0.2 + ½·0.7, then 0.7
        ("rloo", {}, [0.7, 0.7]),
        ("reinforce", {"clamp": 0.5}, [0.5, 0.5]),
        ("turn_discounted", {"gamma": 0.5}, [0.35, 0.7]),
    ],
)
def test_a_group_of_one_may_keep_its_raw_reward(name: str, options: dict[str, float], wanted: list[float]) -> None:
    columns = {"turn_rewards": [0.2, 0, 0], "groups": [5, 6, 6], "turns": [2, 1, 1], "results": [0, -1, -1]}
    found = estimate(name, [0.7, 1, 0], **columns, singleton="raw", **options)
    assert same(found[0], wanted, atol=1e-12)
    assert torch.equal(found[1:], estimate(name, [0.7, 1, 0], **columns, **options)[1:])


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-6])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("name", ALL)
def test_equal_rewards_give_exactly_zero_whatever_eps(name: str, value: float, eps: float) -> None:
    """slime: a constant group of three beside groups of four gave −1.09."""
    options = {} if name == "rloo" else {"eps": eps}
    groups = [0, 0, 0, 0, 1, 1, 1]
    found = estimate(
        name,
        [1, 1, 0, 0] + [value] * 3,
        turn_rewards=[1, 0, 2, 5] + [value] * 3,
        groups=groups,
        turns=[2] * 7,
        results=[0, 1, -1, 0, 0, -1, 1],
        **options,
    )
    assert found[4:].tolist() == [[0, 0]] * 3
    assert found[:4].any()


@pytest.mark.parametrize("name", [name for name in ALL if name != "efficient"])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e30])
def test_rewards_that_differ_by_rounding_alone_are_equal(name: str, size: float) -> None:
    """0.1 + 0.2 is 0.30000000000000004: its deviation of 3e-17 over itself would be an advantage of full size."""
    options = {} if name == "rloo" else {"eps": 0} | ({"clamp": 1e40} if name == "reinforce" else {})
    same = [size * value for value in (0.1 + 0.2, 0.3, 0.3, 0.3)]
    turns, results = [1, 2, 3, 1], [0, -1, 2, 0]
    assert len(set(same)) == 2
    found = estimate(name, same, turn_rewards=same, turns=turns, results=results, **options)
    assert found.tolist() == [[0, 0, 0]] * 4
    apart = [same[0] * (1 + 1e-11), *same[1:]]
    assert estimate(name, apart, turn_rewards=same, turns=turns, results=results, **options).any(dim=1).all()


def test_a_correctness_that_differs_by_rounding_alone_is_equal() -> None:
    # of ten tenths added up 0.9999999999999999 comes out; it is not 1, so neither is it correct
    assert estimate("efficient", [sum([0.1] * 10), 1, 1], eps=0).tolist() == [[0], [0], [0]]


def test_values_of_another_group_or_sign_are_not_levelled() -> None:
    # beside 1e20 a difference of 1e6 is rounding, beside 0 that of 1 is not; ±1e-13 are twice their size apart
    found = estimate("grpo", [1e20, 1e20 + 1e6, 0, 1, 1e-13, -1e-13], groups=[0, 0, 1, 1, 2, 2], eps=0)
    assert same(found, [[0], [0], [-ROOT_HALF], [ROOT_HALF], [ROOT_HALF], [-ROOT_HALF]], atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_no_trajectory_and_no_turn_make_empty_tables(name: str) -> None:
    assert estimate(name, []).shape == (0, 0)
    assert estimate(name, [1, 0], turns=[0, 0]).shape == (2, 0)
    assert estimate(name, [1, 0], turns=[0, 2])[0].tolist() == [0, 0]


@pytest.mark.parametrize("name", ALL)
def test_the_type_is_that_of_the_outcome(name: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert estimate(name, [1, 0], dtype=dtype).dtype == dtype
    assert estimate(name, [1, 0], dtype=torch.int64).dtype == torch.float32


@pytest.mark.parametrize("name", ALL)
def test_single_precision_is_computed_in_double(name: str) -> None:
    # 1/2048 and 1/2049 differ by 2.4e-7, and their squares would by 1e-10; efficient centres 1, 1, 0
    outcomes = [1, 1, 0] if name == "efficient" else [1 / 2048, 1 / 2049, 1 / 2050]
    exact = torch.tensor(outcomes, dtype=torch.float32).tolist()  # what single precision holds
    found = estimate(name, exact, dtype=torch.float32)
    assert torch.equal(found, estimate(name, exact).float())
    assert found[0, 0] > 0 > found[2, 0]


# Squared differences of rewards below 1e-100 would underflow, so that only eps = 1e-300 is left to divide by.
REWARDS = st.floats(-1e100, 1e100).map(lambda reward: reward if abs(reward) > 1e-100 else 0.0)


@settings(max_examples=25)
@given(
    st.sampled_from(ALL),
    st.lists(
        st.tuples(REWARDS, REWARDS, st.integers(0, 2), st.integers(0, 3), st.just(-1)),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from([0.0, 1e-300, 1e-6]),
)
def test_nothing_ever_gives_nan(name: str, rows: list[Row], eps: float) -> None:
    if name == "efficient":
        rows = [(float(outcome > 0), *rest) for outcome, *rest in rows]  # type: ignore[misc]  # star keeps no types
    if name == "rloo":  # the one that never scales: what it gives must fit into single precision
        rows = [(outcome / 1e63, *rest) for outcome, *rest in rows]  # type: ignore[misc]  # star keeps no types
    rows = [(*row[:4], row[3] - 1) for row in rows]  # the result at the last turn; −1 where there is none
    found = run(name, rows, **({} if name == "rloo" else {"eps": eps}))
    assert found.isfinite().all()
    beyond = torch.arange(found.shape[1]) >= torch.tensor([row[3] for row in rows])[:, None]
    assert not found[beyond].any()


# Invariances


@settings(max_examples=25)
@given(st.sampled_from((*WITH_SINGLETON, "gigpo")), batches(), st.integers(-20, 20), st.integers(-20, 20))
def test_a_shift_of_all_rewards_changes_nothing(name: str, rows: list[Row], outcome_by: int, turn_by: int) -> None:
    # a discounted return is no difference of rewards: gigpo with γ = 1
    options = WIDE.get(name, {}) | ({"gamma": 1} if name == "gigpo" else {})
    shifted = [(outcome + outcome_by, reward + turn_by, *rest) for outcome, reward, *rest in rows]
    assert same(run(name, shifted, **options), run(name, rows, **options), atol=1e-6)


@settings(max_examples=25)
@given(st.sampled_from(sorted({*WITH_SINGLETON, "gigpo"} - {"rloo"})), batches(), st.sampled_from([1e-3, 0.5, 3, 1e9]))
def test_the_unit_of_rewards_does_not_matter_where_they_are_scaled(name: str, rows: list[Row], unit: float) -> None:
    options = {"eps": 0} | ({"clamp": 1e12} if name == "reinforce" else {})
    scaled = [(unit * outcome, unit * reward, *rest) for outcome, reward, *rest in rows]
    assert same(run(name, scaled, **options), run(name, rows, **options), atol=1e-6)


@settings(max_examples=25)
@given(st.sampled_from(sorted({*WITH_SINGLETON, "gigpo"} - {"reinforce"})), batches(), st.sampled_from([0.5, 3, 1e4]))
def test_where_they_are_not_advantages_are_in_the_unit_of_rewards(name: str, rows: list[Row], unit: float) -> None:
    options = {} if name == "rloo" else {"scale": "none"}
    scaled = [(unit * outcome, unit * reward, *rest) for outcome, reward, *rest in rows]
    assert same(run(name, scaled, **options), unit * run(name, rows, **options), atol=1e-6)


@settings(max_examples=25)
@given(st.sampled_from(ALL), batches(unit=True), st.data())
def test_the_order_of_trajectories_does_not_matter(name: str, rows: list[Row], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    contexts = [100 + 97 * place for place in range(len(rows))]
    straight, shuffled = {}, {}
    if name == "efficient":
        straight, shuffled = {"contexts": contexts}, {"contexts": [contexts[place] for place in order]}
    found = run(name, [rows[place] for place in order], **shuffled)
    assert same(found, run(name, rows, **straight)[order], atol=1e-6)


@settings(max_examples=20)
@given(st.sampled_from(ALL), batches(unit=True))
def test_the_labels_of_groups_do_not_matter(name: str, rows: list[Row]) -> None:
    # −7, 0, 40 become numbers of another order
    labels = {-7: 2**40, 0: -1, 40: -(2**62)}
    renamed = [(outcome, reward, labels[group], *rest) for outcome, reward, group, *rest in rows]
    assert torch.equal(run(name, renamed), run(name, rows))


@settings(max_examples=20)
@given(st.sampled_from(ALL), batches(unit=True))
def test_what_another_group_holds_does_not_matter(name: str, rows: list[Row]) -> None:
    whole = run(name, rows)
    for group in {row[2] for row in rows}:
        alone = run(name, [row for row in rows if row[2] == group])
        assert torch.equal(members(whole, rows, group)[:, : alone.shape[1]], alone)


@settings(max_examples=25)
@given(st.sampled_from(SCALAR), batches())
def test_one_scalar_a_trajectory_sums_to_zero_over_its_group(name: str, rows: list[Row]) -> None:
    found = run(name, rows)
    for place, row in enumerate(rows):
        assert set(found[place, : row[3]].tolist()) == {found[place, 0].item()}
    for group in {row[2] for row in rows}:
        assert abs(members(found, rows, group)[:, 0].sum().item()) < 1e-6


@settings(max_examples=20)
@given(batches())
def test_discounted_advantages_sum_to_zero_at_the_last_turns(rows: list[Row]) -> None:
    found = run("turn_discounted", rows)
    for group in {row[2] for row in rows}:
        last = [found[place, row[3] - 1].item() for place, row in enumerate(rows) if row[2] == group]
        assert abs(sum(last)) < 1e-6


@settings(max_examples=20)
@given(batches(), st.sampled_from(["std", "none"]), st.sampled_from(["zero", "raw"]))
def test_without_a_discount_turn_discounted_is_grpo(rows: list[Row], scale: str, singleton: str) -> None:
    options = {"scale": scale, "singleton": singleton}
    assert torch.equal(run("turn_discounted", rows, gamma=1, **options), run("grpo", rows, **options))


@settings(max_examples=20)
@given(batches(least=2))
def test_leave_one_out_is_n_over_n_less_one_times_centring(rows: list[Row]) -> None:
    centred, found = run("grpo", rows, scale="none"), run("rloo", rows)
    groups = [row[2] for row in rows]
    for place, group in enumerate(groups):
        count = groups.count(group)
        factor = count / (count - 1) if count > 1 else 0.0
        assert same(found[place], factor * centred[place], atol=1e-12)


@settings(max_examples=20)
@given(batches())
def test_without_turn_rewards_merging_is_grpo(rows: list[Row]) -> None:
    silent = [(outcome, 0.0, *rest) for outcome, _, *rest in rows]
    assert torch.equal(run("grpo_merged", silent), run("grpo", silent, eps=1e-4))


# Rows are not trajectories


@settings(max_examples=25)
@given(st.sampled_from((*NORMALISED, "efficient")), batches(unit=True), st.data())
def test_group_statistics_over_rows_and_not_trajectories(name: str, rows: list[Row], data: st.DataObject) -> None:
    """slime#1414 and others: statistics over rows counted a trajectory once for each. More turns change none."""
    place = data.draw(st.integers(0, len(rows) - 1))
    outcome, reward, group, turns, result = rows[place]
    longer = [*rows[:place], (outcome, reward, group, 2 * turns, result), *rows[place + 1 :]]
    assert torch.equal(run(name, longer)[:, 0], run(name, rows)[:, 0])


@settings(max_examples=20)
@given(batches(), st.data())
def test_a_longer_trajectory_discounts_nobody_but_itself(rows: list[Row], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(rows) - 1))
    outcome, reward, group, turns, result = rows[place]
    longer = [*rows[:place], (outcome, reward, group, 2 * turns, result), *rows[place + 1 :]]
    found, before = run("turn_discounted", longer), run("turn_discounted", rows)
    others = [other for other in range(len(rows)) if other != place]
    width = before.shape[1]
    assert torch.equal(found[others, :width], before[others])
    assert found[place, 2 * turns - 1] == before[place, turns - 1]


@pytest.mark.parametrize(
    ("name", "half"),
    [("grpo", ROOT_HALF), ("grpo_merged", ROOT_HALF), ("rloo", 1.0), ("reinforce", ROOT_HALF), ("ms_grpo", ROOT_HALF)],
)
def test_three_rows_of_one_success_beside_one_failure_weigh_the_same(name: str, half: float) -> None:
    """slime#1414: [1, 1, 1 | 0] are two trajectories; over rows the mean is ¾."""
    found = estimate(name, [1, 0], turns=[3, 1])
    assert same(found, [[half] * 3, [-half, 0, 0]], atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_uneven_groups_beside_a_constant_one_keep_to_themselves(name: str) -> None:
    """slime: groups of 4, 3 and 4 were cut as if all were of one size."""
    outcomes, groups = [1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    found = estimate(name, outcomes, groups=groups)
    assert found[4:7].tolist() == [[0]] * 3
    assert torch.equal(found[:4], estimate(name, outcomes[:4]))
    assert torch.equal(found[7:], estimate(name, outcomes[7:]))


@pytest.mark.parametrize("name", ALL)
def test_the_advantage_reaches_every_turn_and_stops_at_the_last(name: str) -> None:
    """SkyRL#1492, SkyRL#1507: the last step's mask cut the advantage of all rows. Here lengths differ a lot."""
    found = estimate(name, [1, 0], turns=[9, 1])
    assert (found[0] > 0).all()
    assert found[1, 0] < 0
    assert found[1, 1:].tolist() == [0] * 8
    if name not in FROM_THE_END:
        assert len(set(found[0].tolist())) == 1
