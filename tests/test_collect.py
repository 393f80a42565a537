"""Trajectories are scored as they finish, or by whole groups."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from talk import Counting, engine, problem, said, shown

from condensegrpo.core.protocols.reward import GroupReward, Reward
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.group import problem_groups
from condensegrpo.episodes.player import LocalPlayer
from condensegrpo.rewards.context import LinearPassRate
from condensegrpo.rewards.outcome import Correct
from condensegrpo.samplers.scripted import ScriptedSampler


class Siblings(GroupReward):
    """A group reward that gives everybody the size of the group, and remembers who was in it."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def score_group(self, trajectories: Sequence[Trajectory], problem: Problem) -> list[dict[str, float]]:
        self.seen.append([one.id for one in trajectories])
        return [{"size": float(len(trajectories))} for _ in trajectories]


class Broken(GroupReward):
    """A group reward that raises."""

    def score_group(self, trajectories: Sequence[Trajectory], problem: Problem) -> list[dict[str, float]]:
        raise KeyError("level")


def gather(
    reward: Reward | GroupReward, *, slow: set[str], samples: int = 3, problems: Sequence[Problem] = (), **limits: float
) -> tuple[tuple[ScoredTrajectory, ...], list[str]]:
    """Everybody answers 1 at once, but the ``slow`` ones, called ``problem/sample``, after a second.

    Returns:
        What was collected, and the ids in the order in which they were handed on.
    """
    handed: list[str] = []
    begun: dict[str, int] = {}

    def environment(one: Problem) -> Counting:
        begun[one.id] = begun.get(one.id, -1) + 1
        return Counting(replace(one, question=f"[{one.id}/{begun[one.id]}]"))

    sampler = ScriptedSampler(
        lambda _: said("answer 1"),
        seconds=lambda ids: 1.0 if any(f"[{name}]" in shown(ids) for name in slow) else 0.0,
    )
    found = asyncio.run(
        LocalPlayer(environment=environment, engine=engine(sampler, **limits), reward=reward).play(
            problem_groups(problems or [replace(problem(0), answer="1")], 7),
            samples=samples,
            run_seed=0,
            step=7,
            on_scored=lambda one: handed.append(one.trajectory.id),
        )
    )
    return found, handed


# --- scoring --------------------------------------------------------------------------------------------------------


def test_a_reward_of_single_trajectories_scores_each_the_moment_it_finishes() -> None:
    found, handed = gather(Correct(), slow={"p0/0"})
    assert sorted(handed[:2]) == ["7/0/1", "7/0/2"]  # the two quick ones, in either order
    assert handed[2:] == ["7/0/0"]
    assert [one.trajectory.id for one in found] == ["7/0/0", "7/0/1", "7/0/2"]
    assert [one.score.total for one in found] == [1.0, 1.0, 1.0]


def test_a_group_reward_scores_a_group_once_when_its_last_one_has_finished() -> None:
    reward = Siblings()
    found, handed = gather(reward, slow={"p0/0"}, problems=[problem(0), problem(1)])
    second, first = ["7/1/0", "7/1/1", "7/1/2"], ["7/0/0", "7/0/1", "7/0/2"]
    assert reward.seen == [second, first]  # nobody waits for another group
    assert handed == [*second, *first]
    assert [one.trajectory.id for one in found] == [*first, *second]
    assert {one.score.total for one in found} == {3.0}


def test_siblings_stand_in_the_order_of_their_sample_numbers() -> None:
    """Whoever finishes first: a reward that looks at places gives the same in every run. 2 comes before 10."""
    reward = Siblings()
    gather(reward, slow={"p0/1", "p0/4"}, samples=12)
    assert reward.seen == [[f"7/0/{sample}" for sample in range(12)]]


def test_a_problem_that_comes_twice_makes_two_groups() -> None:
    reward = Siblings()
    gather(reward, slow=set(), samples=2, problems=[problem(0), problem(0)])
    assert sorted(reward.seen) == [["7/0/0", "7/0/1"], ["7/1/0", "7/1/1"]]


def test_two_problems_with_one_id_are_each_scored_by_their_own_answer() -> None:
    """A task of a user may number its problems carelessly: the first was judged by the answer of the last."""
    twins = [replace(problem(0), answer="1"), replace(problem(0), answer="2")]
    found, _ = gather(Correct(), slow=set(), samples=2, problems=twins)
    assert [one.score.total for one in found] == [1.0, 1.0, 0.0, 0.0]  # everybody answers 1


def test_a_trajectory_holds_its_sample_number_question_and_ground_truth() -> None:
    found, _ = gather(Correct(), slow=set(), samples=2)
    kept = [(one.trajectory.sample, one.trajectory.question, one.trajectory.ground_truth) for one in found]
    assert kept == [(0, "count", "1"), (1, "count", "1")]


def test_a_group_of_one_is_a_group() -> None:
    """As in an evaluation with one sample a problem."""
    reward = Siblings()
    found, handed = gather(reward, slow=set(), samples=1)
    assert reward.seen == [handed] == [["7/0/0"]]
    assert found[0].score.total == 1.0


def test_a_hung_sibling_neither_holds_its_group_up_nor_leaves_its_pass_rate() -> None:
    """NeMo-RL#3238. Two of four hang: p = 1/2, and at the upper anchor λ·p·u = 0.5 · 0.5 · 1."""
    reward = LinearPassRate(context_low=1, context_high=2, coefficient=0.5)
    found, handed = gather(reward, slow={"p0/1", "p0/3"}, samples=4, turn_seconds=0.5)
    assert handed == [f"7/0/{sample}" for sample in range(4)]
    assert [one.trajectory.stop for one in found] == [StopReason.ANSWERED, StopReason.SAMPLER_ERROR] * 2
    assert [one.score.total for one in found] == [0.75, 0.0, 0.75, 0.0]
    assert [one.score.correct for one in found] == [1.0, 0.0, 1.0, 0.0]


def test_a_group_reward_that_raises_is_the_failure_of_its_group() -> None:
    found, handed = gather(Broken(), slow=set(), problems=[problem(0)])
    assert len(handed) == 3
    for one in found:
        assert (one.trajectory.stop, one.score.total) == (StopReason.REWARD_ERROR, 0.0)
        assert one.trajectory.detail.startswith("the reward Broken: KeyError: 'level' (tests/test_collect.py:")
