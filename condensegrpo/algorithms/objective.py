"""The objective: what an optimiser step minimises, put together from the losses. Torch only.

    l = v · loss(logp, old, A) + β · KL(logp, reference)          per trained token; the step's loss is Σ w·l

v is the importance weight between sampler and learner, 1 unless ``corrected``; β is 0 unless ``with_kl``.

Legend of the suffix: ``_T`` trained tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor

from condensegrpo.algorithms.losses import MAX_DIFFERENCE, Importance, TokenLoss, gspo, k3, nll
from condensegrpo.algorithms.losses.columns import difference
from condensegrpo.algorithms.packing import PackedBatch

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLoss]  # of logp_T, old_T, advantage_T, turn_T
Penalty = Callable[[Tensor, Tensor], Tensor]  # of logp_T, reference_T: one of losses.KL
Correction = Callable[[Tensor, Tensor, Tensor], Importance]  # of old_T, sampler_T, turn_T


class Objective(NamedTuple):
    """The loss of every trained token, and what is worth logging of them."""

    loss_T: Tensor  # float, not yet weighted
    statistics: Mapping[str, Tensor]  # (T,) each, no gradient; the same names in every micro-batch of a step


Minimised = Callable[[Tensor, PackedBatch], Objective]


@dataclass(frozen=True, slots=True)
class Tokenwise:
    """An objective in which a token's loss and statistics depend on no other token's log-probability or column.

    It may be applied to some tokens of a micro-batch at a time, which the learner's head does to save a pass
    (``learner/fused_head.py``). Nobody can check that promise: what looks at turns, as ``gspo`` and importance weights
    of whole turns do, must not be wrapped in it.
    """

    objective: Minimised

    def __call__(self, logp_T: Tensor, batch: PackedBatch) -> Objective:
        """The objective itself."""
        return self.objective(logp_T, batch)


class Summed(NamedTuple):
    """What some tokens add to the loss of their optimiser step."""

    loss: Tensor  # (), Σ w·l over them
    statistics: dict[str, Tensor]  # (T,) each, no gradient


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What a micro-batch adds to the loss of its optimiser step, as a function of its log-probabilities."""

    objective: Minimised
    batch: PackedBatch

    def __call__(self, logp_T: Tensor) -> Summed:
        """Σ w·l over the trained tokens."""
        found = self.objective(logp_T, self.batch)
        return Summed(loss=(self.batch.weights * found.loss_T).sum(), statistics=dict(found.statistics))

    @property
    def divisible(self) -> bool:
        """Whether the parts of it add up to the whole."""
        return isinstance(self.objective, Tokenwise)

    def part(self, start: int, stop: int) -> Self:
        """The share of the trained tokens from ``start`` to before ``stop`` alone."""
        columns = {column.name: getattr(self.batch, column.name) for column in fields(self.batch)}
        own = {name: value[start:stop] for name, value in columns.items() if value.dim() == 1}
        return replace(self, batch=replace(self.batch, **own))


def bound(loss: Callable[..., TokenLoss], options: Mapping[str, Any]) -> PolicyLoss:
    """A loss of ``losses.LOSSES`` with its options, called in one way whether it looks at whole turns or at tokens."""
    chosen = partial(loss, **options)
    if loss is gspo:
        return lambda logp_T, old_T, advantage_T, turn_T: chosen(logp_T, old_T, advantage_T, turn_T=turn_T)
    return lambda logp_T, old_T, advantage_T, turn_T: chosen(logp_T, old_T, advantage_T)


def supervised(logp_T: Tensor, batch: PackedBatch) -> Objective:
    """−logp: every trained token is right."""
    return Objective(loss_T=nll(logp_T).loss_T, statistics={})


def policy(logp_T: Tensor, batch: PackedBatch, *, loss: PolicyLoss) -> Objective:
    """A policy loss, its ratios taken against ``batch.old``.

    Statistics, as means over the trained tokens:

        ratio      of the probabilities under the weights that learn and the old ones (of a turn's, in gspo)
        low, high  1 where the ratio is beyond its lower, its upper bound
        entropy    −logp: what the sampled tokens say of the policy's entropy, unbiased where the policy sampled them;
                   1e4 for a token of probability 0, so that one does not make the mean infinite
        kl         k3(logp, reference); the reference is the sampler's policy unless there is a reference model
        gap        |logp − sampler|: what sampler and learner make of the same weights, in nats
    """
    found = loss(logp_T, batch.old, batch.advantages, batch.turns)
    still_T = logp_T.detach()
    statistics = {
        "ratio": found.ratio_T,
        "low": found.low_T,
        "high": found.high_T,
        "entropy": -still_T.clamp(min=-MAX_DIFFERENCE),
        "kl": k3(still_T, batch.reference),
        "gap": difference(still_T, batch.logprobs).abs(),
    }
    return Objective(loss_T=found.loss_T, statistics=statistics)


def corrected(logp_T: Tensor, batch: PackedBatch, *, loss: PolicyLoss, correction: Correction) -> Objective:
    """A policy loss whose tokens are weighted by how likely the learner, before its update, was to sample them.

    ``batch.old`` must hold the learner's own log-probabilities: a sampler of other kernels or lower precision is then
    told apart from the change of the weights, which the loss bounds by itself.
    """
    found = policy(logp_T, batch, loss=loss)
    weight = correction(batch.old, batch.logprobs, batch.turns)
    statistics = {"importance": weight.ratio_T, "importance_bounded": weight.bounded_T}
    return Objective(loss_T=weight.weight_T * found.loss_T, statistics={**found.statistics, **statistics})


def first_update(logp_T: Tensor, batch: PackedBatch, *, objective: Minimised) -> Objective:
    """An objective in the first update of a batch: the weights that learn are the old ones, no pass has to measure."""
    return objective(logp_T, replace(batch, old=logp_T.detach()))


def with_kl(
    logp_T: Tensor, batch: PackedBatch, *, objective: Minimised, penalty: Penalty, coefficient: float
) -> Objective:
    """An objective and β times the divergence from ``batch.reference``."""
    found = objective(logp_T, batch)
    return found._replace(loss_T=found.loss_T + coefficient * penalty(logp_T, batch.reference))
