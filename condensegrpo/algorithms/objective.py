"""The objective: what an optimiser step minimises, put together from the losses. Torch only.

    Σ w·v·loss(logp, old, A) + Σ u·β·KL(logp, reference)          over the trained tokens of an optimiser step

w and u are the weights of a token's loss and of its KL term, equal unless ``algorithm.kl.aggregation`` says otherwise;
v is the importance weight between sampler and learner, 1 without an importance correction; β is 0 without a KL term.

Legend of the suffix: ``_T`` trained tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from torch import Tensor

from condensegrpo.algorithms.losses import KL, MAX_DIFFERENCE, LossPlugin, importance, k3
from condensegrpo.algorithms.losses.columns import log_ratio
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.algorithms.settings import Level, Mode
from condensegrpo.core.errors import PluginError
from condensegrpo.core.failures import plugin_code


class ObjectiveValue(NamedTuple):
    """The loss of every trained token, and statistics of them for the log."""

    loss_T: Tensor  # float, not yet weighted, without the KL term
    statistics: Mapping[str, Tensor]  # (T,) each, no gradient; the same names in every micro-batch of a step
    kl_T: Tensor | None = None  # float, β·KL, not yet weighted; None: there is no KL term


KL_LOSS = "kl_loss"  # statistic: what a token's KL term adds to the loss of its step

ObjectiveFunction = Callable[[Tensor, PackedBatch], ObjectiveValue]


@dataclass(frozen=True, slots=True)
class PerToken:
    """An objective in which a token's loss and statistics depend on no other token's log-probability or column.

    It may be applied to some tokens of a micro-batch at a time, which the learner's head does to save a pass
    (``learner/head.py``). Nobody can check that promise: what looks at turns, as ``gspo`` and importance weights
    of whole turns do, must not be wrapped in it.
    """

    objective: ObjectiveFunction

    def __call__(self, logp_T: Tensor, batch: PackedBatch) -> ObjectiveValue:
        """The objective itself."""
        return self.objective(logp_T, batch)


class SummedLoss(NamedTuple):
    """What some tokens add to the loss of their optimiser step."""

    loss: Tensor  # (), the sum of their weighted losses and KL terms
    statistics: dict[str, Tensor]  # (T,) each, no gradient


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchLoss:
    """What a micro-batch adds to the loss of its optimiser step, as a function of its log-probabilities."""

    objective: ObjectiveFunction
    batch: PackedBatch

    def __call__(self, logp_T: Tensor) -> SummedLoss:
        """Σ w·l + Σ u·k over the trained tokens; u·k is the statistic ``kl_loss``, if there is a KL term."""
        value = self.objective(logp_T, self.batch)
        loss, statistics = (self.batch.weights * value.loss_T).sum(), dict(value.statistics)
        if value.kl_T is None:
            return SummedLoss(loss, statistics)
        kl_T = self.batch.kl_weights * value.kl_T
        return SummedLoss(loss + kl_T.sum(), statistics | {KL_LOSS: kl_T.detach()})

    @property
    def divisible(self) -> bool:
        """Whether the parts of it add up to the whole."""
        return isinstance(self.objective, PerToken)

    def slice(self, start: int, stop: int) -> Self:
        """The loss of the trained tokens from ``start`` to before ``stop`` alone."""
        return replace(self, batch=self.batch.trained(slice(start, stop)))


def supervised(logp_T: Tensor, batch: PackedBatch) -> ObjectiveValue:
    """−logp, for supervised steps: every trained token is right."""
    return ObjectiveValue(loss_T=-logp_T, statistics={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A policy loss, with an importance correction before it and a KL term after it, as far as they are switched on."""

    loss: LossPlugin
    loss_options: Mapping[str, object] = field(default_factory=dict)
    importance_cap: float = 0.0  # bound of the importance weight; 0: no correction
    importance_level: Level = "token"
    importance_mode: Mode = "truncate"
    first_update: bool = False  # every step is the first of its batch: the old weights are those that learn
    kl_coefficient: float = 0.0  # β
    kl_estimator: str = "k3"  # one of losses.KL

    def __call__(self, logp_T: Tensor, batch: PackedBatch) -> ObjectiveValue:
        """The loss of every trained token of a micro-batch.

        Ratios are taken against ``batch.old``, or in a first update against ``logp_T`` itself, so that no pass has to
        measure it. With an importance correction ``batch.old`` must hold the learner's own log-probabilities: the
        weight then corrects for the sampler's kernels and precision, and the loss bounds the change of the weights.

        Statistics, reported as means over the trained tokens:

            ratio      π(token) / π_old(token), or the ratio of its turn (gspo)
            low, high  1 where the ratio is beyond its lower, its upper bound
            entropy    −logp: an estimate of the policy's entropy, unbiased where the policy sampled the tokens;
                       1e4 for a token of probability 0, so that the mean stays finite
            kl         k3(logp, reference); the reference is the sampler's policy unless there is a reference model
            gap        |logp − sampler|: how far sampler and learner disagree about the same weights, in nats

        and with an importance correction ``importance``, the weight before its bound, and ``importance_bounded``, 1
        where the bound changed it.

        Raises:
            PluginError: the loss raised, or returned something else than the losses of these tokens.
        """
        old_T = logp_T.detach() if self.first_update else batch.old
        with plugin_code("computing the loss of a step", PluginError):
            value = self.loss(logp_T, old_T, batch.advantages, turn_T=batch.turns, **self.loss_options)
        loss_T, detached_T = value.loss_T, logp_T.detach()
        statistics = {
            "ratio": value.ratio_T,
            "low": value.low_T,
            "high": value.high_T,
            "entropy": -detached_T.clamp(min=-MAX_DIFFERENCE),
            "kl": k3(detached_T, batch.reference),
            "gap": log_ratio(detached_T, batch.logprobs).abs(),
        }
        if self.importance_cap:
            weights = importance(
                old_T,
                batch.logprobs,
                batch.turns,
                cap=self.importance_cap,
                level=self.importance_level,
                mode=self.importance_mode,
            )
            loss_T = weights.weight_T * loss_T
            statistics |= {"importance": weights.ratio_T, "importance_bounded": weights.bounded_T}
        kl_T = self.kl_coefficient * KL[self.kl_estimator](logp_T, batch.reference) if self.kl_coefficient else None
        return ObjectiveValue(loss_T=loss_T, statistics=statistics, kl_T=kl_T)

    @property
    def tokenwise(self) -> bool:
        """Whether a token's loss depends on no other token, so that ``PerToken`` may wrap the objective."""
        return not (self.loss.whole_turns or (self.importance_cap and self.importance_level == "turn"))
