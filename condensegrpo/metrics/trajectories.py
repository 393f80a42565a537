"""Metrics of training and evaluation: every trajectory counts once, whatever its number of rows. Pure functions.

Ranks exchange the figures of every trajectory and summarise those of all ranks: a mean of the ranks' means would be
wrong where only some trajectories have a value. docs/reference/metrics.md explains every key.
"""

import statistics
from collections.abc import Iterable, Sequence

from condensegrpo.core.figures import TrajectoryFigures
from condensegrpo.core.trajectory import Stop


def summarise(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    """The metrics of trajectories in any order, each counted once whatever its number of turns.

    docs/reference/metrics.md defines every key. Without trajectories the result is ``trajectories`` alone.
    """
    if not figures:
        return {"trajectories": 0.0}
    turn_rewards = [each.turn_reward for each in figures]
    attempts, successes = sum(each.tool_attempts for each in figures), sum(each.tool_successes for each in figures)
    return {
        "trajectories": float(len(figures)),
        "success": _mean(each.correct for each in figures),
        "reward": _mean(each.total for each in figures),
        "format_valid": _mean(each.format_valid for each in figures),
        "context_tokens": _mean(each.context_tokens for each in figures),
        "context_tokens_max": float(max(each.context_tokens for each in figures)),
        **({"picture_tokens": seen / len(figures)} if (seen := sum(each.picture_tokens for each in figures)) else {}),
        "prompt_tokens": _mean(each.prompt_tokens for each in figures),
        "prompt_tokens_uncached": _mean(each.prompt_tokens_uncached for each in figures),
        "calls": _mean(each.turns for each in figures),
        "turns": _mean(each.replies for each in figures),
        "output_tokens": _mean(each.output_tokens for each in figures),
        "condensations": _mean(each.condensations for each in figures),
        "seconds/trajectory": _mean(each.seconds for each in figures),
        **{f"stop/{stop.value}": _mean(each.stop is stop for each in figures) for stop in Stop},
        **({"turn_reward": _mean(turn_rewards)} if any(turn_rewards) else {}),
        **({"tool_calls": attempts / len(figures), "tool_calls_valid": successes / attempts} if attempts else {}),
        **({"tool_calls_abandoned": sum(each.tools_abandoned for each in figures) / attempts} if attempts else {}),
        **({"text_turns": texts / len(figures)} if (texts := sum(each.text_turns for each in figures)) else {}),
        **_information(figures),
        **_summaries(figures),
        **_drafts(figures),
        **{
            f"reward/{name}": _mean(each.components[name] for each in figures if name in each.components)
            for name in sorted({name for each in figures for name in each.components})
        },
    }


def multi_turn(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    """The metrics under the names of MT-GRPO (docs/reference/metrics.md); 0 without trajectories."""
    return {
        "train/turn_reward": _mean(each.turn_reward for each in figures) if figures else 0.0,
        "train/num_valid_actions": _mean(each.tool_successes for each in figures) if figures else 0.0,
        "train/accuracy": _mean(each.correct for each in figures) if figures else 0.0,
    }


def _information(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    last = [known[-1] for each in figures if (known := [value for value in each.information if value is not None])]
    lost = [each.information_lost for each in figures if each.information_lost is not None]
    if not last:
        return {}
    return {"answer_information": _mean(last), "answer_information_lost": _mean(lost)}


def _summaries(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    if not any(each.summaries or each.rejected for each in figures):
        return {}
    return {
        "summaries": _mean(each.summaries for each in figures),
        "summaries_rejected": _mean(each.rejected for each in figures),
        "summary_tokens_rejected": _mean(each.rejected_tokens for each in figures),
    }


def _drafts(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    last = [each.confidence for each in figures if each.confidence is not None]
    if not last:
        return {}
    return {
        "drafts": _mean(each.drafts for each in figures),
        "draft_tokens": _mean(each.draft_tokens for each in figures),
        "confidence": _mean(last),
    }


def _mean(values: Iterable[float]) -> float:
    """Rounded once, from the exact sum: the same to the bit in any order and from any number of ranks."""
    return statistics.fmean(values)
