"""A trajectory opened from its file, with all that is shown of it: the values that every view draws.

    reader = TrajectoryReader(index, batch)
    opened = reader.open(record)
    opened.turns[2], opened.pieces(2), opened.credit(2, group), opened.prompt(2)

The views are the application on a terminal, the printed text, notebooks, and the HTML page.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.core.wording import plural
from condensegrpo.inspection.batches import TrajectoryBatch, config_of, credit_of
from condensegrpo.inspection.history import HistoryPiece, history
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.panes import TokenTexts, TokenView, TurnView, turns
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


class TrajectoryReader:
    """Opens the trajectories of one batch; its tokenizer and configuration are read once, when they are needed."""

    def __init__(self, index: Index, batch: TrajectoryBatch) -> None:
        self._index, self.batch = index, batch

    @cached_property
    def _config(self) -> "RunConfig | None":
        """Of the batch. Read when it is needed: the first screen shows no credit."""
        return config_of(self.batch)

    @cached_property
    def _credit(self) -> dict[str, Credit]:
        """Of the batch, by trajectory."""
        return credit_of(self.batch.file) or {}

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of tokens."""
        return TokenTexts(self.batch)

    @cached_property
    def budget(self) -> int | None:
        """The context budget in tokens; None: it is not known."""
        return self.batch.provenance.max_context_tokens if self.batch.provenance is not None else None

    def open(self, record: IndexedTrajectory, *, tokens: bool = False) -> "OpenedTrajectory":
        """Read a trajectory; where the budget is not known, the largest context of the batch stands for it.

        Args:
            record: which one.
            tokens: whether its turns have their sampled tokens.
        """
        scored = self._index.read(record)
        views = turns(
            scored,
            record.credit,
            budget=self.batch.largest if self.budget is None else self.budget,
            tokenizer=self.texts if tokens else None,
            version_known=self.batch.version_known,
        )
        return OpenedTrajectory(record=record, scored=scored, turns=views, reader=self)

    def credit(self, record: IndexedTrajectory, group: Group, turn: TurnView) -> tuple[CreditLine, ...]:
        """The steps from reward to weight of the tokens of a turn, with the numbers that were recorded.

            in short   3 of 8 right, this one right; 21 tokens against the siblings' 34: +1.25
            score      correct 1   short 0.05                                          1
            group      8 trajectories, scores 1  0  0  1  0  0  1  0
            N(R)       R 1   mean 0.375   deviation 0.5175                             +1.207
            λ·g(p)·E   C 21   u 0.25   g(p) 0.375   E +0.61                            +0.046
            advantage  efficient: N(R) + λ·g(p)·E                                      +1.253
            weight     trajectory_constant: 1 / (B·L) = 1 / (96 · 256)                 4.07e-05

        The terms are those that the estimator added up when the credit was given: none is computed here.
        """
        sentence, given = group.credit_sentence(record), self._credit.get(record.id)
        return (
            *([CreditLine("in short", sentence, "")] if sentence else []),
            *_reward(record, turn),
            *_advantage(record, group, turn, self._config, given),
            *_weight(record, turn, self._config, given),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTrajectory:
    """A trajectory that was read from its file."""

    record: IndexedTrajectory
    scored: ScoredTrajectory
    turns: tuple[TurnView, ...]
    reader: TrajectoryReader

    @property
    def batch(self) -> TrajectoryBatch:
        """The step or evaluation that it belongs to."""
        return self.reader.batch

    def pieces(self, turn: int) -> tuple[HistoryPiece, ...]:
        """The whole history before a turn, with what was dropped and rewritten in its place."""
        return history(self.scored.trajectory, turn, self.turns[turn].context.statuses)

    def credit(self, turn: int, group: Group) -> tuple[CreditLine, ...]:
        """The steps from the reward to the weight of a turn's tokens, in the trajectory's group."""
        return self.reader.credit(self.record, group, self.turns[turn])

    def prompt(self, turn: int) -> str | None:
        """The prompt of a turn as text, special tokens included; None: there is no tokenizer."""
        return self.reader.texts.prompt(self.scored.trajectory.turns[turn])

    def tokens(self, turn: int) -> tuple[TokenView, ...]:
        """The sampled tokens of a turn."""
        return self.reader.texts.views(self.scored.trajectory.turns[turn])


class FirstDifference(NamedTuple):
    """The first difference of two trajectories."""

    turn: int
    where: str  # prompt, or reply


def first_difference(first: Trajectory, second: Trajectory) -> FirstDifference | None:
    """The first turn whose prompt or reply differ, by tokens and by texts; None: they are equal."""
    for number, (one, other) in enumerate(zip(first.turns, second.turns, strict=False)):
        if one.prompt_ids != other.prompt_ids or one.context != other.context:
            return FirstDifference(number, "prompt")
        if one.output_ids != other.output_ids or one.reply != other.reply:
            return FirstDifference(number, "reply")
    if len(first.turns) == len(second.turns):
        return None
    return FirstDifference(min(len(first.turns), len(second.turns)), "reply")
