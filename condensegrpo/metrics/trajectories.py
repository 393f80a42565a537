"""Metrics of training and evaluation: every trajectory counts once, whatever its number of rows. Pure functions.

Ranks exchange the figures of every trajectory and summarise those of all ranks: a mean of the ranks' means would be
wrong where only some trajectories have a value. ``fmean`` rounds an exact sum once: it is the same to the bit in any
order and from any number of ranks. docs/reference/metrics.md explains every key.
"""

from collections.abc import Sequence
from statistics import fmean

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
        "success": fmean(each.correct for each in figures),
        "reward": fmean(each.total for each in figures),
        "format_valid": fmean(each.format_valid for each in figures),
        "context_tokens": fmean(each.context_tokens for each in figures),
        "context_tokens_max": float(max(each.context_tokens for each in figures)),
        **({"picture_tokens": seen / len(figures)} if (seen := sum(each.picture_tokens for each in figures)) else {}),
        "prompt_tokens": fmean(each.prompt_tokens for each in figures),
        "prompt_tokens_uncached": fmean(each.prompt_tokens_uncached for each in figures),
        "calls": fmean(each.turns for each in figures),
        "turns": fmean(each.replies for each in figures),
        "output_tokens": fmean(each.output_tokens for each in figures),
        "condensations": fmean(each.condensations for each in figures),
        "seconds/trajectory": fmean(each.seconds for each in figures),
        **{f"stop/{stop.value}": fmean(each.stop is stop for each in figures) for stop in Stop},
        **({"turn_reward": fmean(turn_rewards)} if any(turn_rewards) else {}),
        **({"tool_calls": attempts / len(figures), "tool_calls_valid": successes / attempts} if attempts else {}),
        **({"tool_calls_abandoned": sum(each.tools_abandoned for each in figures) / attempts} if attempts else {}),
        **({"text_turns": texts / len(figures)} if (texts := sum(each.text_turns for each in figures)) else {}),
        **_information(figures),
        **_summaries(figures),
        **_drafts(figures),
        **{
            f"reward/{name}": fmean(each.components[name] for each in figures if name in each.components)
            for name in sorted({name for each in figures for name in each.components})
        },
    }


def multi_turn(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    """The metrics under the names of MT-GRPO (docs/reference/metrics.md); 0 without trajectories."""
    return {
        "train/turn_reward": fmean(each.turn_reward for each in figures) if figures else 0.0,
        "train/num_valid_actions": fmean(each.tool_successes for each in figures) if figures else 0.0,
        "train/accuracy": fmean(each.correct for each in figures) if figures else 0.0,
    }


def _information(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    last = [known[-1] for each in figures if (known := [value for value in each.information if value is not None])]
    lost = [each.information_lost for each in figures if each.information_lost is not None]
    if not last:
        return {}
    return {"answer_information": fmean(last), "answer_information_lost": fmean(lost)}


def _summaries(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    if not any(each.summaries or each.rejected for each in figures):
        return {}
    return {
        "summaries": fmean(each.summaries for each in figures),
        "summaries_rejected": fmean(each.rejected for each in figures),
        "summary_tokens_rejected": fmean(each.rejected_tokens for each in figures),
    }


def _drafts(figures: Sequence[TrajectoryFigures]) -> dict[str, float]:
    last = [each.confidence for each in figures if each.confidence is not None]
    if not last:
        return {}
    return {
        "drafts": fmean(each.drafts for each in figures),
        "draft_tokens": fmean(each.draft_tokens for each in figures),
        "confidence": fmean(last),
    }
