"""The distance of the policy to a reference model, per trained token. Pure functions of tensors; torch only.

Legend of the suffixes: ``_T`` trained tokens. π is the policy that learns, ref the reference; logs in nats.

The estimators k1, k2 and k3 of John Schulman (http://joschu.net/blog/kl-approx.html) estimate KL(π‖ref) from
tokens sampled by π. Here they are loss terms, and their gradients are not those of the KL that they estimate
(https://arxiv.org/abs/2506.09477). On policy, in expectation over the next token in its context:

          value              gradient              as a loss term
    k1    KL(π‖ref)          0                     adds noise, does not regularise
    k2    ½E[(log π/ref)²]   ∇KL(π‖ref)            the reverse KL: the policy avoids what ref makes unlikely
    k3    KL(π‖ref)          ∇KL(ref‖π)            the forward KL: the policy keeps covering what ref makes likely

Use k2 to stay near the reference, k3 for parity with GRPO (https://arxiv.org/abs/2402.03300, eq. 4), and k1 for logging
only. All three consider the next token alone and not how it changes later contexts. Off policy the table holds only
after an importance correction (``importance.py``).

Each function takes logp_T (float, nats, under the weights that learn; carries the gradient) and reference_T (without
gradient) and returns float (T,) with the gradient of logp_T. A difference beyond ±1e4 counts as that and has no
gradient. Columns of different shapes raise ValueError.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from condensegrpo.algorithms.losses.columns import MAX_LOG_RATIO, check_columns, log_ratio


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
