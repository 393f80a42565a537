"""Metrics: what training and evaluation report about trajectories, each counted once and never by rows. Pure functions.

Ranks exchange a small ``TrajectoryFacts`` of every trajectory and summarise those of all ranks: a mean of the ranks'
means would be wrong where only some trajectories have a value. docs/reference/metrics.md explains every key.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.core.trajectory import ScoredTrajectory, Stop
from condensegrpo.metrics.information import curve, lost


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFacts:
    """What metrics need of one scored trajectory: some hundred bytes when pickled, whatever its length."""

    problem_id: str
    group_id: str
    total: float  # Score.total
    correct: float  # in [0, 1]
    format_valid: bool
    components: Mapping[str, float]  # Score.components
    turn_reward: float  # R^T, what its turns earned on the way
    context_tokens: int  # Score.context_tokens
    turns: int  # replies; condense turns are not counted
    output_tokens: int  # sampled tokens of all turns, condense turns among them
    condensations: int  # declared ones
    tool_attempts: int  # calls that it wrote, malformed ones included
    tool_successes: int  # those that a tool answered without an error
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
        turn_reward: R^T, of ``algorithms.turn_rewards.turn_sums``.
    """
    one, score = scored.trajectory, scored.score
    drafts = [turn.draft for turn in one.turns if turn.draft is not None]
    return TrajectoryFacts(
        problem_id=one.problem_id,
        group_id=one.group_id,
        total=score.total,
        correct=score.correct,
        format_valid=score.format_valid,
        components=dict(score.components),
        turn_reward=turn_reward,
        context_tokens=score.context_tokens,
        turns=one.replies,
        summaries=len(one.turns) - one.replies,
        rejected=len(one.rejected),
        rejected_tokens=sum(len(text.output_ids) for text in one.rejected),
        output_tokens=one.output_tokens,
        condensations=sum(turn.condensation is not None for turn in one.turns),
        tool_attempts=sum(turn.tool_attempts for turn in one.turns),
        tool_successes=sum(turn.tool_successes for turn in one.turns),
        stop=one.stop,
        seconds=one.seconds,
        drafts=len(drafts),
        draft_tokens=sum(draft.tokens for draft in (drafts[:-1] if one.stop is Stop.CONFIDENT else drafts)),
        confidence=drafts[-1].probability if drafts else None,
        information=curve(one),
        information_lost=lost(one),
    )


def summarise(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """The metrics of some trajectories, each counted once whatever its number of turns, in any order.

    Means over trajectories: ``success``, ``reward``, ``format_valid``, ``context_tokens`` (the largest context of a
    trajectory), ``turns``, ``output_tokens``, ``condensations`` (declared ones), ``seconds/trajectory``,
    ``reward/<component>`` (over those that have the component), ``stop/<reason>`` (every reason, as a share). Also
    ``context_tokens_max``, the largest of all, and ``trajectories``, their number. If any turn earned something:
    ``turn_reward``, the mean of R^T. If any tool was called: ``tool_calls``, the mean number of calls, and
    ``tool_calls_valid``, the share of all calls that a tool answered without an error. If the policy wrote a summary:
    ``summaries`` that were used, ``summaries_rejected`` and ``summary_tokens_rejected``, means over trajectories. If
    what contexts know of the answer was measured: ``answer_information``, the mean of the last context's, and
    ``answer_information_lost``, what condensations cost. If answers were drafted: ``drafts`` and ``draft_tokens`` (of
    those that were not taken), means over trajectories, and ``confidence``, the mean probability of the last one. Of
    none: ``trajectories`` alone.
    """
    if not facts:
        return {"trajectories": 0.0}
    return {
        "trajectories": float(len(facts)),
        "success": _mean(one.correct for one in facts),
        "reward": _mean(one.total for one in facts),
        "format_valid": _mean(one.format_valid for one in facts),
        "context_tokens": _mean(one.context_tokens for one in facts),
        "context_tokens_max": float(max(one.context_tokens for one in facts)),
        "turns": _mean(one.turns for one in facts),
        "output_tokens": _mean(one.output_tokens for one in facts),
        "condensations": _mean(one.condensations for one in facts),
        "seconds/trajectory": _mean(one.seconds for one in facts),
        **{f"stop/{stop.value}": _mean(one.stop is stop for one in facts) for stop in Stop},
        **_turn_rewards(facts),
        **_tool_calls(facts),
        **_information(facts),
        **_summaries(facts),
        **_drafts(facts),
        **_component_means(facts),
    }


def multi_turn(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """What runs of multi-turn GRPO are compared by, under the names that MT-GRPO gave it; 0 where there is nothing.

    ``train/turn_reward`` is the mean of R^T, ``train/num_valid_actions`` the mean number of tool calls that a tool
    answered without an error, ``train/accuracy`` the mean correctness.
    """
    return {
        "train/turn_reward": _mean(one.turn_reward for one in facts) if facts else 0.0,
        "train/num_valid_actions": _mean(one.tool_successes for one in facts) if facts else 0.0,
        "train/accuracy": _mean(one.correct for one in facts) if facts else 0.0,
    }


def _turn_rewards(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    return {"turn_reward": _mean(one.turn_reward for one in facts)} if any(one.turn_reward for one in facts) else {}


def _tool_calls(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    attempts = sum(one.tool_attempts for one in facts)
    successes = sum(one.tool_successes for one in facts)
    if not attempts:
        return {}
    return {"tool_calls": attempts / len(facts), "tool_calls_valid": successes / attempts}


def _information(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    last = [known[-1] for one in facts if (known := [value for value in one.information if value is not None])]
    lost = [one.information_lost for one in facts if one.information_lost is not None]
    if not last:
        return {}
    return {"answer_information": _mean(last), "answer_information_lost": _mean(lost)}


def _summaries(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    if not any(one.summaries or one.rejected for one in facts):
        return {}
    return {
        "summaries": _mean(one.summaries for one in facts),
        "summaries_rejected": _mean(one.rejected for one in facts),
        "summary_tokens_rejected": _mean(one.rejected_tokens for one in facts),
    }


def _drafts(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    last = [one.confidence for one in facts if one.confidence is not None]
    if not last:
        return {}
    return {
        "drafts": _mean(one.drafts for one in facts),
        "draft_tokens": _mean(one.draft_tokens for one in facts),
        "confidence": _mean(last),
    }


def _component_means(facts: Sequence[TrajectoryFacts]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for one in facts:
        for name, value in one.components.items():
            values[name].append(value)
    return {f"reward/{name}": _mean(found) for name, found in sorted(values.items())}


def _mean(values: Iterable[float]) -> float:
    """Rounded once, from the exact sum: the same to the bit in any order and from any number of ranks."""
    return statistics.fmean(values)
