"""What training and evaluation report, against counts made by hand and by brute force."""

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from condensegrpo.messages import Message
from condensegrpo.metrics import GroupSignal, Interval, group_signal, mean_interval_by_problem, pass_at_k, summarise
from condensegrpo.trajectory import Condensation, Score, ScoredTrajectory, Stop, Trajectory, Turn


def turn(prompt: int, output: int, *, condensed: bool = False) -> Turn:
    """A turn of so many tokens."""
    declared = Condensation(condenser="last_k", reason="", tokens_before=99, tokens_after=prompt, spans=())
    return Turn(
        prompt_ids=(1,) * prompt,
        output_ids=(2,) * output,
        logprobs=(-0.5,) * output,
        policy_version=0,
        condensation=declared if condensed else None,
        context=(),
        reply=Message(role="assistant", content=""),
    )


def scored(
    *turns: Turn,
    correct: float,
    total: float,
    stop: Stop = Stop.ANSWERED,
    format_valid: bool = True,
    components: Mapping[str, float] | None = None,
) -> ScoredTrajectory:
    trajectory = Trajectory(
        id="q/0", problem_id="q", group_id="q", turns=turns, stop=stop, answer=None, seconds=0.5 * len(turns)
    )
    return ScoredTrajectory(
        trajectory=trajectory,
        score=Score(
            total=total,
            components=components or {},
            format_valid=format_valid,
            correct=correct,
            context_tokens=trajectory.max_context_tokens,
        ),
    )


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        for k in range(1, samples + 1):
            subsets = list(combinations([1] * successes + [0] * (samples - successes), k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(successes, samples, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_one_is_the_success_rate_and_pass_at_all_is_certain() -> None:
    assert pass_at_k(3, 8, 1) == 3 / 8
    assert pass_at_k(1, 8, 8) == 1
    assert pass_at_k(0, 8, 8) == 0


def test_pass_at_k_of_many_samples_stays_exact() -> None:
    assert pass_at_k(1, 10_000, 5_000) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(("successes", "samples", "k"), [(2, 1, 1), (-1, 4, 1), (1, 4, 5), (1, 4, 0), (0, 0, 1)])
def test_pass_at_k_refuses_counts_that_cannot_be(successes: int, samples: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@k needs"):
        pass_at_k(successes, samples, k)


def test_one_sample_a_problem_gives_the_ordinary_t_interval() -> None:
    values = [1.0, 2.0, 4.0, 5.0]  # mean 3, standard deviation √(10/3), t with 3 degrees of freedom 3.182
    mean, low, high = mean_interval_by_problem(values, ["a", "b", "c", "d"])
    reach = 3.182 * math.sqrt(10 / 3) / 2
    assert mean == 3
    assert (low, high) == pytest.approx((3 - reach, 3 + reach), abs=5e-3)


def test_copies_of_a_sample_add_nothing_to_what_is_known() -> None:
    once = mean_interval_by_problem([1, 0, 0, 1], ["a", "b", "c", "d"])
    eight_times = mean_interval_by_problem([1, 0, 0, 1] * 8, ["a", "b", "c", "d"] * 8)
    assert eight_times == pytest.approx(once)


def test_samples_that_differ_within_problems_but_not_between_them_leave_no_doubt() -> None:
    assert mean_interval_by_problem([1, 0, 1, 0], ["a", "a", "b", "b"]) == Interval(0.5, 0.5, 0.5)


def test_problems_of_different_size_weigh_by_their_samples() -> None:
    # mean ¾; residual sums: a 3·¼ = ¾, b −¾; se² = 2/1 · (2·9/16)/16; t with one degree of freedom 12.706
    mean, low, high = mean_interval_by_problem([1, 1, 1, 0], ["a", "a", "a", "b"])
    reach = 12.7062 * math.sqrt(2 * (9 / 8) / 16)
    assert mean == 0.75
    assert (low, high) == pytest.approx((0.75 - reach, 0.75 + reach), rel=1e-5)


def test_one_problem_has_a_mean_and_no_bounds() -> None:
    assert mean_interval_by_problem([1, 0, 1, 1], ["a"] * 4) == Interval(0.75, None, None)


def test_many_problems_approach_the_normal_quantile() -> None:
    values = [float(index % 2) for index in range(1000)]
    _, low, high = mean_interval_by_problem(values, [str(index) for index in range(1000)])
    assert low is not None
    assert high is not None
    assert (high - low) / 2 == pytest.approx(1.9623 * statistics.stdev(values) / math.sqrt(1000), rel=1e-4)


@pytest.mark.parametrize(
    ("problems", "quantile"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (6, 2.5706), (11, 2.2281), (31, 2.0423)]
)
def test_few_problems_widen_the_interval_by_students_t(problems: int, quantile: float) -> None:
    values = [float(index) for index in range(problems)]
    mean, low, _ = mean_interval_by_problem(values, [str(index) for index in range(problems)])
    assert low is not None
    assert (mean - low) / (statistics.stdev(values) / math.sqrt(problems)) == pytest.approx(quantile, rel=2e-3)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    # 400 evaluations of 20 problems × 4 samples whose success rates differ; taken for independent, far fewer would do
    draw = random.Random(5)
    covered = 0
    for _ in range(400):
        rates = [draw.choice([0.1, 0.9]) for _ in range(20)]
        values = [float(draw.random() < rate) for rate in rates for _ in range(4)]
        _, low, high = mean_interval_by_problem(values, [str(index // 4) for index in range(80)])
        assert low is not None
        assert high is not None
        covered += low <= 0.5 <= high
    assert 0.92 < covered / 400 < 0.98


def test_no_values_have_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval_by_problem([], [])


def test_every_value_needs_its_problem() -> None:
    with pytest.raises(ValueError, match="zip"):
        mean_interval_by_problem([1, 0], ["a"])


def test_group_signal_counts_groups_and_trajectories() -> None:
    # group 5: all correct, no signal; group 6: mixed; group 7: alone
    found = group_signal(
        torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]),
        torch.tensor([5, 5, 6, 6, 7]),
        torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.5, 0.5], [-0.5, 0.0], [0.0, 0.0]]),
    )
    assert found == GroupSignal(zero_variance_groups=2 / 3, zero_advantage=3 / 5, correct_negative=0)


def test_group_signal_sees_correct_trajectories_that_are_pushed_down() -> None:
    # the reward 1/C in a group of three correct: the longest is pushed down although it is right
    outcome_N = torch.tensor([1 / 100, 1 / 200, 1 / 400, 0.0])
    advantage_NK = torch.tensor([[1.3], [0.2], [-0.3], [-1.2]])
    group_N = torch.zeros(4, dtype=torch.int64)
    found = group_signal(outcome_N, group_N, advantage_NK, correct_N=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert found.correct_negative == pytest.approx(1 / 3)
    assert found.zero_variance_groups == 0


def test_a_share_of_nothing_is_zero() -> None:
    nothing_N = torch.zeros(0)
    assert group_signal(nothing_N, nothing_N.long(), torch.zeros(0, 0)) == GroupSignal(0, 0, 0)
    assert group_signal(torch.zeros(2), torch.zeros(2).long(), torch.zeros(2, 1)).correct_negative == 0


def test_a_summary_counts_trajectories_and_not_turns() -> None:
    # verl takes the last row only, others every row: a failure of three turns must weigh as much as a success of one
    found = summarise(
        [
            scored(turn(10, 4), correct=1, total=0.8),
            scored(
                turn(10, 1), turn(30, 2), turn(20, 3, condensed=True),
                correct=0, total=-0.2, stop=Stop.TURN_LIMIT, format_valid=False,
            ),
        ]
    )  # fmt: skip
    assert found["trajectories"] == 2
    assert found["success"] == 0.5
    assert found["reward"] == pytest.approx(0.3)
    assert found["format_valid"] == 0.5
    assert found["context_tokens"] == 20  # mean of the largest, 10 and 30
    assert found["context_tokens_max"] == 30
    assert found["turns"] == 2
    assert found["output_tokens"] == 5
    assert found["condensations"] == 0.5
    assert found["seconds"] == 1.0


def test_every_reason_to_stop_has_a_share_and_they_add_up() -> None:
    stops = [Stop.ANSWERED, Stop.ANSWERED, Stop.FORMAT, Stop.SAMPLER_ERROR]
    found = summarise([scored(turn(1, 1), correct=0, total=0, stop=stop) for stop in stops])
    shares = {key.removeprefix("stop/"): value for key, value in found.items() if key.startswith("stop/")}
    assert shares == {
        **{stop.value: 0.0 for stop in Stop},
        "answered": 0.5,
        "format": 0.25,
        "sampler_error": 0.25,
    }


def test_components_are_averaged_over_those_that_have_them() -> None:
    found = summarise(
        [
            scored(turn(1, 1), correct=1, total=1.5, components={"correct": 1.0, "format": 0.5}),
            scored(turn(1, 1), correct=0, total=0.0, components={"correct": 0.0}),
        ]
    )
    assert found["reward/correct"] == 0.5
    assert found["reward/format"] == 0.5


def test_valid_tool_calls_are_a_share_of_all_calls_and_not_of_trajectories() -> None:
    calls = ({"tool_attempts": 3.0, "tool_successes": 3.0}, {"tool_attempts": 1.0, "tool_successes": 0.0}, {})
    found = summarise([scored(replace(turn(1, 1), turn_rewards=one), correct=0, total=0) for one in calls])
    assert found["tool_calls"] == pytest.approx(4 / 3)
    assert found["tool_calls_valid"] == 0.75
    assert "tool_calls" not in summarise([scored(turn(1, 1), correct=0, total=0)])


def test_a_trajectory_that_never_began_counts_too() -> None:
    found = summarise([scored(correct=0, total=0, stop=Stop.CONTEXT_OVERFLOW, format_valid=False)])
    assert (found["trajectories"], found["turns"], found["context_tokens"], found["output_tokens"]) == (1, 0, 0, 0)


def test_no_trajectories_have_their_number_only() -> None:
    assert summarise([]) == {"trajectories": 0}
