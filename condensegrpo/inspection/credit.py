"""The steps from the reward of a trajectory to the weight of its tokens, filled in with what was recorded."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from condensegrpo.core.wording import plural
from condensegrpo.inspection.panes import TurnView
from condensegrpo.inspection.records import Group, IndexedTrajectory
from condensegrpo.storage.trajectories import Credit

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

NOT_TRAINED = {"mask": "masked: its stop trains nothing", "drop": "dropped: no member of its group has an advantage"}
EXACT = 1e-3  # difference of the terms from the advantage that rounding explains


class CreditLine(NamedTuple):
    """One step from reward to weight."""

    name: str
    formula: str  # filled in
    value: str


def credit_lines(
    record: IndexedTrajectory, group: Group, turn: TurnView, config: "RunConfig | None", credit: Credit | None
) -> tuple[CreditLine, ...]:
    """The steps from reward to weight of the tokens of a turn, with the numbers that were recorded.

        in short   3 of 8 right, this one right; 21 tokens against the siblings' 34: +1.25
        score      correct 1   short 0.05                                          1
        group      8 trajectories, scores 1  0  0  1  0  0  1  0
        N(R)       R 1   mean 0.375   deviation 0.5175                             +1.207
        λ·g(p)·E   C 21   u 0.25   g(p) 0.375   E +0.61                            +0.046
        advantage  efficient: N(R) + λ·g(p)·E                                      +1.253
        weight     trajectory_constant: 1 / (B·L) = 1 / (96 · 256)                 4.07e-05

    The terms are those that the estimator added up when the credit was given: none is computed here.

    Args:
        config: of the step; None: not known.
        credit: of the trajectory, with its terms; None: not known.
    """
    sentence = group.credit_sentence(record)
    return (
        *([CreditLine("in short", sentence, "")] if sentence else []),
        *_reward(record, turn),
        *_advantage(record, group, turn, config, credit),
        *_weight(record, turn, config, credit),
    )


def _reward(record: IndexedTrajectory, turn: TurnView) -> Iterator[CreditLine]:
    parts = "   ".join(f"{name} {value:.4g}" for name, value in record.figures.components.items())
    yield CreditLine("score", parts, f"{record.figures.total:.4g}")
    paid = {**turn.turn_rewards} | ({"of the turn": turn.paid} if turn.paid is not None else {})
    if paid:
        yield CreditLine("turn reward", "   ".join(f"{name} {value:.4g}" for name, value in paid.items()), "")


def _advantage(
    record: IndexedTrajectory, group: Group, turn: TurnView, config: "RunConfig | None", credit: Credit | None
) -> Iterator[CreditLine]:
    if turn.advantage is None:
        yield CreditLine("advantage", "the run's credit/ has none of this trajectory", "not known")
        return
    recorded = f"{turn.advantage:+.4g}"
    if record.handling in NOT_TRAINED:
        yield CreditLine("advantage", NOT_TRAINED[record.handling], recorded)
        return
    compared = [sibling.figures.total for sibling in group.siblings if sibling.handling != "mask"]
    scores = "  ".join(f"{score:.4g}" for score in compared)
    yield CreditLine("group", f"{plural(len(compared), 'trajectory', 'trajectories')}, scores {scores}", "")
    names, values = [], []
    for term in credit.terms if credit is not None else ():
        value = term.values[turn.turn]
        if value is not None:
            numbers = "   ".join(f"{name} {each[turn.turn]:.4g}" for name, each in term.numbers.items())
            yield CreditLine(term.name, numbers, f"{value:+.4g}")
            names.append(term.name)
            values.append(value)
    summed, total = " + ".join(names) or "it returned no terms, which would be shown here", math.fsum(values)
    if config is not None and config.algorithm.advantage.whiten:
        summed += "; whitened afterwards, by mean and deviation of all trained tokens of the step, which no file holds"
    elif values and not math.isclose(total, turn.advantage, rel_tol=EXACT, abs_tol=EXACT):
        summed += f"; these give {total:+.4g}"
    yield CreditLine("advantage", f"{config.estimator if config is not None else 'advantage'}: {summed}", recorded)


def _weight(
    record: IndexedTrajectory, turn: TurnView, config: "RunConfig | None", credit: Credit | None
) -> Iterator[CreditLine]:
    if turn.weight is None:
        return
    value = f"{turn.weight:.4g} a token" if turn.weight else "0: not trained"
    if config is None or not turn.weight:
        yield CreditLine("weight", "", value)
        return
    aggregation, length = config.algorithm.aggregation, config.longest_output
    mode, some = aggregation.mode, credit is not None and 0.0 in credit.weights
    if aggregation.summary_share is not None or (mode == "trajectory_mean" and some):
        yield CreditLine("weight", mode, value)  # which the tokens of the whole trajectory do not explain
        return
    output = record.figures.output_tokens
    known = {
        "trajectory_constant": length,
        "trajectory_mean": output,
        "token_mean": 1,
        "turn_mean": turn.output_tokens,
    }
    plural = 1 / (turn.weight * max(known[mode], 1))
    filled = {
        "trajectory_constant": f"1 / (B·L) = 1 / ({plural:.4g} trajectories · {length} tokens)",
        "trajectory_mean": f"1 / (B·N) = 1 / ({plural:.4g} trajectories · {output} tokens of this one)",
        "token_mean": f"1 / ΣN = 1 / {plural:.4g} tokens of the batch",
        "turn_mean": f"1 / (ΣK·n) = 1 / ({plural:.4g} turns of the batch · {turn.output_tokens} tokens of this one)",
    }[mode]
    yield CreditLine("weight", f"{mode}: {filled}", value)
