"""The rewards ``xml_format`` and ``xml_tags``: whether replies keep to reasoning, then one call or answer."""

import re
from collections.abc import Callable
from statistics import fmean

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory

FIRST, SECOND = ("reasoning",), ("tool", "answer")  # the two sets of fields: a reply holds one of each


class XmlFormat:
    """The mean over all replies of how well each keeps to ``<reasoning>…</reasoning>`` and one more field.

    A reply earns 0.4·(sets of fields present)/2, the sets being reasoning, and tool or answer, if any field is whole;
    0.2 for its tags, which is what the published check of their spacing comes to; 0.2 if it starts with
    ``<reasoning>``; and 0.2 if it ends with ``</tool>`` or ``</answer>``. One without tags earns 0.

        <reasoning>a</reasoning> <answer>b</answer>  ─▶  1.0      <answer>b</answer>  ─▶  0.6      b  ─▶  0
    """

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        return _mean_over_replies("xml_format", _format_of, trajectory)


class XmlTags:
    """The mean over all replies of the share of tags that stand exactly once, of the fields that the reply names.

    A field that is not named at all does not count; a reply that names none earns 0.

        <reasoning>a</reasoning> <answer>b  ─▶  3 of 4 tags stand once: 0.75
    """

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        return _mean_over_replies("xml_tags", _tags_of, trajectory)


def _mean_over_replies(name: str, of: Callable[[str], float], trajectory: Trajectory) -> RewardResult:
    total = fmean(of(turn.reply.content) for turn in trajectory.turns) if trajectory.turns else 0.0
    return RewardResult(total=total, components={name: total}, correct=0.0)


def _format_of(reply: str) -> float:
    text = reply.strip()
    present = [any(_named(text, field) for field in fields) for fields in (FIRST, SECOND)]
    if not any(present):
        return 0.0
    closed = any(re.search(rf"<{field}>.*?</{field}>", text, re.DOTALL) for field in (*FIRST, *SECOND))
    starts = text.startswith(f"<{FIRST[0]}>")
    ends = text.endswith(tuple(f"</{field}>" for field in SECOND))
    return 0.4 * sum(present) / 2 * closed + 0.2 * (1 + starts + ends)


def _named(text: str, field: str) -> bool:
    return f"<{field}>" in text or f"</{field}>" in text


def _tags_of(reply: str) -> float:
    counts = [(reply.count(f"<{field}>"), reply.count(f"</{field}>")) for field in (*FIRST, *SECOND)]
    tags = [count for pair in counts if any(pair) for count in pair]
    return fmean(count == 1 for count in tags) if tags else 0.0
