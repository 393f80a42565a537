"""Why a turn was trained as it was: reward parts, score, advantage and weight, with the formulas filled in.

    score      correct 1   short 0.05                                          1
    group      8 trajectories: mean 0.375, deviation 0.518
    N(r)       (r − mean) / (deviation + ε) = (1 − 0.375) / (0.518 + 1e-06)    +1.207
    λ·g(p)·E   0.2 · 0.375 · 0.61                                              +0.046
    advantage  N(r) + λ·g(p)·E                                                 +1.253
    weight     1 / (B·L) = 1 / (96 · 256)                                      4.07e-05

What was recorded is what counts: a formula is filled in from the figures of the siblings, and where its value is not
what was recorded (as after whitening), the line of the advantage says so.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from condensegrpo.algorithms.names import ESTIMATORS
from condensegrpo.inspection.panes import TurnView
from condensegrpo.inspection.records import Group, TrajectoryRecord

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

STANDARD = ("grpo", "efficient", "turn_discounted", "gigpo")  # estimators whose first term is N(r)
EPSILON = 1e-6  # of these, where none is configured
NOT_TRAINED = {"mask": "masked: its stop trains nothing", "drop": "dropped: no member of its group has an advantage"}
EXACT = 1e-3  # difference of a formula from what was recorded that rounding explains


class CreditLine(NamedTuple):
    """One step from reward to weight."""

    name: str
    formula: str  # filled in
    value: str


class _Term(NamedTuple):
    """A part of an advantage."""

    name: str
    filled: str
    value: float


class _Outcome(NamedTuple):
    """A trajectory as the estimator compares it."""

    reward: float
    context: int
    truncated: bool


def credit_lines(
    record: TrajectoryRecord, group: Group, turn: TurnView, config: "RunConfig | None"
) -> tuple[CreditLine, ...]:
    """The steps from the reward to the weight of a turn's tokens; without a configuration, without formulas."""
    return (*_reward(record, turn), *_advantage(record, group, turn, config), *_weight(record, turn, config))


def _reward(record: TrajectoryRecord, turn: TurnView) -> Iterator[CreditLine]:
    parts = "   ".join(f"{name} {value:.4g}" for name, value in record.components.items())
    yield CreditLine("score", parts, f"{record.score:.4g}")
    paid = {**turn.turn_rewards} | ({"of the turn": turn.paid} if turn.paid is not None else {})
    if paid:
        yield CreditLine("turn reward", "   ".join(f"{name} {value:.4g}" for name, value in paid.items()), "")


def _advantage(
    record: TrajectoryRecord, group: Group, turn: TurnView, config: "RunConfig | None"
) -> Iterator[CreditLine]:
    recorded = "not known" if turn.advantage is None else f"{turn.advantage:+.4g}"
    if record.handling in NOT_TRAINED or config is None or turn.advantage is None:
        yield CreditLine("advantage", NOT_TRAINED.get(record.handling or "", ""), recorded)
        return
    members = [_outcome(sibling, config) for sibling in group.siblings if sibling.handling != "mask"]
    own, rewards = _outcome(record, config), [member.reward for member in members]
    spread = f"mean {fmean(rewards):.4g}, deviation {_std(rewards):.4g}"
    yield CreditLine("group", f"{len(members)} {'trajectories' if len(members) > 1 else 'trajectory'}: {spread}", "")
    name, terms = config.estimator, tuple[_Term, ...]()
    if name == "rloo" and len(members) > 1:
        others = (sum(rewards) - own.reward) / (len(members) - 1)
        terms = (_Term("r − mean of the others", f"{own.reward:.4g} − {others:.4g}", own.reward - others),)
    elif name in STANDARD:
        terms = (_normalised(own.reward, rewards, config),)
    if name == "efficient" and own.reward >= 1:
        terms = (*terms, _efficiency(own, members, config))
    for term in terms:
        yield CreditLine(term.name, term.filled, f"{term.value:+.4g}")
    computed = math.fsum(term.value for term in terms)
    note = ESTIMATORS[name].summary
    if config.algorithm.advantage.whiten:
        note = f"{note}; then whitened over the batch"
    elif terms and not math.isclose(computed, turn.advantage, rel_tol=EXACT, abs_tol=EXACT):
        note = f"{note}; the terms above give {computed:+.4g}, the rest is of its other terms"
    yield CreditLine("advantage", f"{name}: {note}", recorded)


def _normalised(reward: float, rewards: Sequence[float], config: "RunConfig") -> _Term:
    """N(r), or r − mean where the estimator does not scale."""
    options, mean = config.algorithm.advantage.options, fmean(rewards)
    scale = options.get("accuracy", options.get("scale", "std"))
    if len(rewards) < 2 or scale != "std":
        return _Term("r − mean", f"{reward:.4g} − {mean:.4g}", reward - mean if len(rewards) > 1 else 0.0)
    epsilon, deviation = float(options.get("eps", EPSILON)), _std(rewards)
    value = 0.0 if deviation == 0 else (reward - mean) / (deviation + epsilon)
    filled = f"(r − mean) / (deviation + ε) = ({reward:.4g} − {mean:.4g}) / ({deviation:.4g} + {epsilon:g})"
    return _Term("N(r)", filled, value)


def _efficiency(own: _Outcome, members: Sequence[_Outcome], config: "RunConfig") -> _Term:
    """λ·g(p)·E of ``efficient``, for a correct trajectory."""
    options, budget = config.algorithm.advantage.options, config.rollout.limits.max_context_tokens
    low, high = config.algorithm.advantage.context_anchors or (budget / 16, float(budget))

    def cost(context: int) -> float:
        return math.log(min(max(context, low), high) / low) / math.log(high / low)

    costs = [cost(member.context) for member in members if member.reward >= 1]
    rate = len(costs) / len(members)
    trust = rate if rate >= float(options.get("min_pass_rate", 0.0)) else 0.0
    share = float(options.get("coefficient", 0.2))
    saved = (fmean(costs) - cost(own.context)) / max(_std(costs), 0.1) if len(costs) > 1 and not own.truncated else 0.0
    saved = min(max(saved, -1.0), 1.0)
    filled = (
        f"{share:g} · {trust:.3g} · {saved:+.3g}: its largest context of {own.context} tokens costs "
        f"u = {cost(own.context):.3g}, that of correct siblings {fmean(costs):.3g} on average"
    )
    return _Term("λ·g(p)·E", filled, share * trust * saved)


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


def _outcome(record: TrajectoryRecord, config: "RunConfig") -> _Outcome:
    """What the estimator compares: the total reward less penalties, or a score."""
    reward = record.score
    if record.handling == "penalise":
        scores = ESTIMATORS[config.estimator].learns_from == "score"
        reward = 0.0 if scores else reward - config.algorithm.stops.penalty
    return _Outcome(reward, record.context, record.truncated)


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
