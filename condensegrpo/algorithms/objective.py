"""The objective: the loss that an optimiser step minimises, put together from losses, weights and corrections.

    Σ w·v·loss(logp, old, A) + Σ u·β·KL(logp, reference)          over the trained tokens of an optimiser step

w and u are the weights of a token's loss and of its KL term, equal unless ``algorithm.kl.aggregation`` says otherwise;
v is the importance weight between sampler and learner, 1 without an importance correction; β is 0 without a KL term.

Every weight is fixed before the first micro-batch from totals over the whole step, all ranks and trajectories without
signal included, so that no micro-batch divides by anything of its own: the gradient is the same however the rows are
packed, ordered or shared out.

Legend of the suffixes: ``_T`` trained tokens of a micro-batch, ``_N`` trajectories, ``_K`` turns. Torch only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from condensegrpo.algorithms.losses import (
    KL,
    MAX_DIFFERENCE,
    LossPlugin,
    bounded_exp,
    check_columns,
    check_turns,
    k3,
    log_ratio,
    turn_sum,
)
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.algorithms.settings import Aggregation, Level, Mode
from condensegrpo.core.errors import PluginError
from condensegrpo.core.failures import plugin_code

KL_LOSS = "kl_loss"  # statistic: the KL term of a token, as it is added to the loss of its step


class ObjectiveValue(NamedTuple):
    """The loss of every trained token, and statistics of them for the log."""

    loss_T: Tensor  # float, not yet weighted, without the KL term
    statistics: Mapping[str, Tensor]  # (T,) each, no gradient; the same names in every micro-batch of a step
    kl_T: Tensor | None = None  # float, β·KL, not yet weighted; None: there is no KL term


ObjectiveFunction = Callable[[Tensor, PackedBatch], ObjectiveValue]


@dataclass(frozen=True, slots=True)
class PerToken:
    """An objective in which a token's loss and statistics depend on no other token's log-probability or column.

    It may be applied to some tokens of a micro-batch at a time, which the learner's head does to save a pass
    (``learner/head.py``). That promise cannot be checked: an objective that looks at turns, as ``gspo`` and importance
    weights of whole turns do, must not be wrapped in it.
    """

    objective: ObjectiveFunction

    def __call__(self, logp_T: Tensor, batch: PackedBatch) -> ObjectiveValue:
        """The objective itself."""
        return self.objective(logp_T, batch)


class SummedLoss(NamedTuple):
    """The part of some tokens in the loss of their optimiser step."""

    loss: Tensor  # (), the sum of their weighted losses and KL terms
    statistics: dict[str, Tensor]  # (T,) each, no gradient


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchLoss:
    """The part of a micro-batch in the loss of its optimiser step, as a function of its log-probabilities."""

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
    def tokenwise(self) -> bool:
        """Whether no token's loss depends on another token, so that the losses of parts add up to it."""
        return isinstance(self.objective, PerToken)

    def part(self, tokens: slice) -> Self:
        """The loss of some trained tokens alone."""
        return replace(self, batch=self.batch.select(tokens))


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

        An error in the loss, or a value that is no ``TokenLoss`` of these tokens, is a ``PluginError``.
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


class ImportanceWeights(NamedTuple):
    """The correction of every trained token, with what to log about it; nothing carries a gradient."""

    weight_T: Tensor  # float >= 0, the factor of the token's loss
    ratio_T: Tensor  # float > 0, learner / sampler before it was bounded
    bounded_T: Tensor  # bool, the bound changed it


def importance(
    learner_T: Tensor,
    sampler_T: Tensor,
    turn_T: Tensor,
    *,
    cap: float,
    level: Level,
    mode: Mode,
) -> ImportanceWeights:
    """The factor of each token's loss by which tokens of the sampler count as if the learner had drawn them.

    Two engines give one token different probabilities even under equal weights: other kernels, another precision. The
    policy gradient of a token that was drawn from the sampler's distribution is right when multiplied by
    learner/sampler, and that factor is bounded because a rare token can make it arbitrarily large: truncated importance
    sampling (TIS) cuts it off, masking (as IcePop does, https://arxiv.org/abs/2510.18855) leaves the token out.
    Nothing here has a gradient. A correction of ``clipped`` presupposes that ``clipped`` is given the learner's own
    log-probabilities as ``old``; given the sampler's, its ratio already includes the difference.

                  token                                turn
        ratio     exp(clip(learner − sampler, ±20))    exp(clip(Σ_turn (learner − sampler), ±20))

                  truncate                             mask
        weight    min(ratio, cap)                      ratio where 1/cap <= ratio <= cap, else 0

    A token ratio has little variance and is biased, since it leaves out what went before in the turn; a turn ratio is
    unbiased before its bound, and most of it lies beyond any bound once turns are long.

    Example: learner − sampler = [ln 3, ln ½] in one turn, cap 2. By token: ratios [3, ½], truncated [2, ½] and masked
    [0, ½]. By turn: both 3/2, which neither bound changes.

    Args:
        learner_T: float, nats, log-probability of the token under the weights that sampled it, in the learner's engine.
        sampler_T: float, nats, as the sampler reported it, under the distribution it drew from.
        turn_T: int, the token's turn: any labels; all tokens of a turn must be here.
        cap: finite, at least 1; 1 truncates to at most 1, and masks all but equal probabilities.
        level: whether the ratio is that of a token or of its whole turn.
        mode: whether a weight beyond the bound is cut to it, or the token is left out.
    """
    doing = "computing the importance correction"
    check_columns(doing, learner_T=learner_T, sampler_T=sampler_T, turn_T=turn_T)
    check_turns(doing, turn_T)
    if not 1 <= cap < math.inf:
        raise ValueError(
            f"{doing}: cap is {cap}, wanted a finite number >= 1, or none (0 in a configuration) for no correction."
        )
    log_ratio_T = log_ratio(learner_T.detach(), sampler_T)  # 0 where both give the token probability 0
    ratio_T = bounded_exp(turn_sum(log_ratio_T, turn_T) if level == "turn" else log_ratio_T)
    if mode == "truncate":  # no token is lost, and the bias is that of the tokens above the cap
        weight_T = ratio_T.clamp(max=cap)
    else:  # tokens on which the two engines disagree train nothing
        weight_T = torch.where((ratio_T >= 1 / cap) & (ratio_T <= cap), ratio_T, 0.0)
    return ImportanceWeights(weight_T=weight_T, ratio_T=ratio_T, bounded_T=weight_T != ratio_T)


class Totals(NamedTuple):
    """The denominators of one optimiser step, over all ranks. The totals of the ranks add up field by field."""

    trajectories: float  # B, those without turns or without signal included
    turns: float  # Σ K_i
    tokens: float  # Σ N_i, sampled tokens


def totals(tokens_NK: Tensor, turns_N: Tensor) -> Totals:
    """The totals of some trajectories.

    Args:
        tokens_NK: sampled tokens of each turn, 0 beyond the trajectory's turns.
        turns_N: how many turns it has; a turn that sampled nothing counts.
    """
    return Totals(trajectories=len(turns_N), turns=float(turns_N.sum()), tokens=float(tokens_NK.sum()))


def token_weights(mode: Aggregation, tokens_NK: Tensor, *, totals: Totals, max_tokens: float | None = None) -> Tensor:
    """The weight in the optimiser step's loss of each trained token of turn t of trajectory i.

    With n_it sampled tokens in the turn and N_i in the trajectory:

        trajectory_constant  1 / (B·L)          L = max_tokens, a constant: Dr. GRPO over the trajectory, unbiased
        trajectory_mean      1 / (B·N_i)        every trajectory weighs the same
        token_mean           1 / Σ_i N_i        every token weighs the same (DAPO)
        turn_mean            1 / (ΣK_i · n_it)  every turn weighs the same; rewards splitting turns, for parity only

    Args:
        tokens_NK: sampled tokens n_it, 0 beyond the trajectory's turns.
        totals: B, ΣK_i and ΣN_i of the whole optimiser step over all ranks, and not of these N trajectories alone.
        max_tokens: L > 0, which only ``trajectory_constant`` needs.

    Returns:
        float64 (N, K), 0 for a turn that sampled nothing and beyond the trajectory's turns.
    """
    count_NK = tokens_NK.double()
    match mode:
        case "trajectory_constant":
            if max_tokens is None or not 0 < max_tokens < math.inf:
                raise ValueError(f"the aggregation trajectory_constant needs max_tokens > 0, found {max_tokens}")
            weight_NK = torch.full_like(count_NK, 1 / (max(totals.trajectories, 1) * max_tokens))
        case "trajectory_mean":
            weight_NK = 1 / (max(totals.trajectories, 1) * count_NK.sum(dim=1, keepdim=True).clamp(min=1))
        case "token_mean":
            weight_NK = torch.full_like(count_NK, 1 / max(totals.tokens, 1))
        case "turn_mean":
            weight_NK = 1 / (max(totals.turns, 1) * count_NK.clamp(min=1))
    return torch.where(count_NK > 0, weight_NK, 0.0)


def summary_weight(weight_NK: Tensor, tokens_NK: Tensor, condense_NK: Tensor) -> tuple[float, float]:
    """The weight of all tokens, and that of the tokens of condense turns: Σ w·n over some trajectories.

    The sums of the ranks add up.

    Args:
        condense_NK: bool, whether the turn wrote a summary.
    """
    mass_NK = weight_NK * tokens_NK
    return float(mass_NK.sum()), float(mass_NK[condense_NK].sum())


def with_summary_share(
    weight_NK: Tensor, condense_NK: Tensor, *, share: float, total: float, summaries: float
) -> Tensor:
    """The weights scaled so that the tokens of condense turns have a share s of all weight; the sum stays the same.

        w · s·W/W_c in condense turns, w · (1 − s)·W/(W − W_c) in the others

    Without weight on one of the two kinds the weights are returned unchanged.

    Args:
        weight_NK: of ``token_weights``.
        condense_NK: bool.
        share: s in [0, 1].
        total: W, of the whole optimiser step over all ranks, see ``summary_weight``.
        summaries: W_c, likewise.
    """
    if not 0 < summaries < total:
        return weight_NK
    return weight_NK * torch.where(condense_NK, share * total / summaries, (1 - share) * total / (total - summaries))
