"""The figures of an evaluation."""

import pytest
from builders import scored, trajectory, turn

from condensegrpo.evaluation import evaluation, flat
from condensegrpo.trajectory import ScoredTrajectory


def sample(problem: str, number: int, correct: float, *, context: int = 3) -> ScoredTrajectory:
    one = trajectory(turn(range(context), [7]), id=f"{problem}/{number}", group=problem)
    return scored(one, correct, correct=correct)


def test_success_is_the_mean_over_trajectories_and_pass_at_k_the_mean_over_problems() -> None:
    samples = [sample("a", 0, 1), sample("a", 1, 0), sample("b", 0, 0), sample("b", 1, 0)]
    result = evaluation("held-out", samples, seed=3, seconds=1.0)
    assert (result.problems, result.samples, result.seed) == (2, 2, 3)
    assert result.success == 0.25
    assert result.pass_at == {1: 0.25, 2: 0.5}  # of both samples of a, one solves it; of b none


def test_the_order_of_the_trajectories_changes_nothing() -> None:
    samples = [sample("a", 0, 1, context=9), sample("b", 0, 0), sample("c", 0, 1)]
    assert evaluation("x", samples, seed=0, seconds=0.0) == evaluation("x", samples[::-1], seed=0, seconds=0.0)


def test_uneven_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many"):
        evaluation("x", [sample("a", 0, 1), sample("a", 1, 1), sample("b", 0, 1)], seed=0, seconds=0.0)


def test_metrics_name_the_variant_and_leave_out_what_is_not_known() -> None:
    one_problem = [sample("a", 0, 1, context=4)]
    held_out = flat(evaluation("held-out", one_problem, seed=0, seconds=2.0))
    variant = flat(evaluation("K=20", one_problem, seed=0, seconds=2.0))
    assert held_out["eval/success"] == 1
    assert held_out["eval/context_tokens"] == 4
    assert variant["eval/K=20/success"] == 1
    assert "eval/success_low" not in held_out  # one problem tells nothing of others


def test_the_interval_is_wider_when_the_samples_of_a_problem_agree() -> None:
    agree = [sample(problem, n, float(problem in "ab")) for problem in "abcd" for n in range(4)]
    mixed = [sample(problem, n, float(n < 2)) for problem in "abcd" for n in range(4)]
    clustered, spread = (evaluation("x", part, seed=0, seconds=0.0) for part in (agree, mixed))
    assert clustered.success == spread.success == 0.5
    assert clustered.success_high is not None
    assert spread.success_high is not None
    assert clustered.success_high > spread.success_high == 0.5
