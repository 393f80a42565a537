"""Losses per trained token, and KL terms. Pure functions of tensors; torch only.

Legend of the suffix: ``_T`` trained tokens. All columns are (T,), of trained tokens only, and T may be 0:

    logp_T       float, nats, log-probability of the token under the weights that learn; carries the gradient
    old_T        float, nats, under the weights that ratios are taken against; no gradient
    advantage_T  float, of the token's turn; no gradient
    turn_T       int, the token's turn

A log-probability of −inf is legal and means probability 0 (a token that another temperature, precision or engine rules
out). A token of probability 0 for the learner has no gradient under any of these losses; one of probability 0 for the
sampler alone has the largest ratio. NaN and +inf are faults of a model: they are not hidden here, so that an optimiser
step that meets one is refused.

    @loss(summary="−A·logp of the likely tokens alone", formula="l = −A·logp where logp > floor, else 0")
    def likely(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, *, floor: float = -5.0) -> TokenLoss:
        ...

The signature declares the rest: with a keyword ``turn_T`` the loss of a token depends on the other tokens of its turn;
all other keywords are options, whose annotations say which values are allowed. A loss sees the tokens of one
micro-batch: the loss of a token must not depend on those of other turns (``condensegrpo.algorithms.invariance``).
``objective.py`` puts loss, KL term, importance correction and weights together.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

LowerBound = Annotated[float, Ge(0), Le(1)]  # the ratio's lower bound is 1 less this
UpperBound = Annotated[float, Ge(0)]  # the ratio's upper bound is 1 more than this

MAX_LOG_RATIO = 20.0  # nats; e^20 = 5e8 is finite in float32 and bfloat16
MAX_DIFFERENCE = 1e4  # nats; what an infinite difference counts as, so that +inf and −inf of a turn do not make NaN
COLUMNS = ("logp_T", "old_T", "advantage_T", "turn_T")  # those that the trainer supplies


class TokenLoss(NamedTuple):
    """The loss of every trained token, with statistics that carry no gradient; sum them, then divide by the tokens."""

    loss_T: Tensor  # float, not yet weighted
    ratio_T: Tensor  # float, π(token) / π_old(token), or its turn's; what the bounds apply to
    low_T: Tensor  # bool, the lower bound acts: no gradient (``clipped``, ``gspo``), or a raised factor (``cispo``)
    high_T: Tensor  # bool, the upper bound acts: no gradient (``clipped``, ``gspo``), or a lowered factor (``cispo``)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlugin:
    """A loss of trained tokens, as ``loss`` declares it."""

    function: Callable[..., TokenLoss]
    summary: str  # one line for tables and --help
    formula: str  # for display

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def whole_turns(self) -> bool:
        """Whether the loss of a token depends on the other tokens of its turn."""
        return "turn_T" in inspect.signature(self.function).parameters

    @property
    def options(self) -> tuple[str, ...]:
        """The keywords that a configuration may set."""
        return tuple(name for name in inspect.signature(self.function).parameters if name not in COLUMNS)

    def __call__(
        self, logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, *, turn_T: Tensor | None = None, **options: object
    ) -> TokenLoss:
        """The loss of every trained token of a micro-batch; T may be 0.

        Args:
            logp_T: float, nats, under the weights that learn; carries the gradient.
            old_T: float, nats, under the weights it was sampled from; no gradient.
            advantage_T: float, of the token's turn; no gradient.
            turn_T: int, the token's turn: any labels, one for all tokens of a turn and no two turns the same. Losses
                of single tokens do without.
            options: of the loss.

        Raises:
            ValueError: columns of different shapes, turns that are not integers, or that it returned something else.
        """
        doing = f"computing the loss {self.name}"
        check_columns(doing, logp_T=logp_T, old_T=old_T, advantage_T=advantage_T)
        if self.whole_turns:
            if turn_T is None:
                raise ValueError(f"{doing}: it needs turn_T, the turn of every token.")
            check_columns(doing, logp_T=logp_T, turn_T=turn_T)
            check_turns(doing, turn_T)
            options = {"turn_T": turn_T, **options}
        value = self.function(logp_T, old_T, advantage_T, **options)
        shapes = [getattr(column, "shape", None) for column in value] if isinstance(value, TokenLoss) else []
        if not shapes or any(shape != logp_T.shape for shape in shapes):
            found = " ".join(repr(value).split())[:80]
            raise ValueError(f"it returned {found}, wanted a TokenLoss with one entry a token in every column")
        return value


def loss(*, summary: str, formula: str) -> Callable[[Callable[..., TokenLoss]], LossPlugin]:
    """Declares a loss; its name is that of the function.

    Args:
        summary: one line for tables.
        formula: for display; may have several lines.
    """
    return lambda function: LossPlugin(function=function, summary=summary, formula=formula)


@loss(summary="PPO's surrogate, clipped per token (default)", formula="l = −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A)")
def clipped(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: LowerBound = 0.2,
    clip_high: UpperBound = 0.2,
    dual_clip: Annotated[float, Gt(1)] | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347, eq. 7), with bounds of their own on either side.

        ρ = exp(clip(logp − old, ±20))
        l = −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A)
        dual clip (https://arxiv.org/abs/1912.09729):  l = min(l, −c·A)  where A < 0

    A token sampled under the very weights that learn has ρ = 1 and the gradient −A·∇logp.

    Args:
        clip_low: in [0, 1]; the ratio's lower bound is 1 − clip_low, for A < 0.
        clip_high: at least 0; the ratio's upper bound is 1 + clip_high, for A > 0.
        dual_clip: c > 1, the ratio's upper bound for A < 0; None: no such bound.
    """
    ratio_T = bounded_exp(log_ratio(logp_T, old_T))
    value = _surrogate(ratio_T, advantage_T, clip_low, clip_high)
    if dual_clip is None:
        return value
    loss_T = torch.where(advantage_T < 0, torch.minimum(value.loss_T, -dual_clip * advantage_T), value.loss_T)
    high_T = value.high_T | ((advantage_T < 0) & (value.ratio_T > dual_clip))
    return value._replace(loss_T=loss_T, high_T=high_T)


@loss(
    summary="clipped per turn, by the turn's mean ratio",
    formula="""s = exp(clip(1/n · Σ_turn (logp − old), ±20))
l = −min(s·A, clip(s, 1 − low, 1 + high)·A)""",
)
def gspo(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    turn_T: Tensor,
    clip_low: LowerBound = 3e-4,
    clip_high: UpperBound = 4e-4,
) -> TokenLoss:
    """GSPO (https://arxiv.org/abs/2507.18071, sec. 4) with the turn as the sequence: one ratio for all of its tokens.

        s = exp(clip(1/n · Σ_turn (logp − old), ±20))         n tokens in the turn
        l = −min(s·A, clip(s, 1 − low, 1 + high)·A)           for each of them

    The turn is the sequence because it is what was sampled from one context; the next turn's is fresh. s is a geometric
    mean, hence bounds as narrow as the paper's (3e-4 and 4e-4, sec. 5.1).

    The gradient flows through s. With equal weights w, a turn's tokens add up to −w·n·s·A, and since ∇s = s/n · Σ∇logp,
    the gradient is −w·s·A·Σ∇logp: as large as that of a token-level loss, whatever n. Unequal weights within a turn
    (an importance correction per token) act by their mean.

    Example: a turn of two tokens with logp − old = ln 4 and 0 has s = 2. With A = 1 and clip_high = 1 each token's loss
    is −2 and, for w = 1, the gradient of either logp is −2.

    Args:
        turn_T: int, the token's turn: any labels, one for all tokens of a turn and no two turns the same. All tokens of
            a turn must be in the micro-batch.
        clip_low: in [0, 1]; the turn ratio's lower bound is 1 − clip_low, for A < 0.
        clip_high: at least 0; the turn ratio's upper bound is 1 + clip_high, for A > 0.
    """
    log_ratio_T = log_ratio(logp_T, old_T)
    size_T = turn_sum(torch.ones_like(log_ratio_T), turn_T)
    return _surrogate(bounded_exp(turn_sum(log_ratio_T, turn_T) / size_T), advantage_T, clip_low, clip_high)


@loss(
    summary="the ratio bounded as a constant weight, no token without gradient",
    formula="l = −sg(clip(ρ, 1 − low, 1 + high))·A·logp            sg: without gradient",
)
def cispo(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: LowerBound = 1.0,
    clip_high: UpperBound = 4.0,
) -> TokenLoss:
    """CISPO (MiniMax-M1, https://arxiv.org/abs/2506.13585): the ratio is bounded, and no token loses its gradient.

        ρ = exp(clip(logp − old, ±20))
        l = −sg(clip(ρ, 1 − low, 1 + high))·A·logp            sg: without gradient

    The gradient is −clip(ρ, 1 − low, 1 + high)·A·∇logp, and ρ > 0: a rare token that the update made likely is held to
    a factor, where ``clipped`` drops it. The defaults leave the lower side open, as the paper does, and bound ρ by 5; a
    lower bound above 0 would push on tokens that the policy has already moved away from.

    Example: logp = ln ½ with ρ = 8 and A = 1 has the factor 5: loss 5·ln 2 = 3.47, gradient −5.

    Args:
        clip_low: in [0, 1]; the factor's lower bound is 1 − clip_low; 1: none.
        clip_high: at least 0; the factor's upper bound is 1 + clip_high.
    """
    ratio_T = bounded_exp(log_ratio(logp_T.detach(), old_T))
    factor_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(
        loss_T=_likelihood(logp_T, factor_T * advantage_T),
        ratio_T=ratio_T,
        low_T=ratio_T < 1 - clip_low,
        high_T=ratio_T > 1 + clip_high,
    )


@loss(summary="−A·logp, for one update a batch", formula="l = −A·logp")
def reinforce(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> TokenLoss:
    """REINFORCE: l = −A·logp, the policy gradient for tokens sampled under the weights that learn.

    Nothing is bounded and nothing corrects for weights that have moved on since; the ratio is only reported.
    """
    never_T = torch.zeros_like(logp_T, dtype=torch.bool)
    return TokenLoss(
        loss_T=_likelihood(logp_T, advantage_T),
        ratio_T=bounded_exp(log_ratio(logp_T.detach(), old_T)),
        low_T=never_T,
        high_T=never_T,
    )


def _surrogate(ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """−min(ρ·A, clip(ρ, 1 − low, 1 + high)·A), with the gradient of ρ."""
    loss_T = torch.maximum(-ratio_T * advantage_T, -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T)
    still_T = ratio_T.detach()
    return TokenLoss(
        loss_T=loss_T,
        ratio_T=still_T,
        low_T=(advantage_T < 0) & (still_T < 1 - clip_low),
        high_T=(advantage_T > 0) & (still_T > 1 + clip_high),
    )


def _likelihood(logp_T: Tensor, factor_T: Tensor) -> Tensor:
    """−factor·logp; 0 where logp is −inf, since 0·inf would be NaN and the gradient there is undefined."""
    return -factor_T * torch.where(logp_T.isneginf(), 0.0, logp_T)


# The distance of the policy π to a reference model, per trained token. The estimators k1, k2 and k3 of John Schulman
# (http://joschu.net/blog/kl-approx.html) estimate KL(π‖ref) from tokens sampled by π. Here they are loss terms, and
# their gradients are not those of the KL that they estimate (https://arxiv.org/abs/2506.09477). On policy, in
# expectation over the next token in its context:
#
#           value              gradient              as a loss term
#     k1    KL(π‖ref)          0                     adds noise, does not regularise
#     k2    ½E[(log π/ref)²]   ∇KL(π‖ref)            the reverse KL: the policy avoids what ref makes unlikely
#     k3    KL(π‖ref)          ∇KL(ref‖π)            the forward KL: the policy keeps covering what ref makes likely
#
# Use k2 to stay near the reference, k3 for parity with GRPO (https://arxiv.org/abs/2402.03300, eq. 4), and k1 for
# logging only. All three consider the next token alone and not how it changes later contexts. Off policy the table
# holds only after an importance correction. reference_T has no gradient, and neither has a difference beyond ±1e4,
# which counts as that.


def k1(logp_T: Tensor, reference_T: Tensor) -> Tensor:
    """k = logp − ref: unbiased and of either sign; its gradient ∇logp has expectation 0 on policy.

    Example: logp = ln ½, ref = ln ¼: k = ln 2 = 0.693, gradient 1.
    """
    check_columns("computing the KL term k1", logp_T=logp_T, reference_T=reference_T)
    return log_ratio(logp_T, reference_T)


def k2(logp_T: Tensor, reference_T: Tensor) -> Tensor:
    """k = ½(logp − ref)²: never negative, biased as a value; its gradient (logp − ref)·∇logp is that of KL(π‖ref).

    Example: logp = ln ½, ref = ln ¼: k = ½(ln 2)² = 0.240, gradient 0.693.
    """
    check_columns("computing the KL term k2", logp_T=logp_T, reference_T=reference_T)
    return 0.5 * log_ratio(logp_T, reference_T).square()


def k3(logp_T: Tensor, reference_T: Tensor) -> Tensor:
    """k = exp(ref − logp) − (ref − logp) − 1: unbiased, never negative; its gradient is that of KL(ref‖π).

    The gradient of a token is (1 − ref/π)·∇logp. It grows without bound where π < ref, so ref − logp is clamped to 20
    in both places: clamped in the exponential only, the linear term would push the policy away from ref.

    Example: logp = ln ½, ref = ln ¼: k = ½ + ln 2 − 1 = 0.193, gradient 1 − ½ = ½.

    Returns:
        float (T,), without gradient where ref − logp is above 20 or below −1e4.
    """
    check_columns("computing the KL term k3", logp_T=logp_T, reference_T=reference_T)
    back_T = log_ratio(reference_T, logp_T).clamp(max=MAX_LOG_RATIO)
    return back_T.expm1() - back_T  # exp(x) − 1 would lose all digits near 0, where k is x²/2


KL: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


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
