"""Rewards of the form of replies: ``format``, and three for sequences of tagged fields, ``xml_format`` first.

The three call no answer correct: used alone, the success rate is 0. In ``weighted_sum`` a part that judges decides.

``fields`` are sets of tags: a reply holds one field of each set, in their order. By default it reasons, and then calls
a tool or answers; for code it is ``[[reasoning], [code, answer]]``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from annotated_types import Ge, MinLen

from condensegrpo.core.protocols.reward import RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.toolformats import transcript
from condensegrpo.rewards.outcome import JudgingReward, judge_trajectory

Fields = Annotated[Sequence[Annotated[Sequence[str], MinLen(1)]], MinLen(1)]  # names of tags
REASON_THEN_ACT = (("reasoning",), ("tool", "answer"))


@dataclass(kw_only=True, eq=False)
class Format(JudgingReward):
    """1 for a trajectory that ended with an answer and has no blank reply, else 0.

    Whether the answer is right is reported, not paid; a problem without ground truth is then an error, unless
    ``match`` is None.
    """

    min_reply_chars: Annotated[int, Ge(1)] = 1

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        verdict = judge_trajectory(trajectory, problem, self._matcher, min_reply_chars=self.min_reply_chars)
        return verdict.result("format", float(verdict.format_valid))


@dataclass(kw_only=True, eq=False)
class _MeanOverReplies:
    """The mean of ``_score`` over all replies of a trajectory, texts for a condenser excluded; 0 without a reply."""

    fields: Fields = REASON_THEN_ACT
    _name = ""  # of the component

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        replies = [transcript(turn.reply).strip() for turn in trajectory.turns if turn.kind == "act"]
        total = fmean(map(self._score, replies)) if replies else 0.0
        return RewardResult(total=total, components={self._name: total}, correct=0.0)

    def _score(self, reply: str) -> float:
        raise NotImplementedError


class XmlFormat(_MeanOverReplies):
    """The mean over all replies of how well each keeps to one field of every set.

    A reply earns 0.4·(sets of which it names a field)/(sets) if any field is whole; 0.2 for its tags, which is what
    the published check of their spacing comes to; 0.2 if it starts with a tag of the first set; and 0.2 if it ends
    with a tag of the last set. One without tags earns 0.

        <reasoning>a</reasoning> <answer>b</answer>  ─▶  1.0      <answer>b</answer>  ─▶  0.6      b  ─▶  0
    """

    _name = "xml_format"

    def _score(self, reply: str) -> float:
        present = sum(any(_named(reply, field) for field in fields) for fields in self.fields)
        if not present:
            return 0.0
        closed = any(_content(reply, field) is not None for fields in self.fields for field in fields)
        starts, ends = _ends(reply, self.fields)
        return 0.4 * present / len(self.fields) * closed + 0.2 * (1 + starts + ends)


class XmlFormatAws(_MeanOverReplies):
    """The format reward of the AWS sample: ``xml_format`` without the share for spacing.

    A reply earns 0.4·(sets of which a field is whole and not blank)/(sets), 0.3 if it starts with a tag of the first
    set, and 0.3 if it ends with a tag of the last set.

        <reasoning>a</reasoning> <answer>b</answer>  ─▶  1.0      <answer>b</answer>  ─▶  0.5      <answer>b  ─▶  0
    """

    _name = "xml_format_aws"

    def _score(self, reply: str) -> float:
        present = sum(any((_content(reply, field) or "").strip() for field in fields) for fields in self.fields)
        starts, ends = _ends(reply, self.fields)
        return 0.4 * present / len(self.fields) + 0.3 * (starts + ends)


class XmlTags(_MeanOverReplies):
    """The mean over all replies of the share of tags that stand exactly once, of the fields that the reply names.

    A field that is not named at all does not count; a reply that names none earns 0.

        <reasoning>a</reasoning> <answer>b  ─▶  3 of 4 tags stand once: 0.75
    """

    _name = "xml_tags"

    def _score(self, reply: str) -> float:
        names = [field for fields in self.fields for field in fields if _named(reply, field)]
        tags = [reply.count(tag) for field in names for tag in (f"<{field}>", f"</{field}>")]
        return fmean(count == 1 for count in tags) if tags else 0.0


def _named(reply: str, field: str) -> bool:
    return f"<{field}>" in reply or f"</{field}>" in reply


def _content(reply: str, field: str) -> str | None:
    """The content of the first whole field of this name; None: there is none."""
    match = re.search(rf"<{re.escape(field)}>(.*?)</{re.escape(field)}>", reply, re.DOTALL)
    return match[1] if match else None


def _ends(reply: str, sets: Fields) -> tuple[bool, bool]:
    """Whether a reply starts with a tag of the first set, and ends with one of the last."""
    first, last = (tuple(f"<{field}>" for field in sets[0]), tuple(f"</{field}>" for field in sets[-1]))
    return reply.startswith(first), reply.endswith(last)
