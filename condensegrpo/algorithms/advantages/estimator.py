"""What an estimator is: a decorated formula, and what is done around it. Torch only.

    @estimator(summary="the reward against the best of its group", formula="A_i = R_i − max_g R")
    def against_best(batch: Batch, *, margin: float = 0.0) -> Tensor:
        best_N = …                                        # float64 (N,): one number for all turns of a trajectory
        return batch.outcome_N - best_N - margin

The signature declares the rest: keywords that end in ``_N`` or ``_NK`` are columns of ``credit.Scores``, which the
trainer supplies; all others are options, whose annotations say which values are allowed. Suffixes as in
``condensegrpo.algorithms.advantages``.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import dedent
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from condensegrpo.algorithms.advantages.groups import (
    Scale,
    Singleton,
    first,
    mean,
    name_of,
    normalise,
    std,
)
from condensegrpo.algorithms.advantages.table import finished
from condensegrpo.core.errors import ScoreError
from condensegrpo.core.trajectory import MAX_REWARD

COLUMN_SUFFIXES = ("_N", "_NK")
NO_NUMBERS: Mapping[str, Tensor] = {}


class Batch(NamedTuple):
    """The five columns of every estimator, in this order; any labels of groups, in any order."""

    outcome_N: Tensor  # float, R^O, the reward of the whole trajectory; an estimator gets it in float64
    turn_N: Tensor  # float, R^T, the sum of its turn rewards; likewise
    group_N: Tensor  # int
    turns_N: Tensor  # int, how many turns it has
    result_turn_N: Tensor  # int, the first turn whose observation carried a tool result; −1: none


class Term(NamedTuple):
    """What an estimator adds up, with the numbers that it comes from. Every tensor is (N,) or (N, K)."""

    name: str  # as in the formula, such as N(R^O)
    value_NK: Tensor  # float64
    numbers: Mapping[str, Tensor] = NO_NUMBERS  # by name, for display only
    applies_NK: Tensor | None = None  # bool, the turns that have this term; None: all

    def added(self) -> Tensor:
        """The value, and 0 at turns that do not have the term."""
        return self.value_NK if self.applies_NK is None else torch.where(self.applies_NK, self.value_NK, 0.0)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The term with each of its tensors changed."""
        return self._replace(
            value_NK=change(self.value_NK),
            numbers={name: change(number) for name, number in self.numbers.items()},
            applies_NK=None if self.applies_NK is None else change(self.applies_NK),
        )


class Estimate(NamedTuple):
    """The advantage of every turn, and what it is the sum of."""

    advantage_NK: Tensor
    terms: tuple[Term, ...] = ()  # empty: an estimator that returned numbers alone


def total(*terms: Term) -> Estimate:
    """The sum of terms, added in their order: (N,) if all are, else (N, K)."""
    added = [term.added() for term in terms]
    if any(value.dim() == 2 for value in added):
        added = [value if value.dim() == 2 else value[:, None] for value in added]
    advantage = added[0]
    for value in added[1:]:
        advantage = advantage + value
    return Estimate(advantage, terms)


def against_group(
    symbol: str, value_N: Tensor, group_N: Tensor, *, scale: Scale, eps: float, singleton: Singleton = "zero"
) -> Term:
    """The term N(x), or ``x − mean`` where nothing is divided: ``groups.normalise`` with its numbers.

    Args:
        symbol: of x in the formula.
    """
    numbers = {symbol: value_N, "mean": mean(value_N, group_N)}
    if scale == "std":
        numbers["deviation"] = std(value_N, group_N)
    value_N = normalise(value_N, group_N, scale=scale, eps=eps, singleton=singleton)
    return Term(f"N({symbol})" if scale == "std" else f"{symbol} − mean", value_N, numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorPlugin:
    """An estimator of advantages, as ``estimator`` declares it."""

    function: Callable[..., Tensor | Estimate]
    summary: str  # one line for tables and --help
    formula: str  # as the inspector shows it; terms have the names that it uses
    learns_from: Literal["total", "score"]  # total reward less penalties, or a score in [0, 1]
    sees_turn_rewards: bool  # False: R^T is only logged

    @property
    def name(self) -> str:
        """That of the function."""
        return self.function.__name__

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of ``credit.Scores`` that it takes besides the five of every estimator."""
        return tuple(name for name in _keywords(self.function) if name.endswith(COLUMN_SUFFIXES))

    @property
    def options(self) -> tuple[str, ...]:
        """What a configuration may set."""
        return tuple(name for name in _keywords(self.function) if not name.endswith(COLUMN_SUFFIXES))

    def __call__(self, batch: Batch, /, **arguments: object) -> Estimate:
        """The advantage of every turn: float (N, K) of the outcome's type, 0 beyond a trajectory's turns.

        Args:
            batch: the five columns.
            arguments: its columns and options, as keywords.

        Raises:
            ScoreError: a reward is not finite or too large, or an advantage is.
            ValueError: shapes, turns or result turns that cannot be, what the formula refuses, or that
                it returned something else than advantages and their terms.
        """
        _check(batch)
        exact = batch._replace(outcome_N=batch.outcome_N.double(), turn_N=batch.turn_N.double())
        # a rank may have no trajectory that trains, and what compares within groups expects one
        returned = self.function(exact, **arguments) if len(exact.outcome_N) else exact.outcome_N
        estimate = returned if isinstance(returned, Estimate) else Estimate(returned)
        _check_returned(estimate, batch.turns_N)
        advantage = estimate.advantage_NK
        table = finished(advantage if advantage.dim() == 2 else advantage[:, None], batch.turns_N, like=batch.outcome_N)
        at_turns = partial(_at_turns, turns=table.shape[1])
        return Estimate(table, tuple(term.mapped(at_turns) for term in estimate.terms))


def estimator(
    *,
    summary: str,
    formula: str | None = None,
    learns_from: Literal["total", "score"] = "total",
    sees_turn_rewards: bool = False,
) -> Callable[[Callable[..., Tensor | Estimate]], EstimatorPlugin]:
    """Declares an estimator; its name is that of the function, its docstring says what biases it.

    The function gets a checked ``Batch`` and its keywords. It returns a sum of terms (``total``), which the inspector
    shows with their numbers, or a float tensor alone: (N,) for one number on all turns, or (N, K), where what lies
    beyond the turns of a trajectory does not matter.

    Args:
        summary: one line for tables.
        formula: for display; may have several lines. None: the second paragraph of the docstring.
        learns_from: ``total``, the reward less penalties; ``score``, a total in [0, 1], 0 where a stop is penalised.
        sees_turn_rewards: whether it uses R^T.
    """
    return lambda function: EstimatorPlugin(
        function=function,
        summary=summary,
        formula=_second_paragraph(function) if formula is None else formula,
        learns_from=learns_from,
        sees_turn_rewards=sees_turn_rewards,
    )


def _second_paragraph(function: Callable[..., object]) -> str:
    """Of its docstring; empty where there is none, as under ``python -OO``."""
    return dedent("".join((inspect.getdoc(function) or "").split("\n\n")[1:2]))


def _at_turns(value: Tensor, turns: int) -> Tensor:
    """A tensor of a term as (N,), one number for all turns, or as (N, turns)."""
    return value.expand(-1, turns) if value.dim() == 2 else value


def _keywords(function: Callable[..., object]) -> Sequence[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _check(batch: Batch) -> None:
    """Raise ValueError for shapes, turns or result turns that cannot be, and ScoreError for such a reward."""
    shapes = [tuple(column.shape) for column in batch]
    if len(set(shapes)) != 1 or batch.outcome_N.dim() != 1:
        raise ValueError(f"an estimator needs five tensors of one shape (N,), found {shapes}")
    _check_rewards("outcome", batch.outcome_N)
    _check_rewards("turn", batch.turn_N)
    turns_N, result_turn_N = batch.turns_N, batch.result_turn_N
    bad = first(turns_N < 0)
    if bad is not None:
        raise ValueError(
            f"computing advantages: {name_of(bad, turns_N)} has {turns_N[bad].item()} turns, wanted 0 or more"
        )
    bad = first((result_turn_N < -1) | (result_turn_N >= turns_N))
    if bad is not None:
        raise ValueError(
            f"computing advantages: the result turn of {name_of(bad, turns_N)} is {result_turn_N[bad].item()}, wanted "
            f"the index of one of its {turns_N[bad].item()} turns, counted from 0, or −1 where no observation carried "
            f"a tool result"
        )


def _check_returned(estimate: Estimate, turns_N: Tensor) -> None:
    """Raise ValueError for advantages, or parts of terms, that are no tensor with an entry a trajectory or turn."""
    longest = int(turns_N.max()) if len(turns_N) else 0
    shapes = ((len(turns_N),), (len(turns_N), 1), (len(turns_N), longest))
    wanted = f"wanted a tensor (N,), here ({len(turns_N)},), or (N, K), here ({len(turns_N)}, {longest})"
    advantage, terms = estimate
    if inspect.iscoroutine(advantage):
        advantage.close()
        raise ValueError(f"it returned a coroutine, {wanted}: define it with def, without async")
    if not (isinstance(advantage, Tensor) and advantage.shape in shapes):
        raise ValueError(f"it returned {_described(advantage)}, {wanted}, or the terms that total adds")
    for term in terms:
        if not isinstance(term, Term):
            raise ValueError(f"it returned {_described(term)} among its terms, wanted a Term")
        parts = {"value": term.value_NK, **term.numbers}
        parts |= {} if term.applies_NK is None else {"applies_NK": term.applies_NK}
        for name, part in parts.items():
            if not (isinstance(part, Tensor) and part.shape in shapes):
                raise ValueError(f"its term {term.name} has {_described(part)} as {name}, {wanted}")


def _described(value: object) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else " ".join(repr(value).split())[:80]
    )


def _check_rewards(name: str, reward_N: Tensor) -> None:
    """Raise ScoreError for a reward that is NaN, infinite, or so large that its group's statistics could overflow."""
    bad = first(~reward_N.isfinite())
    if bad is not None:
        raise ScoreError(
            f"computing advantages: the {name} reward of {name_of(bad, reward_N)} "
            f"is {reward_N[bad].item()}, wanted a finite number. It would invalidate its whole group: fix "
            f"the reward function, or leave the trajectory out."
        )
    bad = first(reward_N.double().abs() > MAX_REWARD)
    if bad is not None:
        raise ScoreError(
            f"computing advantages: the {name} reward of {name_of(bad, reward_N)} "
            f"is {reward_N[bad].item()}, wanted a magnitude of at most {MAX_REWARD:g}. The statistics of its group "
            f"would overflow: scale the reward function down."
        )
