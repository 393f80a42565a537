"""The figures of an evaluation."""

from dataclasses import replace

import pytest
from builders import scored, trajectory, turn
from command import ROOT
from metrics_page import unexplained

from condensegrpo.assembly.build import build
from condensegrpo.assembly.runtime import evaluation_temperature, provenance
from condensegrpo.config.load import load_config
from condensegrpo.core.scored_trajectory import TrajectoryStats
from condensegrpo.evaluation.figures import evaluation_metrics, evaluation_of


def sample(problem: str, number: int, correct: float, *, context: int = 3, turn_reward: float = 0.0) -> TrajectoryStats:
    one = trajectory(turn(range(context), [7]), id=f"{problem}/{number}", group=problem)
    return replace(scored(one, correct, correct=correct).figures, turn_reward=turn_reward)


def test_success_is_the_mean_over_trajectories_and_pass_at_k_the_mean_over_problems() -> None:
    samples = [sample("a", 0, 1), sample("a", 1, 0), sample("b", 0, 0), sample("b", 1, 0)]
    result = evaluation_of("held-out", samples, seed=3, seconds=1.0)
    assert (result.problems, result.samples, result.seed) == (2, 2, 3)
    assert result.success == 0.25
    assert result.pass_at == {1: 0.25, 2: 0.5}  # of both samples of a, one solves it; of b none


def test_two_problems_of_one_id_are_two() -> None:
    """As files of one name in two folders of games."""
    samples = [sample(each, n, int(each in "ab")) for each in "abcd" for n in (0, 1)]
    named = [replace(one, problem_id={"a": "x", "b": "x", "c": "y", "d": "y"}[one.group_id]) for one in samples]
    found, wanted = (evaluation_of("held-out", each, seed=3, seconds=1.0) for each in (named, samples))
    assert found == wanted
    assert evaluation_of("held-out", named[:6], seed=3, seconds=1.0).problems == 3


def test_the_order_of_the_trajectories_changes_nothing() -> None:
    samples = [sample("a", 0, 1, context=9), sample("b", 0, 0), sample("c", 0, 1)]
    assert evaluation_of("x", samples, seed=0, seconds=0.0) == evaluation_of("x", samples[::-1], seed=0, seconds=0.0)


def test_ranks_may_hand_in_uneven_shares() -> None:
    # five problems on two ranks: 0, 2, 4 and 1, 3; tenths, whose sums depend on the order where they are rounded
    whole = [sample(name, n, (n + ord(name)) % 10 / 10) for name in "abcde" for n in range(3)]
    shares = [one for rank in (0, 1) for one in whole if (ord(one.problem_id) - ord("a")) % 2 == rank]
    assert shares != whole
    assert evaluation_of("x", shares, seed=0, seconds=0.0) == evaluation_of("x", whole, seed=0, seconds=0.0)


def test_what_turns_were_paid_is_told() -> None:
    metrics = evaluation_metrics(evaluation_of("held-out", [sample("a", 0, 1, turn_reward=0.5)], seed=0, seconds=0.0))
    assert metrics["eval/turn_reward"] == 0.5
    assert unexplained([metrics]) == set()


def test_metrics_name_the_variant_and_leave_out_what_is_not_known() -> None:
    one_problem = [sample("a", 0, 1, context=4)]
    held_out = evaluation_metrics(evaluation_of("held-out", one_problem, seed=0, seconds=2.0))
    variant = evaluation_metrics(evaluation_of("K=20", one_problem, seed=0, seconds=2.0))
    assert held_out["eval/success"] == 1
    assert held_out["eval/context_tokens"] == 4
    assert held_out["eval/seconds"] == 2  # of the evaluation; a trajectory's own are beside it
    assert held_out["eval/seconds/trajectory"] == 0.25
    assert variant["eval/K=20/success"] == 1
    assert held_out["eval/success_low"] == pytest.approx(0.2065, abs=1e-4)  # of one problem
    assert held_out["eval/success_high"] == 1


def test_the_interval_is_wider_when_the_samples_of_a_problem_agree() -> None:
    agree = [sample(problem, n, float(problem in "ab")) for problem in "abcd" for n in range(4)]
    mixed = [sample(problem, n, float(n < 2)) for problem in "abcd" for n in range(4)]
    clustered, spread = (evaluation_of("x", part, seed=0, seconds=0.0) for part in (agree, mixed))
    assert clustered.success == spread.success == 0.5
    assert clustered.success_high > spread.success_high > 0.5


def test_an_evaluation_has_the_temperature_of_training_or_its_own() -> None:
    greedy = "evaluate.variants={greedy: [evaluate.temperature=0]}"
    components = build(load_config(ROOT / "configs/quickstart.yaml", ["rollout.temperature=0.7", greedy]))
    sampled, variant = (components.evaluations[name].config for name in ("held-out", "greedy"))
    assert (evaluation_temperature(sampled), evaluation_temperature(variant)) == (0.7, 0.0)
    assert variant.rollout.temperature == 0.7  # of training
    assert provenance(variant, model="m", step=0, evaluation="greedy").temperature == 0.0
