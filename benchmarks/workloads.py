"""Training rows for benchmarks: seeded trajectories of random tokens, credited and cut into rows as in training.

    P questions × n trajectories × K turns;   a unit is an output and the observation that answers it

    condensed   context of turn t = question + the newest unit, as last_k(keep_last=1) shows it; turn 1 still has all
    append      context of turn t = question + every unit so far: each context continues the last

Trajectories of a question share its tokens and nothing else but chance.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor

from condensegrpo.algorithms.credit import Estimator, rows_of, scores_of, turn_tokens
from condensegrpo.algorithms.objective import token_weights, totals
from condensegrpo.algorithms.outcome_estimators import grpo
from condensegrpo.algorithms.prefix_tree import distinct_tokens
from condensegrpo.algorithms.segments import segments
from condensegrpo.core.messages import Message
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Condensation, Score, Segment, Span, SpanStatus, StopReason, Trajectory, Turn


class Kind(StrEnum):
    """How the context of a turn comes about."""

    CONDENSED = "condensed"  # rewritten before every turn
    APPEND = "append"  # grows


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How many tokens things have; ranges are inclusive."""

    question: tuple[int, int]  # uniform
    observation: tuple[int, int]  # uniform
    output: int  # median of a log-normal
    spread: float = 0.7  # standard deviation of the output's logarithm
    shortest: int  # output
    context: int  # the largest; an output is cut short where the next context would be larger


LENGTHS = {
    Kind.CONDENSED: Lengths(question=(96, 192), observation=(16, 256), output=64, shortest=8, context=512),
    Kind.APPEND: Lengths(question=(96, 192), observation=(4, 12), output=64, shortest=8, context=512),
}
QUICK_LENGTHS = {
    Kind.CONDENSED: Lengths(question=(12, 24), observation=(4, 16), output=8, shortest=2, context=64),
    Kind.APPEND: Lengths(question=(12, 24), observation=(1, 2), output=8, shortest=2, context=64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The rows of one optimiser step, in two cuts of the same tokens: loss and gradient are equal."""

    rows: tuple[Segment, ...]  # as ``segments`` makes them: turns that continue each other in one row
    apart: tuple[Segment, ...]  # a row of its own for every turn

    @property
    def trained(self) -> int:
        """Trained tokens."""
        return sum(row.trained for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of all rows, shared ones counted for every row."""
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def distinct(self) -> int:
        """Tokens of all rows, shared ones counted once."""
        return distinct_tokens([row.token_ids for row in self.rows])


def workload(
    kind: Kind, lengths: Lengths, *, questions: int, vocabulary: int, seed: int, samples: int = 8, turns: int = 6
) -> Workload:
    """Rows with advantages by ``grpo`` (half of each group is right) and weights by ``trajectory_constant``."""
    draw = random.Random(seed)
    scored = []
    for question in range(questions):
        asked = _ids(draw, draw.randint(*lengths.question), vocabulary)
        for sample in range(samples):
            trajectory = _trajectory(draw, kind, lengths, asked, f"q{question}", sample, turns, vocabulary)
            scored.append(_scored(trajectory, right=sample % 2 == 0))
    scores = scores_of(scored)
    tokens_NK = turn_tokens(scored)
    advantage_NK = Estimator(grpo)(scores).advantage_NK
    weight_NK = token_weights(
        "trajectory_constant",
        tokens_NK,
        totals=totals(tokens_NK, scores.turns_N),
        max_tokens=turns * 2 * lengths.output,
    )
    return Workload(rows=rows_of(scored, advantage_NK, weight_NK), apart=_turns_apart(scored, advantage_NK, weight_NK))


def _turns_apart(scored: Sequence[ScoredTrajectory], advantage_NK: Tensor, weight_NK: Tensor) -> tuple[Segment, ...]:
    return tuple(
        row
        for trained, advantages, weights in zip(scored, advantage_NK.tolist(), weight_NK.tolist(), strict=True)
        for turn, advantage, weight in zip(trained.trajectory.turns, advantages, weights, strict=True)
        for row in segments(replace(trained.trajectory, turns=(turn,)), advantage_K=[advantage], weight_K=[weight])
    )


def _trajectory(
    draw: random.Random,
    kind: Kind,
    lengths: Lengths,
    question: tuple[int, ...],
    group: str,
    sample: int,
    turns: int,
    vocabulary: int,
) -> Trajectory:
    units: list[tuple[int, ...]] = []
    done: list[Turn] = []
    for index in range(turns):
        kept = units if kind is Kind.APPEND else units[-1:]
        prompt = (*question, *(token for unit in kept for token in unit))
        observation = _ids(draw, draw.randint(*lengths.observation), vocabulary)
        room = _room(kind, lengths, len(question), len(prompt), len(observation), turns - index - 1)
        drawn = round(lengths.output * math.exp(draw.gauss(0.0, lengths.spread)))
        output = _ids(draw, max(lengths.shortest, min(drawn, room)), vocabulary)
        done.append(_turn(prompt, output, _declared(len(question), units, len(kept), len(prompt))))
        units.append((*output, *observation))
    return Trajectory(
        id=f"{group}/{sample}",
        problem_id=group,
        group_id=group,
        sample=sample,
        turns=tuple(done),
        stop=StopReason.ANSWERED,
        answer="",
        seconds=0.0,
    )


def _room(kind: Kind, lengths: Lengths, question: int, prompt: int, observation: int, later: int) -> int:
    """The largest output after which later contexts fit: the next one, or all that this one grows into."""
    if later == 0:
        return lengths.context  # no context follows
    if kind is Kind.CONDENSED:
        return lengths.context - question - observation
    reserved = (later - 1) * (lengths.shortest + lengths.observation[1])
    return lengths.context - prompt - observation - reserved


def _declared(question: int, units: Sequence[tuple[int, ...]], kept: int, prompt: int) -> Condensation | None:
    if kept == len(units):
        return None
    return Condensation(
        condenser="last_k",
        reason=f"kept {kept} of {len(units)} units",
        tokens_before=question + sum(map(len, units)),
        tokens_after=prompt,
        spans=tuple(
            Span(first=first, last=end - 1, units=end - first, status=status, tokens=sum(map(len, units[first:end])))
            for first, end, status in (
                (0, len(units) - kept, SpanStatus.DROPPED),
                (len(units) - kept, len(units), SpanStatus.KEPT),
            )
            if end > first
        ),
    )


def _turn(prompt: tuple[int, ...], output: tuple[int, ...], condensation: Condensation | None) -> Turn:
    return Turn(
        prompt_ids=prompt,
        output_ids=output,
        logprobs=(-1.0,) * len(output),  # ratios are taken against the learner's own
        policy_version=0,
        condensation=condensation,
        context=(),
        reply=Message(role="assistant", content=""),
    )


def _scored(trajectory: Trajectory, *, right: bool) -> ScoredTrajectory:
    return ScoredTrajectory.of(
        trajectory,
        Score(
            total=float(right),
            components={"correct": float(right)},
            format_valid=True,
            correct=float(right),
            context_tokens=trajectory.max_context_tokens,
        ),
    )


def _ids(draw: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    """Random tokens; whatever the vocabulary, they take as much chance, so that lengths do not depend on it."""
    return tuple(int(draw.random() * vocabulary) for _ in range(count))
