"""Metrics of training and evaluation: every trajectory counts once, whatever its number of rows. Pure functions.

Ranks exchange a small ``TrajectoryFacts`` of every trajectory and summarise those of all ranks: a mean of the ranks'
means would be wrong where only some trajectories have a value. docs/reference/metrics.md explains every key.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from condensegrpo.core.trajectory import Score, ScoredTrajectory, Stop
from condensegrpo.metrics.information import curve, lost


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFacts:
    """The part of a scored trajectory that metrics need: some hundred bytes when pickled, whatever its length."""

    problem_id: str
    score: Score
    turn_reward: float  # R^T, what its turns earned on the way
    turns: int  # replies; condense turns are not counted
    output_tokens: int  # sampled tokens of all turns, condense turns among them
    condensations: int  # declared ones
    tool_attempts: int  # calls that it wrote, malformed ones included
    tool_successes: int  # those that a tool answered without an error
    tools_abandoned: int = 0  # those that exceeded their time limit
    stop: Stop
    seconds: float
    information: tuple[float | None, ...] = ()  # (K,) nats, of information.curve; None: not measured
    information_lost: float | None = None  # nats, of information.lost
    summaries: int = 0  # that the policy wrote and that were used
    rejected: int = 0  # that it wrote and that were not used
    rejected_tokens: int = 0  # of those
    drafts: int = 0  # of its answer, that one included which was taken
    draft_tokens: int = 0  # of those that were not
    confidence: float | None = None  # probability of the last one; None: there was none


def facts_of(scored: ScoredTrajectory, *, turn_reward: float) -> TrajectoryFacts:
    """The facts of a scored trajectory.

    Args:
        turn_reward: R^T, of ``algorithms.credit.turn_sums``.
    """
    trajectory = scored.trajectory
    drafts = [turn.draft for turn in trajectory.turns if turn.draft is not None]
    return TrajectoryFacts(
        problem_id=trajectory.problem_id,
        score=replace(scored.score, components=dict(scored.score.components)),  # other mappings may not pickle
        turn_reward=turn_reward,
        turns=trajectory.replies,
        summaries=len(trajectory.turns) - trajectory.replies,
        rejected=len(trajectory.rejected),
        rejected_tokens=sum(len(text.output_ids) for text in trajectory.rejected),
        output_tokens=trajectory.output_tokens,
        condensations=sum(turn.condensation is not None for turn in trajectory.turns),
        tool_attempts=sum(turn.tool_attempts for turn in trajectory.turns),
        tool_successes=sum(turn.tool_successes for turn in trajectory.turns),
        tools_abandoned=sum(turn.tools_abandoned for turn in trajectory.turns),
        stop=trajectory.stop,
        seconds=trajectory.seconds,
        drafts=len(drafts),
        draft_tokens=sum(draft.tokens for draft in (drafts[:-1] if trajectory.stop is Stop.CONFIDENT else drafts)),
        confidence=drafts[-1].probability if drafts else None,
        information=curve(trajectory),
        information_lost=lost(trajectory),
    )


def summarise(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """The metrics of trajectories in any order, each counted once whatever its number of turns.

    docs/reference/metrics.md defines every key. Without trajectories the result is ``trajectories`` alone.
    """
    if not facts:
        return {"trajectories": 0.0}
    turn_rewards = [each.turn_reward for each in facts]
    attempts, successes = sum(each.tool_attempts for each in facts), sum(each.tool_successes for each in facts)
    return {
        "trajectories": float(len(facts)),
        "success": _mean(each.score.correct for each in facts),
        "reward": _mean(each.score.total for each in facts),
        "format_valid": _mean(each.score.format_valid for each in facts),
        "context_tokens": _mean(each.score.context_tokens for each in facts),
        "context_tokens_max": float(max(each.score.context_tokens for each in facts)),
        "turns": _mean(each.turns for each in facts),
        "output_tokens": _mean(each.output_tokens for each in facts),
        "condensations": _mean(each.condensations for each in facts),
        "seconds/trajectory": _mean(each.seconds for each in facts),
        **{f"stop/{stop.value}": _mean(each.stop is stop for each in facts) for stop in Stop},
        **({"turn_reward": _mean(turn_rewards)} if any(turn_rewards) else {}),
        **({"tool_calls": attempts / len(facts), "tool_calls_valid": successes / attempts} if attempts else {}),
        **({"tool_calls_abandoned": sum(each.tools_abandoned for each in facts) / attempts} if attempts else {}),
        **_information(facts),
        **_summaries(facts),
        **_drafts(facts),
        **{
            f"reward/{name}": _mean(each.score.components[name] for each in facts if name in each.score.components)
            for name in sorted({name for each in facts for name in each.score.components})
        },
    }


def multi_turn(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """The metrics under the names of MT-GRPO (docs/reference/metrics.md); 0 without trajectories."""
    return {
        "train/turn_reward": _mean(each.turn_reward for each in facts) if facts else 0.0,
        "train/num_valid_actions": _mean(each.tool_successes for each in facts) if facts else 0.0,
        "train/accuracy": _mean(each.score.correct for each in facts) if facts else 0.0,
    }


def _information(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    last = [known[-1] for each in facts if (known := [value for value in each.information if value is not None])]
    lost = [each.information_lost for each in facts if each.information_lost is not None]
    if not last:
        return {}
    return {"answer_information": _mean(last), "answer_information_lost": _mean(lost)}


def _summaries(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    if not any(each.summaries or each.rejected for each in facts):
        return {}
    return {
        "summaries": _mean(each.summaries for each in facts),
        "summaries_rejected": _mean(each.rejected for each in facts),
        "summary_tokens_rejected": _mean(each.rejected_tokens for each in facts),
    }


def _drafts(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    last = [each.confidence for each in facts if each.confidence is not None]
    if not last:
        return {}
    return {
        "drafts": _mean(each.drafts for each in facts),
        "draft_tokens": _mean(each.draft_tokens for each in facts),
        "confidence": _mean(last),
    }


def _mean(values: Iterable[float]) -> float:
    """Rounded once, from the exact sum: the same to the bit in any order and from any number of ranks."""
    return statistics.fmean(values)
