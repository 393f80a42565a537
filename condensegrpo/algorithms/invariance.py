"""Checks of an estimator or a loss on made-up values: the result must not depend on how a step is computed.

A trajectory's advantage depends on its group alone; a token's loss on the token alone, or on those of its turn. Then
the gradient of a step is the same however rows are packed into micro-batches, ordered or shared out among ranks. Torch
only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from condensegrpo.algorithms.credit import Estimator, Scores
from condensegrpo.algorithms.losses import LossPlugin

# two groups: three trajectories of one to three turns that share their first context, and two of two turns
SCORES = Scores(
    total_N=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64),
    score_N=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64),
    correct_N=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64),
    context_N=torch.tensor([8.0, 9.0, 12.0, 10.0, 11.0], dtype=torch.float64),
    uncached_N=torch.tensor([8.0, 9.0, 14.0, 10.0, 11.0], dtype=torch.float64),
    cached_N=torch.tensor([0.0, 12.0, 3.0, 8.0, 8.0], dtype=torch.float64),
    output_N=torch.tensor([2.0, 6.0, 4.0, 3.0, 5.0], dtype=torch.float64),
    turn_N=torch.tensor([0.5, 0.0, 0.25, 0.0, 1.0], dtype=torch.float64),
    group_N=torch.tensor([0, 0, 0, 1, 1]),
    turns_N=torch.tensor([1, 3, 2, 2, 2]),
    result_turn_N=torch.tensor([-1, 1, 0, -1, 0]),
    truncated_N=torch.tensor([False, False, True, False, False]),
    state_NK=torch.tensor([[0, -1, -1], [0, 1, 2], [0, 1, -1], [3, 4, -1], [3, 5, -1]]),
    turn_reward_NK=torch.tensor(
        [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.25, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64
    ),
    act_NK=torch.tensor([[0, -1, -1], [0, 1, 2], [0, 1, -1], [0, 1, -1], [0, 1, -1]]),
)
LOGP_T = torch.tensor([-1.0, -0.5, -2.0, -0.1, -3.0, -0.7], dtype=torch.float64)
# unequal: equal ones hide a shared gradient
WEIGHT_T = torch.tensor([1.0, 3.0, 0.5, 2.0, 0.25, 4.0], dtype=torch.float64)
COLUMNS = {
    "old_T": torch.tensor([-1.2, -0.5, -1.5, -0.2, -2.0, -0.9], dtype=torch.float64),
    "advantage_T": torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5, 2.0], dtype=torch.float64),
    "turn_T": torch.tensor([4, 4, 7, 7, 7, 9]),
}
RELABELLED = COLUMNS | {"turn_T": torch.tensor([31, 31, 2, 2, 2, 5])}
WITHOUT_ADVANTAGE = COLUMNS | {"advantage_T": torch.zeros(6, dtype=torch.float64)}
NAMES = {"total_N": "outcome_N", "score_N": "outcome_N"}  # by column, its name in an estimator
CLOSE = 1e-9  # rounding of sums in another order


def check_estimator(estimator: Estimator) -> None:
    """Raise ValueError for advantages that depend on the order of trajectories, on another group, or on labels.

    An estimator that changes its arguments is refused, too: the step reads them afterwards.
    """
    given = Scores(*(column.clone() for column in SCORES))
    whole = estimator(given).advantage_NK
    _check_unchanged(given._asdict(), SCORES._asdict())
    if whole.shape != SCORES.act_NK.shape:
        raise ValueError(f"it returned a table of shape {tuple(whole.shape)}, wanted (trajectories, turns)")
    order = torch.tensor([4, 2, 0, 3, 1])
    _compare("the order of trajectories", whole[order], estimator(_rows(SCORES, order)).advantage_NK)
    relabelled = SCORES._replace(group_N=7 - 3 * SCORES.group_N)
    _compare("the labels of groups", whole, estimator(relabelled).advantage_NK)
    states_NK = torch.where(SCORES.state_NK < 0, SCORES.state_NK, 30 - 4 * SCORES.state_NK)
    _compare("the labels of states", whole, estimator(SCORES._replace(state_NK=states_NK)).advantage_NK)
    for group in (0, 1):
        members = (SCORES.group_N == group).nonzero().flatten()
        alone = estimator(_rows(SCORES, members)).advantage_NK
        _compare("the trajectories of other groups", whole[members], alone)


def check_loss(loss: LossPlugin, options: Mapping[str, object]) -> None:
    """Raise ValueError for a loss of a token, or a gradient, that depends on the rest of its micro-batch or on labels.

    A loss that is not finite, has no gradient, has one where the advantage is 0 (such rows are left out of the forward
    pass) or changes its arguments is refused, too.
    """
    whole = [slice(0, len(LOGP_T))]
    parts = {"the tokens of other turns": [slice(0, 2), slice(2, 5), slice(5, 6)]}
    if not loss.whole_turns:
        parts["other tokens of its turn"] = [slice(index, index + 1) for index in range(len(LOGP_T))]
    together = _computed(loss, options, whole)
    _compare_all("the labels of turns", together, _computed(loss, options, whole, RELABELLED))
    if (at_zero_T := _computed(loss, options, whole, WITHOUT_ADVANTAGE)[1]).any():
        raise ValueError(
            f"its gradient is {at_zero_T.tolist()} where the advantage is 0, wanted 0: rows without advantage are left "
            f"out of the forward pass, so that it would depend on which those are"
        )
    for what, micro_batches in parts.items():
        _compare_all(f"{what} in its micro-batch", together, _computed(loss, options, micro_batches))


def _computed(
    loss: LossPlugin,
    options: Mapping[str, object],
    micro_batches: Sequence[slice],
    columns: Mapping[str, Tensor] = COLUMNS,
) -> tuple[Tensor, Tensor]:
    """Loss of every token, and the gradient of their weighted sum, computed in micro-batches."""
    logp_T = LOGP_T.clone().requires_grad_()
    losses = []
    for part in micro_batches:
        kept = {name: column[part] for name, column in columns.items()}
        given = {name: column.clone() for name, column in kept.items()}
        arguments: dict[str, Any] = {**given, **options}
        losses.append(loss(logp_T[part], **arguments).loss_T)
        _check_unchanged(given, kept)
    loss_T = torch.cat(losses)
    if not loss_T.requires_grad:
        raise ValueError("its loss_T has no gradient, wanted one that is computed from logp_T")
    if not loss_T.isfinite().all():
        raise ValueError(f"its loss_T is {loss_T.tolist()}, wanted finite numbers")
    (gradient_T,) = torch.autograd.grad(loss_T @ WEIGHT_T, logp_T, allow_unused=True)
    return loss_T.detach(), torch.zeros_like(LOGP_T) if gradient_T is None else gradient_T


def _check_unchanged(given: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    changed = [NAMES.get(name, name) for name, column in given.items() if not torch.equal(column, kept[name])]
    if changed:
        raise ValueError(f"it changes {', '.join(changed)} in place, wanted a new tensor: the step reads it afterwards")


def _rows(scores: Scores, index: Tensor) -> Scores:
    """Some trajectories, in this order; tables as wide as their longest."""
    picked = Scores(*(column[index] for column in scores))
    longest = int(picked.turns_N.max())
    tables = {name: getattr(picked, name)[:, :longest] for name in Scores._fields if name.endswith("_NK")}
    return picked._replace(**tables)


def _compare_all(what: str, together: Sequence[Tensor], apart: Sequence[Tensor]) -> None:
    for one, other in zip(together, apart, strict=True):
        _compare(what, one, other)


def _compare(what: str, together: Tensor, apart: Tensor) -> None:
    width = min(together.shape[-1], apart.shape[-1])
    if not torch.allclose(together[..., :width], apart[..., :width], rtol=CLOSE, atol=CLOSE):
        thing = "advantage of a trajectory" if together.dim() == 2 else "loss of a token, or its gradient,"
        raise ValueError(
            f"the {thing} depends on {what}: found {together.tolist()} and {apart.tolist()} for the same. The gradient "
            f"of a step would depend on how its rows are packed and shared out"
        )
