"""Metrics of training and evaluation: every trajectory counts once, whatever its number of rows. Pure functions.

Ranks exchange the figures of every trajectory and summarise those of all ranks: a mean of the ranks' means would be
wrong where only some trajectories have a value. ``fmean`` rounds an exact sum once: it is the same to the bit in any
order and from any number of ranks. docs/reference/metrics.md explains every key.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from condensegrpo.core.messages import Message, recalled_turn
from condensegrpo.core.scored_trajectory import TrajectoryStats
from condensegrpo.core.trajectory import StopReason, Trajectory


def summarise(figures: Sequence[TrajectoryStats]) -> dict[str, float]:
    """The metrics of trajectories in any order, each counted once whatever its number of turns.

    docs/reference/metrics.md defines every key. Without trajectories the result is ``trajectories`` alone.
    """
    if not figures:
        return {"trajectories": 0.0}
    metrics = {
        "trajectories": float(len(figures)),
        "success": fmean(each.correct for each in figures),
        "reward": fmean(each.total for each in figures),
        "format_valid": fmean(each.format_valid for each in figures),
        "context_tokens": fmean(each.context_tokens for each in figures),
        "context_tokens_max": float(max(each.context_tokens for each in figures)),
    }
    if picture_tokens := sum(each.picture_tokens for each in figures):
        metrics["picture_tokens"] = picture_tokens / len(figures)
    metrics |= {
        "prompt_tokens": fmean(each.prompt_tokens for each in figures),
        "prompt_tokens_uncached": fmean(each.prompt_tokens_uncached for each in figures),
        "price": fmean(each.price for each in figures),
        "calls": fmean(each.turns for each in figures),
        "turns": fmean(each.replies for each in figures),
        "output_tokens": fmean(each.output_tokens for each in figures),
        "condensations": fmean(each.condensations for each in figures),
        "seconds/trajectory": fmean(each.seconds for each in figures),
        **{f"stop/{stop.value}": fmean(each.stop is stop for each in figures) for stop in StopReason},
    }
    if any(each.turn_reward for each in figures):
        metrics["turn_reward"] = fmean(each.turn_reward for each in figures)
    if attempts := sum(each.tool_attempts for each in figures):
        metrics["tool_calls"] = attempts / len(figures)
        metrics["tool_calls_valid"] = sum(each.tool_successes for each in figures) / attempts
        metrics["tool_calls_abandoned"] = sum(each.tools_abandoned for each in figures) / attempts
    if text_turns := sum(each.text_turns for each in figures):
        metrics["text_turns"] = text_turns / len(figures)
    known = [[value for value in each.information if value is not None] for each in figures]
    if any(known):
        lost = [each.information_lost for each in figures if each.information_lost is not None]
        metrics["answer_information"] = fmean(values[-1] for values in known if values)
        metrics["answer_information_lost"] = fmean(lost)
    if any(each.summaries or each.rejected for each in figures):
        metrics["summaries"] = fmean(each.summaries for each in figures)
        metrics["summaries_rejected"] = fmean(each.rejected for each in figures)
        metrics["summary_tokens_rejected"] = fmean(each.rejected_tokens for each in figures)
    confidences = [each.confidence for each in figures if each.confidence is not None]
    if confidences:
        metrics["drafts"] = fmean(each.drafts for each in figures)
        metrics["draft_tokens"] = fmean(each.draft_tokens for each in figures)
        metrics["confidence"] = fmean(confidences)
    for name in sorted({name for each in figures for name in each.components}):
        metrics[f"reward/{name}"] = fmean(each.components[name] for each in figures if name in each.components)
    return metrics


def mt_grpo_metrics(figures: Sequence[TrajectoryStats]) -> dict[str, float]:
    """The metrics under the names of MT-GRPO (docs/reference/metrics.md); 0 without trajectories."""
    return {
        "train/turn_reward": fmean(each.turn_reward for each in figures) if figures else 0.0,
        "train/num_valid_actions": fmean(each.tool_successes for each in figures) if figures else 0.0,
        "train/accuracy": fmean(each.correct for each in figures) if figures else 0.0,
    }


class Fetches(NamedTuple):
    """The calls of a trajectory that tools, or an environment as one, answered."""

    calls: int
    refetches: int  # those that ask once more for what no result in sight holds

    @property
    def rate(self) -> float:
        """Re-fetches as a share of the calls; 0 of none."""
        return self.refetches / self.calls if self.calls else 0.0


def fetches(trajectory: Trajectory) -> Fetches:
    """Count them. A call is what a reply asks for: tool and arguments, or the reply itself where it has no parsed call.

    Calls that got no tool result (a message with ``tool_call_id``) do not count. Its result is in sight where a message
    of the turn's context equals it, so that one that was masked or summarised is gone.

    turn 2   <read> p3 </read>   ─▶   p3 red 7        called for the first time
    turn 6   …                        turn 2 is no longer shown
    turn 8   <read> p3 </read>   ─▶   p3 red 7        the same call, its result gone: a re-fetch
    turn 9   <read> p3 </read>   ─▶   p3 red 7        the same call, its result in sight: a repetition and no re-fetch
    turn 9   recall(2)           ─▶   p3 red 7        the tool of the condenser ``recall``: always a re-fetch
    """
    answered: dict[tuple[str, ...], set[Message]] = {}
    calls = refetched = 0
    for turn in trajectory.turns:
        results = {message for message in turn.observations if message.tool_call_id is not None}
        if not results:
            continue
        recalled = {result.tool_call_id for result in results if recalled_turn(result) is not None}
        made: list[tuple[tuple[str, ...], bool]] = [  # what is called, and whether it recalls
            ((call.name, call.arguments), call.id in recalled) for call in turn.reply.tool_calls
        ]
        for call, recalls in made or [((turn.reply.text.strip(),), False)]:
            calls += 1
            earlier = answered.setdefault(call, set())
            out_of_sight = bool(earlier) and earlier.isdisjoint(turn.context)
            refetched += recalls or out_of_sight
            earlier |= results
    return Fetches(calls, refetched)
