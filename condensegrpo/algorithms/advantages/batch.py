"""What every estimator does around its formula: check the batch, and fill the table of turns. Torch only.

Arguments and suffixes as in ``condensegrpo.algorithms.advantages``.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec

from torch import Tensor

from condensegrpo.algorithms.advantages.groups import MAX_REWARD, first, named
from condensegrpo.algorithms.advantages.table import finished
from condensegrpo.core.errors import ScoreError

P = ParamSpec("P")


class Batch(NamedTuple):
    """The five arguments of every estimator, checked; the rewards in float64."""

    outcome_N: Tensor  # float64, R^O
    turn_N: Tensor  # float64, R^T
    group_N: Tensor  # int
    turns_N: Tensor  # int
    result_turn_N: Tensor  # int, −1: none


def estimator(
    formula: Callable[Concatenate[Batch, P], Tensor], *, forwards_to: Callable[..., Tensor] | None = None
) -> Callable[Concatenate[Tensor, Tensor, Tensor, Tensor, Tensor, P], Tensor]:
    """An estimator from its formula, which gets a ``Batch`` in place of the five arguments and the same keywords.

    The formula returns float64 (N,), one number for all turns of a trajectory, or (N, K); what lies beyond the turns of
    a trajectory does not matter.

    Args:
        forwards_to: the function that gets the formula's ``**keywords``; the signature shows its keywords.
    """

    @wraps(formula)
    def checked(
        outcome_N: Tensor,
        turn_N: Tensor,
        group_N: Tensor,
        turns_N: Tensor,
        result_turn_N: Tensor,
        /,
        *args: P.args,
        **options: P.kwargs,
    ) -> Tensor:
        _check(outcome_N, turn_N, group_N, turns_N, result_turn_N)
        batch = Batch(outcome_N.double(), turn_N.double(), group_N, turns_N, result_turn_N)
        advantage = formula(batch, *args, **options)
        return finished(advantage if advantage.dim() == 2 else advantage[:, None], turns_N, like=outcome_N)

    five = list(inspect.signature(checked, follow_wrapped=False).parameters.values())[:5]
    functions = (formula,) if forwards_to is None else (forwards_to, formula)
    every = [each for function in functions for each in inspect.signature(function).parameters.values()]
    keywords = [each for each in every if each.kind is each.KEYWORD_ONLY]
    vars(checked)["__signature__"] = inspect.Signature([*five, *keywords], return_annotation=Tensor)
    return checked


def _check(outcome_N: Tensor, turn_N: Tensor, group_N: Tensor, turns_N: Tensor, result_turn_N: Tensor) -> None:
    """Raise ValueError for shapes, turns or result turns that cannot be, and ScoreError for such a reward."""
    shapes = [tuple(value.shape) for value in (outcome_N, turn_N, group_N, turns_N, result_turn_N)]
    if len(set(shapes)) != 1 or outcome_N.dim() != 1:
        raise ValueError(f"an estimator needs five tensors of one shape (N,), found {shapes}")
    _check_rewards("outcome", outcome_N)
    _check_rewards("turn", turn_N)
    bad = first(turns_N < 0)
    if bad is not None:
        raise ValueError(
            f"computing advantages: {named(bad, turns_N)} has {turns_N[bad].item()} turns, wanted 0 or more"
        )
    bad = first((result_turn_N < -1) | (result_turn_N >= turns_N))
    if bad is not None:
        raise ValueError(
            f"computing advantages: the result turn of {named(bad, turns_N)} is {result_turn_N[bad].item()}, wanted "
            f"the index of one of its {turns_N[bad].item()} turns, counted from 0, or −1 where no observation carried "
            f"a tool result"
        )


def _check_rewards(name: str, reward_N: Tensor) -> None:
    """Raise ScoreError for a reward that is NaN, infinite, or so large that its group's statistics could overflow."""
    bad = first(~reward_N.isfinite())
    if bad is not None:
        raise ScoreError(
            f"computing advantages: the {name} reward of {named(bad, reward_N)} "
            f"is {reward_N[bad].item()}, wanted a finite number. It would invalidate its whole group: fix "
            f"the reward function, or leave the trajectory out."
        )
    bad = first(reward_N.double().abs() > MAX_REWARD)
    if bad is not None:
        raise ScoreError(
            f"computing advantages: the {name} reward of {named(bad, reward_N)} "
            f"is {reward_N[bad].item()}, wanted a magnitude of at most {MAX_REWARD:g}. The statistics of its group "
            f"would overflow: scale the reward function down."
        )
