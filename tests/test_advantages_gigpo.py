"""Credit between turns that were given the same context, against numbers worked out by hand."""

import math

import pytest
import torch
from estimating import Row, batches, estimate, run, same
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT_HALF = math.sqrt(0.5)
ROOT3 = math.sqrt(3)
# Three trajectories in one group; the first comes back to state 7 at its last turn.
STATES = torch.tensor([[7, 8, 7], [7, 8, -1], [7, -1, -1]])
OUTCOMES, TURNS = [4, 2, 0], [3, 2, 1]


def test_turns_of_one_state_are_compared_by_their_discounted_returns() -> None:
    # N = ±√½. State 5: returns ½·1 and 0, mean ¼, std ½·√½, S = ±√½. State 6: one trajectory, S = 0
    states = torch.tensor([[5, 6], [5, -1]])
    found = estimate("gigpo", [1, 0], turns=[2, 1], state_NK=states, gamma=0.5, eps=0)
    assert same(found, [[2 * ROOT_HALF, ROOT_HALF], [-2 * ROOT_HALF, 0]], atol=1e-12)


def test_a_trajectory_counts_once_in_a_state_that_it_comes_back_to() -> None:
    """The paper counts every visit, so that going in circles makes a trajectory count more.

    γ = ½: returns [1, 2, 4], [1, 2], [0]. State 7, first visits [1, 1, 0]: mean ⅔, squares 6/9, std 1/√3, so
    S = 1/√3, 1/√3, −2/√3; the return to it has (4 − ⅔)·√3 = 5.8, clipped to (3 − 1)/√3. State 8: 2 and 2, S = 0.
    N(R^O) = [1, 0, −1].
    """
    found = estimate("gigpo", OUTCOMES, turns=TURNS, state_NK=STATES, gamma=0.5, eps=0)
    wanted = [[1 + 1 / ROOT3, 1, 1 + 2 / ROOT3], [1 / ROOT3, 0, 0], [-1 - 2 / ROOT3, 0, 0]]
    assert same(found, wanted, atol=1e-12)


def test_without_scaling_both_parts_are_only_centred() -> None:
    # R^O − 2 = [2, 0, −2]; state 7: [1, 1, 0] − ⅔, the return to it 4 − ⅔; state 8: 0
    found = estimate("gigpo", OUTCOMES, turns=TURNS, state_NK=STATES, gamma=0.5, scale="none")
    assert same(found, [[2 + 1 / 3, 2, 2 + 10 / 3], [1 / 3, 0, 0], [-2 - 2 / 3, 0, 0]], atol=1e-12)


def test_the_part_of_the_state_is_weighted() -> None:
    # 1/√3 and 2/√3 of the first case, by −½
    found = estimate("gigpo", OUTCOMES, turns=TURNS, state_NK=STATES, gamma=0.5, eps=0, coef=-0.5)
    wanted = [[1 - 0.5 / ROOT3, 1, 1 - 1 / ROOT3], [-0.5 / ROOT3, 0, 0], [-1 + 1 / ROOT3, 0, 0]]
    assert same(found, wanted, atol=1e-12)


def test_eps_is_added_to_both_deviations() -> None:
    # γ = 1, one turn each, one state: S = N; mean ½, std √½; twice ½/(√½ + ½)
    found = estimate("gigpo", [1, 0], gamma=1, eps=0.5)
    wanted = 1 / (ROOT_HALF + 0.5)
    assert same(found, [[wanted], [-wanted]], atol=1e-12)


def test_which_turn_a_state_comes_at_plays_no_part() -> None:
    # state 9 at turn 1 of 2 and at turn 0 of 1: both are last turns, returns 1 and 0
    states = torch.tensor([[3, 9], [9, -1]])
    found = estimate("gigpo", [1, 0], turns=[2, 1], state_NK=states, eps=0)
    assert same(found, [[ROOT_HALF, 2 * ROOT_HALF], [-2 * ROOT_HALF, 0]], atol=1e-12)


def test_a_state_of_another_group_is_another_state() -> None:
    # the label 1 everywhere, a group of 1s and a group of 0s: nothing to compare in either
    found = estimate("gigpo", [1, 1, 0, 0], groups=[4, 4, -4, -4], state_NK=torch.ones(4, 1, dtype=torch.int64))
    assert found.tolist() == [[0], [0], [0], [0]]


def test_a_state_that_one_trajectory_visits_again_and_again_says_nothing() -> None:
    states = torch.tensor([[1, 1, 1], [2, -1, -1]])
    found = estimate("gigpo", [1, 0], turns=[3, 1], state_NK=states, scale="none")
    assert found.tolist() == [[0.5, 0.5, 0.5], [-0.5, 0, 0]]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_first_returns_say_nothing_about_later_visits(scale: str) -> None:
    # both are in state 1 for two turns and succeed: first visits 0.95; the last turns 1, which is 0.05/ε deviations off
    states = torch.tensor([[1, 1], [1, 1], [2, -1]])
    found = estimate("gigpo", [1, 1, 0], turns=[2, 2, 1], state_NK=states, scale=scale)
    assert found.tolist() == estimate("grpo", [1, 1, 0], turns=[2, 2, 1], scale=scale).tolist()


@pytest.mark.parametrize("outcome", [1.0, -1.0, 0.1])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_outcomes_say_nothing_however_many_turns_they_took(scale: str, outcome: float) -> None:
    """From one first state, 3, 3, 3 and 4 turns: returns 0.9025 three times and 0.857, S = ½, ½, ½, −1½ if it had one.

    For −1 the signs turn round: the longest failure would be what is rewarded.
    """
    turns = [3, 3, 3, 4, 2, 1]  # the last two are a group of unequal outcomes, which keeps what it has
    place_K = torch.arange(4)
    states = torch.where(place_K < torch.tensor(turns)[:, None], place_K, -1)
    outcomes, groups = [outcome] * 5 + [0], [0, 0, 0, 0, 1, 1]
    found = estimate("gigpo", outcomes, groups=groups, turns=turns, state_NK=states, scale=scale)
    assert found[:4].tolist() == [[0, 0, 0, 0]] * 4
    without = estimate("grpo", outcomes, groups=groups, turns=turns, scale=scale)
    assert found[4, 0] / without[4, 0] > 1.5


def test_a_later_visit_is_no_further_off_than_a_first_could_be() -> None:
    # first visits 0.95·1 and 0.95·1.0001 differ by 1e-4, the later ones lie 0.05 above: 700 deviations, were it not cut
    states = torch.tensor([[1, 1], [1, 1]])
    found = estimate("gigpo", [1, 1.0001], turns=[2, 2], state_NK=states, eps=0)
    assert same(found, [[-2 * ROOT_HALF, 0], [2 * ROOT_HALF, 2 * ROOT_HALF]], atol=1e-6)


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    assert estimate("gigpo", [3, 1, 0], groups=[1, 2, 2], scale="none", gamma=1).tolist() == [[0], [1], [-1]]


def test_a_trajectory_without_turns_counts_for_the_outcome_and_is_in_no_state() -> None:
    # R^O − mean of all three: [1, 0, −1]; state 0 holds the first two only: ±½
    found = estimate("gigpo", [2, 1, 0], turns=[1, 1, 0], scale="none")
    assert found.tolist() == [[1.5], [-0.5], [0]]


@settings(max_examples=20)
@given(batches(), st.sampled_from(["std", "none"]))
def test_without_the_part_of_the_state_it_is_grpo(rows: list[Row], scale: str) -> None:
    assert run("gigpo", rows, coef=0, scale=scale).tolist() == run("grpo", rows, scale=scale).tolist()


@settings(max_examples=20)
@given(batches(), st.sampled_from(["std", "none"]))
def test_where_no_two_contexts_are_the_same_it_is_grpo(rows: list[Row], scale: str) -> None:
    longest = max(row[3] for row in rows)
    label_NK = torch.arange(len(rows) * longest).reshape(len(rows), longest)
    has_turn_NK = torch.arange(longest) < torch.tensor([row[3] for row in rows])[:, None]
    states = torch.where(has_turn_NK, label_NK, -1)
    assert run("gigpo", rows, state_NK=states, scale=scale).tolist() == run("grpo", rows, scale=scale).tolist()


def draw_states(rows: list[Row], data: st.DataObject) -> torch.Tensor:
    """Few states, so that trajectories share them and come back to them."""
    longest = max(row[3] for row in rows)
    return torch.tensor(
        [
            data.draw(st.lists(st.integers(0, 2), min_size=row[3], max_size=row[3])) + [-1] * (longest - row[3])
            for row in rows
        ]
    )


@settings(max_examples=20)
@given(batches(), st.data())
def test_it_is_what_one_would_write_as_loops(rows: list[Row], data: st.DataObject) -> None:
    states, gamma = draw_states(rows, data), 0.5
    found = run("gigpo", rows, state_NK=states, gamma=gamma, scale="none") - run("grpo", rows, scale="none")
    first: dict[tuple[int, int], dict[int, float]] = {}  # (group, state) -> return at each trajectory's first visit
    for place, (outcome, _, group, turns, _) in enumerate(rows):
        for turn in range(turns):
            visits = first.setdefault((group, int(states[place, turn])), {})
            visits.setdefault(place, outcome * gamma ** (turns - 1 - turn))
    for place, (outcome, _, group, turns, _) in enumerate(rows):
        for turn in range(turns):
            returns = list(first[group, int(states[place, turn])].values())
            wanted = outcome * gamma ** (turns - 1 - turn) - sum(returns) / len(returns)
            outcomes = {row[0] for row in rows if row[2] == group}
            differ = len(set(returns)) > 1 and len(outcomes) > 1
            assert found[place, turn].item() == pytest.approx(wanted * differ, abs=1e-9)


@settings(max_examples=20)
@given(batches(), st.data())
def test_over_first_visits_of_a_state_its_part_sums_to_zero_and_the_clip_is_not_felt(
    rows: list[Row], data: st.DataObject
) -> None:
    states = draw_states(rows, data)
    step_NK = run("gigpo", rows, state_NK=states, eps=0) - run("grpo", rows, eps=0)
    sums: dict[tuple[int, int], float] = {}
    for place, row in enumerate(rows):
        labels = states[place, : row[3]].tolist()
        for state in set(labels):
            key = row[2], state
            sums[key] = sums.get(key, 0.0) + step_NK[place, labels.index(state)].item()
    assert all(abs(total) < 1e-9 for total in sums.values())


@settings(max_examples=15)
@given(batches(), st.data())
def test_the_labels_of_states_do_not_matter(rows: list[Row], data: st.DataObject) -> None:
    states = draw_states(rows, data)
    # 0, 1, 2 become 10⁹, −5, 10⁹ − 100, and in group 40 change places with each other
    names = torch.tensor([10**9, -5, 10**9 - 100])
    other = torch.where(states < 0, -1, names[states.clamp(min=0)])
    swapped = torch.where(states < 0, -1, names[2 - states.clamp(min=0)])
    is_40 = torch.tensor([row[2] == 40 for row in rows])[:, None]
    relabelled = torch.where(is_40, swapped, other)
    assert torch.equal(run("gigpo", rows, state_NK=relabelled), run("gigpo", rows, state_NK=states))


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ([[1, -1], [1, -1]], r"trajectory 0 .*are \[1, -1\], wanted a label for each of its 2 turns"),
        ([[1, 2], [1, 2]], r"trajectory 1 .*are \[1, 2\], wanted a label for each of its 1 turns and -1 beyond"),
    ],
)
def test_states_stand_at_turns_and_nowhere_else(states: list[list[int]], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        estimate("gigpo", [1, 0], turns=[2, 1], state_NK=torch.tensor(states))


def test_states_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"= \(2, 2\), found \(2, 1\)"):
        estimate("gigpo", [1, 0], turns=[2, 1], state_NK=torch.ones(2, 1, dtype=torch.int64))
