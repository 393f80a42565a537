"""The advantage of one turn as the terms that its estimator adds up, filled in with the numbers of the group. No torch.

    N(R)       the reward against the group: (R − mean) / (deviation + ε) = (1 − 0.375) / (0.518 + 1e-06)    +1.207
    λ·g(p)·E   its context against that of correct siblings: 0.2 · 0.375 · 0.61                              +0.046

The functions have the names and the options of those in ``advantages``, which compute whole batches as tensors. A test
draws groups at random, and wants the terms to add up to what those return.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

ROUNDING = 1e-12  # as in advantages.groups: values of a group that spread no further are equal
CORRECT = 1 - 1e-9  # as in advantages.efficient


class GroupMember(NamedTuple):
    """A trajectory as estimators compare it with its siblings."""

    outcome: float  # R^O, penalties subtracted
    turn_reward: float  # R^T
    turns: int  # K, act turns
    result_turn: int  # the act turn of the first tool result; −1: none
    context: int  # tokens of the largest
    truncated: bool
    states: Sequence[object]  # (K,) equal where the prompts are


class Case(NamedTuple):
    """One act turn of a trajectory in its group."""

    members: Sequence[GroupMember]
    place: int  # of the trajectory
    turn: int  # t

    @property
    def own(self) -> GroupMember:
        """The trajectory."""
        return self.members[self.place]

    @property
    def outcomes(self) -> list[float]:
        """R^O of all."""
        return [member.outcome for member in self.members]

    @property
    def before_result(self) -> bool:
        """b(t)."""
        return self.turn <= self.own.result_turn


class Term(NamedTuple):
    """A summand of an advantage."""

    name: str  # as in the formula of the estimator
    filled: str  # what it compares, with the numbers
    value: float


Terms = tuple[Term, ...]


def grpo(case: Case, *, scale: str = "std", singleton: str = "zero", eps: float = 1e-6) -> Terms:
    """N(R)."""
    return (_normalised("R", "the reward", case.outcomes, case.place, scale, singleton, eps),)


def grpo_merged(case: Case, *, scale: str = "std", singleton: str = "zero", eps: float = 1e-4) -> Terms:
    """N(R^T + R^O)."""
    merged = [member.turn_reward + member.outcome for member in case.members]
    return (_normalised("R^T + R^O", "turn rewards and outcome", merged, case.place, scale, singleton, eps),)


def ms_grpo(case: Case, *, coef: float = 1.0, scale: str = "std", singleton: str = "zero", eps: float = 1e-4) -> Terms:
    """N(R^O) + coef·N(R^T)·b(t)."""
    outcome = _normalised("R^O", "the outcome", case.outcomes, case.place, scale, singleton, eps)
    if not case.before_result:
        return outcome, Term("coef·N(R^T)·b(t)", f"{_stage(case)}, so b(t) = 0", 0.0)
    paid = [member.turn_reward for member in case.members]
    turn = _normalised("R^T", "the turn rewards", paid, case.place, scale, singleton, eps)
    return outcome, Term("coef·N(R^T)·b(t)", f"{_stage(case)}; {coef:g} · {turn.filled}", coef * turn.value)


def mt_grpo(case: Case, *, coef: float = 1.0, scale: str = "std", singleton: str = "zero", eps: float = 1e-4) -> Terms:
    """As ``ms_grpo`` with a tool result, else as ``grpo_merged``."""
    if case.own.result_turn < 0:
        return grpo_merged(case, scale=scale, singleton=singleton, eps=eps)
    return ms_grpo(case, coef=coef, scale=scale, singleton=singleton, eps=eps)


def ms_po(case: Case, *, gamma: float = 1.0, scale: str = "std", singleton: str = "zero", eps: float = 1e-4) -> Terms:
    """N(R^O) after the tool result, else N(R^T + γ·R^O)."""
    if 0 <= case.own.result_turn < case.turn:
        return (_normalised("R^O", f"{_stage(case)}: the outcome", case.outcomes, case.place, scale, singleton, eps),)
    both = [member.turn_reward + gamma * member.outcome for member in case.members]
    says = f"{_stage(case)}: turn rewards and {gamma:g} · outcome"
    return (_normalised("R^T + γ·R^O", says, both, case.place, scale, singleton, eps),)


def rloo(case: Case, *, singleton: str = "zero") -> Terms:
    """R less the mean of the others."""
    if len(case.members) == 1:
        return grpo(case, singleton=singleton)
    others = fmean(outcome for place, outcome in enumerate(case.outcomes) if place != case.place)
    value = 0.0 if _spread(case.outcomes)[1] == 0 else case.own.outcome - others
    return (Term("R − mean of the others", f"{case.own.outcome:.4g} − {others:.4g}", value),)


def reinforce(case: Case, *, clamp: float = 10.0, singleton: str = "zero", eps: float = 1e-8) -> Terms:
    """N of the clamped reward; not divided by a deviation of at most ε."""
    clamped = [min(max(outcome, -clamp), clamp) for outcome in case.outcomes]
    scale = "std" if _spread(clamped)[1] > eps else "none"
    return (_normalised("R'", f"the reward within ±{clamp:g}", clamped, case.place, scale, singleton, eps),)


def turn_discounted(
    case: Case, *, gamma: float = 0.9, scale: str = "std", singleton: str = "zero", eps: float = 1e-6
) -> Terms:
    """γ^(K−1−t)·N(R)."""
    (term,) = grpo(case, scale=scale, singleton=singleton, eps=eps)
    left = case.own.turns - 1 - case.turn
    filled = f"{left} turns before the last: {gamma:g}^{left} · {term.filled}"
    return (Term(f"γ^(K−1−t)·{term.name}", filled, gamma**left * term.value),)


def efficient(
    case: Case,
    *,
    context_low: float,
    context_high: float,
    coefficient: float = 0.2,
    min_pass_rate: float = 0.0,
    guard: float = 0.25,
    accuracy: str = "std",
    eps: float = 1e-6,
) -> Terms:
    """N(r) + λ·g(p)·E for a correct trajectory, at least κ·N(r) where that is above 0."""
    (term,) = grpo(case, scale=accuracy, eps=eps)
    if case.own.outcome < CORRECT:
        return (term,)

    def cost(context: float) -> float:
        return math.log(min(max(context, context_low), context_high) / context_low) / math.log(
            context_high / context_low
        )

    own, costs = cost(case.own.context), [cost(each.context) for each in case.members if each.outcome >= CORRECT]
    rate, (mean, deviation) = len(costs) / len(case.members), _spread(costs)
    trust = rate if rate >= min_pass_rate else 0.0
    saving = 0.0 if case.own.truncated else min(max((mean - own) / max(deviation, 0.1), -1.0), 1.0)
    filled = (
        f"its context against that of correct siblings: {coefficient:g} · {trust:.3g} · {saving:+.3g}; its largest has "
        f"{case.own.context} tokens and costs u = {own:.3g}, theirs {mean:.3g} on average"
    )
    context = Term("λ·g(p)·E", filled, coefficient * trust * saving)
    missing = guard * term.value - (term.value + context.value)
    if term.value <= 0 or missing <= 0:
        return term, context
    return term, context, Term("guard", f"keeps {guard:g} of {term.name}", missing)


def gigpo(case: Case, *, coef: float = 1.0, gamma: float = 0.95, scale: str = "std", eps: float = 1e-6) -> Terms:
    """N(R) + coef·S."""
    (term,) = grpo(case, scale=scale, eps=eps)
    state = case.own.states[case.turn]
    returns = [
        gamma ** (each.turns - 1 - each.states.index(state)) * each.outcome
        for each in case.members
        if state in each.states
    ]
    own = gamma ** (case.own.turns - 1 - case.turn) * case.own.outcome
    (mean, deviation), size = _spread(returns), len(returns)
    if size == 1 or deviation == 0 or _spread(case.outcomes)[1] == 0:
        reason = "no sibling was given this prompt" if size == 1 else "siblings with this prompt returned the same"
        return term, Term("coef·S", f"{reason}, so S = 0", 0.0)
    step, bound = own - mean, math.inf
    filled = f"{own:.4g} − {mean:.4g}"
    if scale == "std":
        bound = (size - 1) / math.sqrt(size)
        step, filled = step / (deviation + eps), f"({filled}) / ({deviation:.4g} + {eps:g}), within ±{bound:.3g}"
    says = f"its discounted return against those of the {size} trajectories with this prompt"
    return term, Term("coef·S", f"{says}: {coef:g} · {filled}", coef * min(max(step, -bound), bound))


def _stage(case: Case) -> str:
    """Where the turn lies beside the first tool result."""
    if case.own.result_turn < 0:
        return "there is no tool result"
    return f"{'up to' if case.before_result else 'after'} the first tool result, of turn {case.own.result_turn}"


def _normalised(
    symbol: str, says: str, values: Sequence[float], place: int, scale: str, singleton: str, eps: float
) -> Term:
    """N(x) of one value among those of its group."""
    (mean, deviation), own = _spread(values), values[place]
    if len(values) == 1:
        value = own if singleton == "raw" else 0.0
        return Term(f"N({symbol})", f"{says} alone in its group ({singleton})", value)
    centred = 0.0 if deviation == 0 else own - mean
    name, formula, filled = f"{symbol} − mean", f"{symbol} − mean", f"{own:.4g} − {mean:.4g}"
    if scale == "std":
        name, formula = f"N({symbol})", f"({formula}) / (deviation + ε)"
        centred, filled = centred / ((deviation + eps) or 1.0), f"({filled}) / ({deviation:.4g} + {eps:g})"
    return Term(name, f"{says} against the group: {formula} = {filled}", centred)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and deviation (ddof = 1); 0 where values differ by rounding alone."""
    low, high = min(values), max(values)
    if high - low <= ROUNDING * max(abs(low), abs(high)):
        return low, 0.0
    mean = fmean(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


EXPLAINED: Mapping[str, Callable[..., Terms]] = {
    "grpo": grpo,
    "grpo_merged": grpo_merged,
    "ms_grpo": ms_grpo,
    "mt_grpo": mt_grpo,
    "ms_po": ms_po,
    "rloo": rloo,
    "reinforce": reinforce,
    "turn_discounted": turn_discounted,
    "efficient": efficient,
    "gigpo": gigpo,
}
