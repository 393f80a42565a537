"""The KL terms: their values by hand, and what each does as a loss, exactly, over the whole of a small vocabulary."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.losses import KL, k1, k2, k3

LOGITS = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


def one_token(term: Callable[[Tensor, Tensor], Tensor], logp: float, reference: float) -> tuple[float, float]:
    """(k, d k / d logp) of one token."""
    logp_T = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    k_T = term(logp_T, torch.tensor([reference], dtype=torch.float64))
    (gradient_T,) = torch.autograd.grad(k_T.sum(), logp_T)
    return k_T.item(), gradient_T.item()


@pytest.mark.parametrize(
    ("term", "value", "gradient"),
    [
        (k1, math.log(2), 1.0),  # ln ½ − ln ¼
        (k2, math.log(2) ** 2 / 2, math.log(2)),
        (k3, 0.5 + math.log(2) - 1, 0.5),  # ref/π = ½; 1 − ½
    ],
)
def test_a_token_likelier_than_under_the_reference(
    term: Callable[[Tensor, Tensor], Tensor], value: float, gradient: float
) -> None:
    assert one_token(term, math.log(0.5), math.log(0.25)) == pytest.approx((value, gradient))


@pytest.mark.parametrize(
    ("term", "value", "gradient"),
    [
        (k1, -math.log(4), 1.0),  # ln ⅛ − ln ½
        (k2, math.log(4) ** 2 / 2, -math.log(4)),
        (k3, 4 - math.log(4) - 1, -3.0),  # ref/π = 4; 1 − 4: wrong-signed terms of other trainers give +3
    ],
)
def test_a_token_less_likely_than_under_the_reference(
    term: Callable[[Tensor, Tensor], Tensor], value: float, gradient: float
) -> None:
    assert one_token(term, math.log(0.125), math.log(0.5)) == pytest.approx((value, gradient))


def test_the_table_names_the_terms() -> None:
    assert dict(KL) == {"k1": k1, "k2": k2, "k3": k3}


@pytest.mark.parametrize("name", sorted(KL))
def test_a_policy_equal_to_its_reference_has_no_distance(name: str) -> None:
    assert one_token(KL[name], -1.25, -1.25) == (0, 1 if name == "k1" else 0)


def expectation(name: str, logits: list[float], reference: list[float]) -> tuple[float, list[float]]:
    """(E k, E ∂k/∂logits) over every token of the vocabulary, each counted with its probability; nothing is sampled."""
    logits_V = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logp_V = logits_V.log_softmax(0)
    ref_V = torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    expected = (logp_V.detach().exp() * KL[name](logp_V, ref_V)).sum()
    (gradient_V,) = torch.autograd.grad(expected, logits_V)
    return expected.item(), gradient_V.tolist()


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def reverse_kl(policy: list[float], reference: list[float]) -> float:
    """KL(π‖ref) = Σ π ln(π/ref)."""
    return sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))


@settings(max_examples=50)
@given(LOGITS, LOGITS)
def test_k1_and_k3_are_unbiased_values_of_the_reverse_kl(logits: list[float], reference: list[float]) -> None:
    wanted = reverse_kl(probabilities(logits), probabilities(reference))
    assert expectation("k1", logits, reference)[0] == pytest.approx(wanted, abs=1e-12)
    assert expectation("k3", logits, reference)[0] == pytest.approx(wanted, abs=1e-12)


def test_k2_is_a_biased_value() -> None:
    # π = ½, ½ and ref = ⅘, ⅕: KL = ½ ln ⅝ + ½ ln 5/2 = 0.2231; ½E[ln²] = ¼(0.4700² + 0.9163²) = 0.2651
    found, _ = expectation("k2", [0, 0], [math.log(4), 0])
    assert found == pytest.approx(0.2651, abs=1e-4)
    assert reverse_kl([0.5, 0.5], [0.8, 0.2]) == pytest.approx(0.2231, abs=1e-4)


@settings(max_examples=50)
@given(LOGITS, LOGITS)
def test_k1_as_a_loss_regularises_nothing(logits: list[float], reference: list[float]) -> None:
    assert expectation("k1", logits, reference)[1] == pytest.approx([0] * 4, abs=1e-12)


@settings(max_examples=50)
@given(LOGITS, LOGITS)
def test_k2_as_a_loss_is_the_reverse_kl(logits: list[float], reference: list[float]) -> None:
    # ∂KL(π‖ref)/∂z_v = π_v·(ln(π_v/ref_v) − KL)
    policy, target = probabilities(logits), probabilities(reference)
    whole = reverse_kl(policy, target)
    wanted = [p * (math.log(p / q) - whole) for p, q in zip(policy, target, strict=True)]
    assert expectation("k2", logits, reference)[1] == pytest.approx(wanted, abs=1e-12)


@settings(max_examples=50)
@given(LOGITS, LOGITS)
def test_k3_as_a_loss_is_the_forward_kl(logits: list[float], reference: list[float]) -> None:
    # KL(ref‖π) is a cross-entropy up to a constant: ∂/∂z_v = π_v − ref_v
    wanted = [p - q for p, q in zip(probabilities(logits), probabilities(reference), strict=True)]
    assert expectation("k3", logits, reference)[1] == pytest.approx(wanted, abs=1e-12)


def test_reverse_and_forward_pull_differently() -> None:
    # ref = ½, ¼, ¼; π = ¼, ½, ¼. By hand: KL = ¼ ln ½ + ½ ln 2 = 0.1733
    # k2: ¼(−0.6931 − 0.1733), ½(0.6931 − 0.1733), ¼(0 − 0.1733); k3: −¼, ¼, 0, which leaves the third alone
    logits, reference = [0, math.log(2), 0], [math.log(2), 0, 0]
    assert expectation("k2", logits, reference)[1] == pytest.approx([-0.2166, 0.2599, -0.0433], abs=1e-4)
    assert expectation("k3", logits, reference)[1] == pytest.approx([-0.25, 0.25, 0])


@pytest.mark.parametrize(("size", "relative"), [(1e-3, 1e-3), (1e-5, 1e-1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_k3_keeps_its_digits_near_zero_in_float32(size: float, relative: float, sign: int) -> None:
    # exp(x) − x − 1 in float32 is off by 6e-8, more than all of k = x²/2 = 5e-11
    reference_T = torch.tensor([sign * size])
    assert k3(torch.zeros(1), reference_T).item() == pytest.approx(size**2 / 2, rel=relative)


@settings(max_examples=100)
@given(st.floats(-40, 0), st.floats(-40, 0))
def test_k2_and_k3_are_never_negative_and_never_push_away_from_the_reference(logp: float, reference: float) -> None:
    for term in (k2, k3):
        value, gradient = one_token(term, logp, reference)
        assert value >= 0
        assert gradient * (logp - reference) >= 0  # descending the gradient brings logp towards the reference


def test_k3_beyond_its_bound_stays_finite_and_has_no_gradient() -> None:
    # ref − logp = 30: held to 20
    assert one_token(k3, -31, -1) == pytest.approx((math.exp(20) - 21, 0))
    assert one_token(k3, -1, -31) == pytest.approx((29, 1))  # the other side needs no bound


@pytest.mark.parametrize(
    ("name", "only_learner", "only_reference"),  # (−1, −inf) and (−inf, −1), which count as ±1e4
    [("k1", 1e4, -1e4), ("k2", 5e7, 5e7), ("k3", 1e4 - 1, math.exp(20) - 21)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_zero_make_no_nan(
    name: str, only_learner: float, only_reference: float, dtype: torch.dtype
) -> None:
    logp_T = torch.tensor([-1, -math.inf, -math.inf], dtype=dtype, requires_grad=True)
    k_T = KL[name](logp_T, torch.tensor([-math.inf, -1, -math.inf], dtype=dtype))
    assert k_T.tolist() == pytest.approx([only_learner, only_reference, 0])
    (gradient_T,) = torch.autograd.grad(k_T.sum(), logp_T)
    assert gradient_T.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(KL))
@pytest.mark.parametrize("distance", [1e4, -1e4])
def test_distances_of_ten_thousand_nats_stay_finite(name: str, distance: float) -> None:
    assert all(map(math.isfinite, one_token(KL[name], -1e4 + distance, -1e4)))


@pytest.mark.parametrize("name", sorted(KL))
def test_no_tokens_have_no_distance(name: str) -> None:
    logp_T = torch.zeros(0, requires_grad=True)
    k_T = KL[name](logp_T, torch.zeros(0))
    assert k_T.shape == (0,)
    (gradient_T,) = torch.autograd.grad(k_T.sum(), logp_T)
    assert gradient_T.shape == (0,)


@pytest.mark.parametrize("name", sorted(KL))
def test_columns_of_different_lengths_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"KL term {name}: found the shapes logp_T \(2,\), reference_T \(3,\)"):
        KL[name](torch.zeros(2), torch.zeros(3))
