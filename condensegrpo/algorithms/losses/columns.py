"""Columns of trained tokens: checks, differences and ratios that never turn into NaN, and sums over a turn.

Legend of the suffixes: ``_T`` trained tokens, ``_K`` turns.

A log-probability of −inf is legal and means probability 0 (a token that another temperature, precision or engine rules
out). NaN and +inf are faults of a model: they are not hidden here, so that an optimiser step that meets one is refused.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; e^20 = 5e8 is finite in float32 and bfloat16
MAX_DIFFERENCE = 1e4  # nats; what an infinite difference counts as, so that +inf and −inf of a turn do not make NaN


def log_ratio(logp_T: Tensor, other_T: Tensor) -> Tensor:
    """logp − other in nats, within ±1e4; the gradient passes inside of that.

    A token that one of the two gives probability 0 counts ±1e4, one that both do counts 0 (nothing is known about their
    ratio); neither has a gradient.

    Example: logp = [−1, −1, −inf, −inf] and other = [−3, −inf, −3, −inf] give [2, 1e4, −1e4, 0].
    """
    both_T = logp_T.isneginf() & other_T.isneginf()
    return torch.where(both_T, 0.0, logp_T - other_T).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """exp(clip(log ratio, ±20)): a ratio that is finite and above 0, without a gradient beyond the bounds."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def turn_sum(value_T: Tensor, turn_T: Tensor) -> Tensor:
    """For each token, the sum over all tokens of its turn, added up in float64; the gradient passes.

    Example: values [1, 2, 4] of the turns [7, 3, 7] give [5, 2, 5].
    """
    sorted_T, order_T = turn_T.sort()
    # the number of each token's turn in the order of labels; torch.unique would wait for the device to count them
    number_T = torch.empty_like(order_T).scatter_(0, order_T, sorted_T.diff(prepend=sorted_T[:1]).ne(0).cumsum(0))
    total_T = torch.zeros_like(value_T, dtype=torch.float64).index_add(0, number_T, value_T.double())
    return total_T[number_T].to(value_T.dtype)


def check_columns(doing: str, **columns: Tensor) -> None:
    """Raise ValueError unless all columns have one shape (T,)."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"{doing}: found the shapes {listed}, wanted one shape (T,) for all: a value for each trained token of the "
            f"micro-batch, and none for context tokens."
        )


def check_turns(doing: str, turn_T: Tensor) -> None:
    """Raise ValueError unless turns are numbered by integers."""
    if turn_T.is_floating_point() or turn_T.is_complex() or turn_T.dtype == torch.bool:
        raise ValueError(
            f"{doing}: turn_T is of type {turn_T.dtype}, wanted an integer type: the number of the turn that each "
            f"token belongs to."
        )
