"""Why a turn was trained as it was: reward parts, score, advantage and weight, with the formulas filled in.

    score      correct 1   short 0.05                                          1
    group      8 trajectories: mean 0.375, deviation 0.518
    N(R)       (R − mean) / (deviation + ε) = (1 − 0.375) / (0.518 + 1e-06)    +1.207
    λ·g(p)·E   0.2 · 0.375 · 0.61                                              +0.046
    advantage  N(R) + λ·g(p)·E                                                 +1.253
    weight     1 / (B·L) = 1 / (96 · 256)                                      4.07e-05

What was recorded is what counts: a formula is filled in from the figures of the siblings, and where its value is not
what was recorded (as after whitening), the line of the advantage says so.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from condensegrpo.algorithms.explained import EXPLAINED, Case, GroupMember
from condensegrpo.algorithms.names import ESTIMATORS
from condensegrpo.algorithms.turn_facts import act_turns, prompt_digests, turn_sums
from condensegrpo.core.wording import counted
from condensegrpo.inspection.batches import TrajectoryBatch, config_of
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.panes import TurnView
from condensegrpo.inspection.records import Group, TrajectoryRecord

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

NOT_TRAINED = {"mask": "masked: its stop trains nothing", "drop": "dropped: no member of its group has an advantage"}
EXACT = 1e-3  # difference of a formula from what was recorded that rounding explains


class CreditLine(NamedTuple):
    """One step from reward to weight."""

    name: str
    formula: str  # filled in
    value: str


class CreditFormulas:
    """The steps from reward to weight of the turns of one batch."""

    def __init__(self, index: Index, batch: TrajectoryBatch) -> None:
        self._index, self._batch = index, batch
        self._group: Group | None = None
        self._members: dict[str, GroupMember] = {}  # of that group, by trajectory
        self._turns: dict[str, list[int]] = {}  # likewise: the act turn whose advantage each turn has

    @cached_property
    def _config(self) -> "RunConfig | None":
        """Of the batch; without one there are no formulas. Read when it is needed: the first screen shows no credit."""
        return config_of(self._batch)

    def lines(self, record: TrajectoryRecord, group: Group, turn: TurnView) -> tuple[CreditLine, ...]:
        """The steps from the reward to the weight of a turn's tokens.

        Raises:
            CondenseError: the line of a sibling is damaged.
        """
        return (
            *_reward(record, turn),
            *self._advantage(record, group, turn),
            *_weight(record, turn, self._config),
        )

    def _advantage(self, record: TrajectoryRecord, group: Group, turn: TurnView) -> Iterator[CreditLine]:
        if turn.advantage is None:
            yield CreditLine("advantage", "the run's credit/ has none of this trajectory", "not known")
            return
        config, recorded = self._config, f"{turn.advantage:+.4g}"
        if record.handling in NOT_TRAINED or config is None:
            reason = "without a formula: the configuration of the run cannot be read"
            yield CreditLine("advantage", NOT_TRAINED.get(record.handling or "", reason), recorded)
            return
        case = self._case(record, group, turn.turn, config)
        rewards = "  ".join(f"{member.outcome:.4g}" for member in case.members)
        yield CreditLine("group", f"{counted(len(case.members), 'trajectory', 'trajectories')}, R = {rewards}", "")
        terms = EXPLAINED[config.estimator](case, **config.estimator_options)
        for term in terms:
            yield CreditLine(term.name, term.filled, f"{term.value:+.4g}")
        total, note = math.fsum(term.value for term in terms), ""
        if config.algorithm.advantage.whiten:
            note = "; whitened afterwards, by mean and deviation of all trained tokens of the step, which no file holds"
        elif not math.isclose(total, turn.advantage, rel_tol=EXACT, abs_tol=EXACT):
            note = f"; these give {total:+.4g}: it was computed with other settings, or by another version"
        yield CreditLine("advantage", f"{config.estimator}: {' + '.join(term.name for term in terms)}{note}", recorded)

    def _case(self, record: TrajectoryRecord, group: Group, turn: int, config: "RunConfig") -> Case:
        """The turn among those that the estimator compared: masked siblings count nowhere."""
        compared = [sibling for sibling in group.siblings if sibling.handling != "mask"]
        if self._group != group:
            self._members, self._turns, self._group = {}, {}, group
            for sibling in compared:
                scored = self._index.read(sibling)
                sums = turn_sums(scored)
                self._turns[sibling.id] = act_turns(scored.trajectory)
                self._members[sibling.id] = GroupMember(
                    outcome=_outcome(sibling, config),
                    turn_reward=sums.total,
                    turns=scored.trajectory.replies,
                    result_turn=sums.result_turn,
                    context=sibling.context,
                    truncated=sibling.truncated,
                    states=tuple(prompt_digests(scored.trajectory)),
                )
        place = [sibling.id for sibling in compared].index(record.id)
        return Case(tuple(self._members.values()), place, self._turns[record.id][turn])


def _reward(record: TrajectoryRecord, turn: TurnView) -> Iterator[CreditLine]:
    parts = "   ".join(f"{name} {value:.4g}" for name, value in record.components.items())
    yield CreditLine("score", parts, f"{record.score:.4g}")
    paid = {**turn.turn_rewards} | ({"of the turn": turn.paid} if turn.paid is not None else {})
    if paid:
        yield CreditLine("turn reward", "   ".join(f"{name} {value:.4g}" for name, value in paid.items()), "")


def _weight(record: TrajectoryRecord, turn: TurnView, config: "RunConfig | None") -> Iterator[CreditLine]:
    if turn.weight is None:
        return
    value = f"{turn.weight:.4g} a token" if turn.weight else "0: not trained"
    if config is None or not turn.weight:
        yield CreditLine("weight", "", value)
        return
    mode, limits = config.algorithm.aggregation.mode, config.rollout.limits
    length = config.algorithm.aggregation.max_tokens or limits.max_turns * limits.max_output_tokens
    known = {
        "trajectory_constant": length,
        "trajectory_mean": record.output,
        "token_mean": 1,
        "turn_mean": turn.output_tokens,
    }
    counted = 1 / (turn.weight * max(known[mode], 1))
    filled = {
        "trajectory_constant": f"1 / (B·L) = 1 / ({counted:.4g} trajectories · {length} tokens)",
        "trajectory_mean": f"1 / (B·N) = 1 / ({counted:.4g} trajectories · {record.output} tokens of this one)",
        "token_mean": f"1 / ΣN = 1 / {counted:.4g} tokens of the batch",
        "turn_mean": f"1 / (ΣK·n) = 1 / ({counted:.4g} turns of the batch · {turn.output_tokens} tokens of this one)",
    }[mode]
    yield CreditLine("weight", f"{mode}: {filled}", value)


def _outcome(record: TrajectoryRecord, config: "RunConfig") -> float:
    """What the estimator compares: the total reward less penalties, or a score."""
    if record.handling != "penalise":
        return record.score
    return 0.0 if ESTIMATORS[config.estimator].learns_from == "score" else record.score - config.algorithm.stops.penalty
