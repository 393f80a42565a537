"""Advantages: what a trajectory is worth against its siblings, per turn; and how an estimator is declared. Torch only.

Legend of the suffixes: ``_N`` trajectories, ``_K`` turns (K = the most turns of any trajectory), ``_G`` groups.

    @estimator(summary="the reward against the best of its group", formula="A_i = R_i − max_g R")
    def against_best(batch: Batch, *, margin: float = 0.0) -> Tensor:
        best_N = …                                        # float64 (N,): one number for all turns of a trajectory
        return batch.outcome_N - best_N - margin

Every estimator takes a ``Batch`` of the same five columns, so that one can stand for another. Its signature declares
the rest: keywords that end in ``_N`` or ``_NK`` are columns of ``credit.Scores``, which the trainer supplies; all
others are options, whose annotations say which values are allowed. It returns an ``Estimate``: advantage_NK, float of
the outcome's type, computed in float64, 0 beyond ``turns_N``, and the terms that it is the sum of.

Statistics are over the trajectories of a group, each counted once however many turns or rows it made, with ddof = 1:

    N_ε(x)_i = (x_i − mean_g) / (std_g + ε),   g = group_N[i]           scale="none": x_i − mean_g

Equal values give exactly 0, whatever ε; values of a group within 1e-12 of its largest magnitude are equal. A group of
one gives 0 (``singleton="zero"``) or x itself (``"raw"``). Nothing here ever returns NaN or an infinity: a reward that
is not finite or beyond ±1e100, or an advantage beyond single precision, is a ``ScoreError`` that names the trajectory.
A result turn out of range is a ``ValueError`` that says what is allowed.

The built-in estimators are in ``outcome_estimators.py`` and ``turn_estimators.py``; ``whiten`` puts all of a batch on
one scale, after any of them.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import dedent
from typing import Annotated, Literal, NamedTuple, Self

import torch
from annotated_types import Ge
from torch import Tensor

from condensegrpo.core.errors import ScoreError
from condensegrpo.core.trajectory import MAX_REWARD

Scale = Literal["std", "none"]
Singleton = Literal["zero", "raw"]
Epsilon = Annotated[float, Ge(0)]  # ε, added to a deviation

COLUMN_SUFFIXES = ("_N", "_NK")
NO_NUMBERS: Mapping[str, Tensor] = {}
ROUNDING = 1e-12  # of a group's largest magnitude; values that spread no further are equal, 0.1 + 0.2 and 0.3 for one
EQUAL = 1e-12  # of Σ A²: squares that spread no further are equal; sums in double precision err by far less
MAX_ADVANTAGE = torch.finfo(torch.float32).max  # losses are computed in single precision


class Batch(NamedTuple):
    """The five columns of every estimator, in this order; any labels of groups, in any order."""

    outcome_N: Tensor  # float, R^O, the reward of the whole trajectory; an estimator gets it in float64
    turn_N: Tensor  # float, R^T, the sum of its turn rewards; likewise
    group_N: Tensor  # int
    turns_N: Tensor  # int, how many turns it has
    result_turn_N: Tensor  # int, the first turn whose observation carried a tool result; −1: none


class Term(NamedTuple):
    """A summand of an advantage, with the numbers that it comes from. Every tensor is (N,) or (N, K)."""

    name: str  # such as N(R^O)
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
    """The advantage of every turn, and the terms that it is the sum of."""

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
    """The term N_ε(x), or ``x − mean`` for ``scale="none"``: each value against its group, with its numbers.

    Exactly 0 where the values of a group are equal but for rounding, with ε = 0 too. A group of one gives 0, or with
    ``singleton="raw"`` its own value.

    Example: [0, 1, 2] has mean 1 and std 1: [−1, 0, 1] with ε = 0.

    Args:
        symbol: of x in the formula.
    """
    name, numbers = f"{symbol} − mean", {symbol: value_N, "mean": mean(value_N, group_N)}
    level_N = levelled(value_N, group_N)
    compared_N = level_N - mean(level_N, group_N)
    if scale == "std":
        deviation_N = std(value_N, group_N)
        name, numbers = f"N({symbol})", {**numbers, "deviation": deviation_N}
        compared_N = torch.where(deviation_N + eps > 0, compared_N / (deviation_N + eps), 0.0)
    if singleton == "raw":
        compared_N = torch.where(sizes(group_N) == 1, value_N, compared_N)
    return Term(name, compared_N, numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorPlugin:
    """An estimator of advantages, as ``estimator`` declares it."""

    function: Callable[..., Tensor | Estimate]
    summary: str  # one line for tables and --help
    formula: str  # as the inspector shows it, above the terms
    learns_from: Literal["total", "score"]  # total reward less penalties, or a score in [0, 1]
    sees_turn_rewards: bool  # False: R^T is only logged

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of ``credit.Scores`` that it takes besides the five of every estimator."""
        return tuple(name for name in _keywords(self.function) if name.endswith(COLUMN_SUFFIXES))

    @property
    def options(self) -> tuple[str, ...]:
        """The keywords that a configuration may set."""
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
        # a rank may have no trajectory that trains, and a comparison within groups expects one
        returned = self.function(exact, **arguments) if len(exact.outcome_N) else exact.outcome_N
        estimate = returned if isinstance(returned, Estimate) else Estimate(returned)
        _check_returned(estimate, batch.turns_N)
        table_NK = _turn_table(estimate.advantage_NK, batch)
        terms = (
            term.mapped(lambda value: value.expand(-1, table_NK.shape[1]) if value.dim() == 2 else value)
            for term in estimate.terms
        )
        return Estimate(table_NK, tuple(terms))


def estimator(
    *,
    summary: str,
    formula: str | None = None,
    learns_from: Literal["total", "score"] = "total",
    sees_turn_rewards: bool = False,
) -> Callable[[Callable[..., Tensor | Estimate]], EstimatorPlugin]:
    """Declares an estimator; its name is that of the function, its docstring says what biases it.

    The function gets a checked ``Batch`` and its keywords. It returns a sum of terms (``total``), which the inspector
    shows with their numbers, or a float tensor alone: (N,) for one number on all turns, or (N, K), whose entries
    beyond the turns of a trajectory are ignored.

    Args:
        summary: one line for tables.
        formula: for display; may have several lines. None: the second paragraph of the docstring.
        learns_from: ``total``, the reward less penalties; ``score``, a total in [0, 1], 0 where a stop is penalised.
        sees_turn_rewards: whether it uses R^T.
    """

    def declare(function: Callable[..., Tensor | Estimate]) -> EstimatorPlugin:
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")  # no docstring under ``python -OO``
        return EstimatorPlugin(
            function=function,
            summary=summary,
            formula=dedent("".join(paragraphs[1:2])) if formula is None else formula,
            learns_from=learns_from,
            sees_turn_rewards=sees_turn_rewards,
        )

    return declare


def _keywords(function: Callable[..., object]) -> list[str]:
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


def _check_returned(estimate: Estimate, turns_N: Tensor) -> None:
    """Raise ValueError for advantages, or parts of terms, that are no tensor with an entry a trajectory or turn."""
    longest = len(turn_indices(turns_N))
    shapes = ((len(turns_N),), (len(turns_N), 1), (len(turns_N), longest))
    wanted = f"wanted a tensor (N,), here ({len(turns_N)},), or (N, K), here ({len(turns_N)}, {longest})"

    def described(value: object) -> str:
        if isinstance(value, Tensor):
            return f"a tensor of shape {tuple(value.shape)}"
        return " ".join(repr(value).split())[:80]

    advantage, terms = estimate
    if inspect.iscoroutine(advantage):
        advantage.close()
        raise ValueError(f"it returned a coroutine, {wanted}: define it with def, without async")
    if not (isinstance(advantage, Tensor) and advantage.shape in shapes):
        raise ValueError(f"it returned {described(advantage)}, {wanted}, or the terms that total adds")
    for term in terms:
        if not isinstance(term, Term):
            raise ValueError(f"it returned {described(term)} among its terms, wanted a Term")
        parts = {"value": term.value_NK, **term.numbers}
        parts |= {} if term.applies_NK is None else {"applies_NK": term.applies_NK}
        for name, part in parts.items():
            if not (isinstance(part, Tensor) and part.shape in shapes):
                raise ValueError(f"its term {term.name} has {described(part)} as {name}, {wanted}")


def _turn_table(advantage: Tensor, batch: Batch) -> Tensor:
    """Advantages (N,), (N, 1) or (N, K) as (N, K): 0 beyond a trajectory's turns, in the outcome's floating type.

    An advantage that does not fit into that type, or into single precision, is a ScoreError.
    """
    like = batch.outcome_N
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    has_turn_NK = turn_indices(batch.turns_N) < batch.turns_N[:, None]
    exact_NK = torch.where(has_turn_NK, advantage if advantage.dim() == 2 else advantage[:, None], 0.0)
    largest = min(torch.finfo(dtype).max, MAX_ADVANTAGE)
    bad = first(~(exact_NK.abs() <= largest).all(dim=1))  # NaN included
    if bad is not None:
        divided = "" if exact_NK[bad].isfinite().all() else ", or divide by nothing that may be 0"
        raise ScoreError(
            f"computing advantages: {name_of(bad, like)} gets {exact_NK[bad].tolist()}, wanted numbers of magnitude "
            f"{largest:.3g} at most, or rows and losses cannot hold them. Its outcome reward is {like[bad].item()}: "
            f"scale the rewards of its group, or the estimator's options, down{divided}."
        )
    return exact_NK.to(dtype)


def turn_indices(turns_N: Tensor) -> Tensor:
    """t = 0, 1, … up to the most turns of any trajectory, int (K,)."""
    longest = int(turns_N.max()) if len(turns_N) else 0
    return torch.arange(longest, device=turns_N.device)


def discounts(turns_N: Tensor, gamma: float) -> Tensor:
    """γ^{K_i−1−t}, float64 (N, K): 1 at a trajectory's last turn, for γ = 0 too, less before; meaningless beyond it."""
    left_NK = turns_N[:, None] - 1 - turn_indices(turns_N)
    return torch.tensor(gamma, dtype=torch.float64, device=turns_N.device) ** left_NK


def group_indices(group_N: Tensor) -> tuple[Tensor, Tensor]:
    """Labels, or rows (N, ·) of labels, as indices (N,) into the list of groups, and the size (G,) of every group."""
    _, index_N, size_G = torch.unique(group_N, dim=0, return_inverse=True, return_counts=True)
    return index_N, size_G


def sizes(group_N: Tensor) -> Tensor:
    """How many trajectories the group of each has, int (N,)."""
    index_N, size_G = group_indices(group_N)
    return size_G[index_N]


def levelled(value_N: Tensor, group_N: Tensor) -> Tensor:
    """The values (N,), those of a group that differ by rounding alone made equal: its least for all of them.

    Example: [0.1 + 0.2, 0.3] becomes [0.3, 0.3]; its deviation of 4e-17 would else be divided by itself.
    """
    index_N, size_G = group_indices(group_N)
    zero_G = value_N.new_zeros(len(size_G))
    low_G = zero_G.scatter_reduce(0, index_N, value_N, "amin", include_self=False)
    high_G = zero_G.scatter_reduce(0, index_N, value_N, "amax", include_self=False)
    equal_G = high_G - low_G <= ROUNDING * torch.maximum(low_G.abs(), high_G.abs())
    return torch.where(equal_G[index_N], low_G[index_N], value_N)


def mean(value_N: Tensor, group_N: Tensor) -> Tensor:
    """The mean of the group of each (N,). Equal values give themselves to the bit, so that centring gives exactly 0."""
    index_N, size_G = group_indices(group_N)
    zero_G = value_N.new_zeros(len(size_G))
    low_G = zero_G.scatter_reduce(0, index_N, value_N, "amin", include_self=False)
    above_G = zero_G.index_add(0, index_N, value_N - low_G[index_N])
    return (low_G + above_G / size_G)[index_N]


def std(value_N: Tensor, group_N: Tensor) -> Tensor:
    """The standard deviation (ddof = 1) of the group of each (N,); 0 for a group of one, or equal but for rounding."""
    index_N, size_G = group_indices(group_N)
    level_N = levelled(value_N, group_N)
    square_N = (level_N - mean(level_N, group_N)).square()
    total_G = value_N.new_zeros(len(size_G)).index_add(0, index_N, square_N)
    return (total_G / (size_G - 1).clamp(min=1)).sqrt()[index_N]


def first(bad_N: Tensor) -> int | None:
    """The first index where it is true; None: nowhere."""
    return next(iter(bad_N.nonzero().flatten().tolist()), None)


def name_of(index: int, of_N: Tensor) -> str:
    """How error messages name a trajectory."""
    return f"trajectory {index} (of {len(of_N)}, counted from 0)"


class Moments(NamedTuple):
    """Sums over the trained tokens of a batch. The moments of the ranks add up field by field."""

    tokens: float  # Σ n_it, sampled tokens
    total: float  # Σ n_it·A_it
    square: float  # Σ n_it·A_it²


def moments(advantage_NK: Tensor, tokens_NK: Tensor) -> Moments:
    """The moments of some trajectories, each turn counted by its sampled tokens; arguments as of ``whiten``."""
    count_NK, value_NK = _counted(advantage_NK, tokens_NK)
    return Moments(
        tokens=float(count_NK.sum()),
        total=float((count_NK * value_NK).sum()),
        square=float((count_NK * value_NK.square()).sum()),
    )


def whiten(advantage_NK: Tensor, tokens_NK: Tensor, *, moments: Moments, eps: float = 1e-8) -> Tensor:
    """Advantages less their mean over the trained tokens of the whole batch, in their deviations.

        A'_it = (A_it − mean) / (std + ε)   where n_it > 0, else 0
        mean = Σ n·A / T,   std² = (Σ n·A² − (Σ n·A)² / T) / (T − 1),   T = Σ n

    Global advantage normalisation, as in REINFORCE++ (https://arxiv.org/abs/2501.03262). Fewer than two tokens give 0,
    and so do equal advantages: those whose std is below a millionth of their root mean square, which sums of squares
    cannot tell from none.

    Biased by, and so off by default: ΣA = 0 within a group is broken, since the mean of the batch counts tokens and is
    not 0; a trajectory with an advantage of 0, such as those of a group without signal, gets one that is not 0 and has
    to be trained; long trajectories count more in mean and std, by their tokens.

    Example: advantages [1, −1] with 3 and 1 tokens: mean (3 − 1)/4 = ½, std² = (4 − 4/4)/3 = 1, A' = [½, −1½].

    Args:
        advantage_NK: float, of every turn; its values at turns without tokens are left out.
        tokens_NK: int, sampled tokens of every turn, 0 beyond the trajectory's turns.
        moments: of the whole batch over all ranks, and not of these N trajectories alone.

    Returns:
        float (N, K) of the advantage's type, 0 where there are no tokens.
    """
    count_NK, value_NK = _counted(advantage_NK, tokens_NK)
    spread = moments.square - moments.total**2 / max(moments.tokens, 1.0)
    if moments.tokens < 2 or spread <= EQUAL * moments.square:
        return torch.zeros_like(advantage_NK)
    deviation = math.sqrt(spread / (moments.tokens - 1))
    whitened_NK = (value_NK - moments.total / moments.tokens) / (deviation + eps)
    return torch.where(count_NK > 0, whitened_NK, 0.0).to(advantage_NK.dtype)


def _counted(advantage_NK: Tensor, tokens_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Token counts and advantages in float64, the latter 0 where there are no tokens."""
    if advantage_NK.shape != tokens_NK.shape or advantage_NK.dim() != 2:
        raise ValueError(
            f"whitening needs advantages and token counts of one shape (N, K), "
            f"found {tuple(advantage_NK.shape)} and {tuple(tokens_NK.shape)}"
        )
    value_NK = torch.where(tokens_NK > 0, advantage_NK.double(), 0.0)
    bad = first(~(value_NK.abs() <= MAX_REWARD).all(dim=1))
    if bad is not None:
        raise ScoreError(
            f"whitening advantages: {name_of(bad, tokens_NK)} has the advantages {advantage_NK[bad].tolist()}, wanted "
            f"finite numbers of magnitude {MAX_REWARD:g} at most. It would invalidate the whole batch."
        )
    return tokens_NK.double(), value_NK
