"""Statistics of groups, each trajectory counted once. Torch only.

Suffixes as in ``condensegrpo.algorithms.advantages``.
"""

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

Scale = Literal["std", "none"]
Singleton = Literal["zero", "raw"]
Epsilon = Annotated[float, Ge(0)]  # ε, added to a deviation

ROUNDING = 1e-12  # of a group's largest magnitude; values that spread no further are equal, 0.1 + 0.2 and 0.3 for one


def normalise(value_N: Tensor, group_N: Tensor, *, scale: Scale, eps: float, singleton: Singleton = "zero") -> Tensor:
    """N_ε(x): each value against the mean of its group, in the group's deviations unless ``scale`` is ``"none"``.

    (x − mean_g) / (std_g + ε), and exactly 0 where the values of a group are equal but for rounding, with ε = 0 too. A
    group of one gives 0, or with ``singleton="raw"`` its own value.

    Example: [0, 1, 2] has mean 1 and std 1: [−1, 0, 1] with ε = 0.
    """
    level_N = levelled(value_N, group_N)
    centred_N = level_N - mean(level_N, group_N)
    if scale == "std":
        centred_N = over(centred_N, std(value_N, group_N) + eps)
    if singleton == "zero":
        return centred_N
    return torch.where(sizes(group_N) == 1, value_N, centred_N)


def group_indices(group_N: Tensor) -> tuple[Tensor, Tensor]:
    """Labels, or rows (N, ·) of labels, as positions (N,) in the list of groups, and the size (G,) of every group."""
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


def over(value_N: Tensor, divisor_N: Tensor) -> Tensor:
    """value / divisor, and 0 where the divisor is 0."""
    return torch.where(divisor_N > 0, value_N / divisor_N, 0.0)


def first(bad_N: Tensor) -> int | None:
    """The first index where it is true; None: nowhere."""
    return next(iter(bad_N.nonzero().flatten().tolist()), None)


def name_of(index: int, of_N: Tensor) -> str:
    """How error messages name a trajectory."""
    return f"trajectory {index} (of {len(of_N)}, counted from 0)"
