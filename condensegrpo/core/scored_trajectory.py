"""A trajectory with its score and figures: what sampling and scoring hand to training, evaluation and storage.

Metrics, the console, the tables of trackers, the inspector, the report and DataFrames take a figure from here; only
what needs texts or contexts reads the trajectory. A new figure is a field of ``TrajectoryStats``, its computation in
``figures_of``, and a line in the table that shows it. Standard library only.

Information of contexts about the answer: I_t = log π(ground truth | c_t) in nats, ``Turn.answer_logprob``; None where
it was not measured.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import fmean
from typing import NamedTuple, Self

from condensegrpo.core.trajectory import Score, SpanStatus, StopReason, Trajectory


class InformationChange(NamedTuple):
    """The information about the answer before and after a condensation."""

    turn: int  # whose context was condensed
    before: float  # I of the last context that was measured
    after: float  # I of this one
    dropped: tuple[int, ...]  # turns that the context before showed verbatim and this one does not

    @property
    def description(self) -> str:
        """One sentence, such as: information about the answer fell from −1.2 to −9.7 nats when turn 3 was dropped."""
        before, after = (f"{nats:.1f}" for nats in (self.before, self.after))
        course = f"{'fell' if self.after < self.before else 'rose'} from {before} to {after} nats"
        if before == after:
            course = f"stayed at {after} nats"
        cause = f"turn {self.turn} was condensed"
        if self.dropped:
            numbers = ", ".join(map(str, self.dropped))
            cause = f"turn {numbers} was dropped" if len(self.dropped) == 1 else f"turns {numbers} were dropped"
        return f"information about the answer {course} when {cause}".replace("-", "−")


def information_changes(trajectory: Trajectory) -> tuple[InformationChange, ...]:
    """Every measured condensed context after another measured context."""
    result: list[InformationChange] = []
    before: float | None = None
    shown = set[int]()  # turns that the last context showed verbatim
    units = set[int]()  # turns in which the policy acted before
    for number, turn in enumerate(trajectory.turns):
        if turn.kind != "act":
            continue
        spans = turn.condensation.spans if turn.condensation is not None else ()
        kept = {each for span in spans if span.status is SpanStatus.KEPT for each in span.turns}
        if before is not None and turn.answer_logprob is not None and spans:
            result.append(InformationChange(number, before, turn.answer_logprob, tuple(sorted(shown - kept))))
        before = before if turn.answer_logprob is None else turn.answer_logprob
        shown = (units & kept if spans else shown) | {number}
        units |= {number}
    return tuple(result)


def information_lost(trajectory: Trajectory) -> float | None:
    """Nats lost by condensations, gains excluded: Σ max(before − after, 0). None: nothing was measured."""
    if all(turn.answer_logprob is None for turn in trajectory.turns):
        return None
    return math.fsum(max(change.before - change.after, 0.0) for change in information_changes(trajectory))


def mean_curve(curves: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    """The mean of each turn over the trajectories that got there and measured it.

    (−2, −4), (−4, −6, −1)   ─▶   −3, −5, −1
    """
    columns = [[value for value in column if value is not None] for column in zip_longest(*curves)]
    return tuple(fmean(column) if column else None for column in columns)


CACHED, WRITTEN = 0.1, 4.0  # price of a token read from a prefix cache, and of a sampled one; 1: read uncached
# stops because a token budget was used up
TRUNCATED = frozenset({StopReason.OUTPUT_LENGTH, StopReason.CONTEXT_OVERFLOW})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStats:
    """The figures of one scored trajectory: some hundred bytes when pickled, whatever its length."""

    id: str
    problem_id: str
    group_id: str
    sample: int
    stop: StopReason
    truncated: bool  # it stopped because a token budget was used up
    seconds: float
    total: float  # R^O, of its score
    components: Mapping[str, float]  # of its score
    turn_reward: float  # R^T: what environment and reward functions pay single turns
    correct: float  # in [0, 1]
    format_valid: bool
    context_tokens: int  # of the largest prompt
    prompt_tokens: int  # of the prompts of all turns: what is read if nothing is cached
    prompt_tokens_uncached: int  # of these, those that the prompt of the turn before does not begin with
    output_tokens: int  # sampled in all turns, condense turns among them
    turns: int
    replies: int  # turns in which the policy acted
    summaries: int  # turns in which it wrote a text that a condenser used
    condensations: int  # turns whose prompt was condensed
    rejected: int  # texts that it wrote for a condenser and that were not used
    rejected_tokens: int  # of these texts
    tool_attempts: int  # calls that it wrote, malformed ones included
    tool_successes: int  # of these, calls that a tool answered without an error
    tool_errors: int  # of these, the others
    tools_abandoned: int  # of these, calls that exceeded their time limit
    drafts: int  # of its answer, the one that was taken included
    draft_tokens: int  # of those that were not taken
    confidence: float | None  # probability of the last draft; None: there was none
    information: tuple[float | None, ...]  # (K,) nats, I of every turn; None: not measured
    information_lost: float | None  # nats; None: nothing was measured
    lost_fact: bool  # not correct; the ground truth stood in an earlier prompt, and is not in the last
    picture_tokens: int = 0  # of context_tokens, those that stand for pictures; of the first of equally large prompts
    text_turns: int = 0  # turns whose sampler returned a text, see Turn.is_text
    judged: bool = True  # False: no reward saw it, as in runs of the proxy; ``total`` and ``correct`` say nothing

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that a prefix cache answers."""
        return self.prompt_tokens - self.prompt_tokens_uncached

    @property
    def sampled_tokens(self) -> int:
        """Sampled in all turns, in rejected texts and in drafts that were not taken."""
        return self.output_tokens + self.rejected_tokens + self.draft_tokens

    @property
    def price(self) -> float:
        """The cost of the calls, in tokens read uncached: one from a prefix cache costs 0.1, a sampled one 4.

        Rejected texts and drafts cost what was sampled, without their prompts.

        Prompts of 100 and 150 tokens, the second continuing the first, 20 tokens sampled in each:
        150 + 0.1 · 100 + 4 · 40 = 320.
        """
        return price(self.prompt_tokens, self.prompt_tokens_uncached, self.sampled_tokens)


def price(read: int, uncached: int, *sampled: int) -> float:
    """See ``TrajectoryStats.price``."""
    return uncached + CACHED * (read - uncached) + WRITTEN * sum(sampled)


def figures_of(trajectory: Trajectory, score: Score) -> TrajectoryStats:
    """The figures of a trajectory and its score.

    R^T = Σ Score.turn_rewards + Σ Turn.turn_rewards:

        turn 0: hint 0.5; the score pays 0.2 and 0   ─▶   R^T = 0.7
    """
    turns = trajectory.turns
    prompts = [turn.prompt_ids for turn in turns]
    paid = [value for turn in turns for value in turn.turn_rewards.values()]
    attempts, successes = sum(turn.tool_attempts for turn in turns), sum(turn.tool_successes for turn in turns)
    drafts = [turn.draft for turn in turns if turn.draft is not None]
    not_taken = drafts[:-1] if trajectory.stop is StopReason.CONFIDENT else drafts
    return TrajectoryStats(
        id=trajectory.id,
        problem_id=trajectory.problem_id,
        group_id=trajectory.group_id,
        sample=trajectory.sample,
        stop=trajectory.stop,
        truncated=trajectory.stop in TRUNCATED,
        seconds=trajectory.seconds,
        total=score.total,
        components=dict(score.components),  # other mappings may not pickle
        turn_reward=math.fsum([*paid, *score.turn_rewards]),
        correct=score.correct,
        format_valid=score.format_valid,
        context_tokens=score.context_tokens,
        prompt_tokens=sum(map(len, prompts)),
        prompt_tokens_uncached=sum(map(len, prompts)) - sum(turn.cached_ids(last) for last, turn in pairwise(turns)),
        output_tokens=trajectory.output_tokens,
        turns=len(turns),
        replies=trajectory.replies,
        summaries=len(turns) - trajectory.replies,
        condensations=sum(turn.condensation is not None for turn in turns),
        rejected=len(trajectory.rejected),
        rejected_tokens=sum(len(text.output_ids) for text in trajectory.rejected),
        tool_attempts=attempts,
        tool_successes=successes,
        tool_errors=attempts - successes,
        tools_abandoned=sum(turn.tools_abandoned for turn in turns),
        drafts=len(drafts),
        draft_tokens=sum(draft.tokens for draft in not_taken),
        confidence=drafts[-1].probability if drafts else None,
        information=tuple(turn.answer_logprob for turn in turns),
        information_lost=information_lost(trajectory),
        lost_fact=score.judged and score.correct < 1 and _lost_fact(trajectory),
        picture_tokens=max(turns, key=lambda turn: len(turn.prompt_ids)).picture_tokens if turns else 0,
        text_turns=sum(turn.is_text for turn in turns),
        judged=score.judged,
    )


def _lost_fact(trajectory: Trajectory) -> bool:
    """Whether the ground truth stood in an earlier prompt, and is not in the last one in which the policy acted.

    It stood there in a message of another role: what the policy computes may stand in its reply by chance.
    """
    fact, contexts = trajectory.ground_truth, [turn.context for turn in trajectory.turns if turn.kind == "act"]
    if not fact or not contexts:
        return False
    last = {id(message): message for message in contexts[-1]}
    if any(holds(fact, message.text) for message in last.values()):
        return False
    earlier = {id(message): message for context in contexts[:-1] for message in context if id(message) not in last}
    return any(message.role != "assistant" and holds(fact, message.text) for message in earlier.values())


def holds(fact: str, text: str) -> bool:
    """Whether a fact stands in a text by itself, in letters of either case: 7 in "it is 7.", not in 17, +7 or 7.5."""
    literal = re.escape(fact)  # first: what stands before it is compared where it was found, not at every letter
    alone = rf"{literal}(?<![\w+−-]{literal})(?<!\d[.,]{literal})(?!\w|[.,]\d)"
    return re.search(alone, text, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory, its score, and the record of its figures."""

    trajectory: Trajectory
    score: Score
    figures: TrajectoryStats  # of both

    @classmethod
    def of(cls, trajectory: Trajectory, score: Score) -> Self:
        """A trajectory that was scored just now."""
        return cls(trajectory=trajectory, score=score, figures=figures_of(trajectory, score))
