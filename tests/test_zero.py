"""What DeepSpeed holds, by hand; ``benchmarks/plan.py`` compares it with what DeepSpeed really takes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.planning.formulas import Part, Weights
from condensegrpo.planning.zero import BUCKET, GATHERED, MOMENTS, DeepSpeedMemory, Device, deepspeed_memory

WHOLE = Weights(trainable=1000, frozen=0, element=4)
NARROW = Weights(trainable=1000, frozen=0, element=2)


def of(
    weights: Weights, stage: int, *, ranks: int = 1, device: Device = "gpu", several: bool = True
) -> DeepSpeedMemory:
    return deepspeed_memory(weights, stage=stage, ranks=ranks, device=device, embedding=100, several=several)


def total(parts: tuple[Part, ...]) -> int:
    return sum(part.bytes for part in parts)


def test_stage_0_holds_16_bytes_of_a_parameter_in_a_step() -> None:
    """4 weight, 8 moments, 4 gradient; and the reduction over ranks copies the gradients once."""
    found = of(WHOLE, 0)
    assert total(found.always) == 12_000
    assert total(found.forward) == total(found.ending) == 4000
    assert total(found.stepping) == 8000


def test_a_single_micro_batch_begins_without_gradients_and_ends_without_that_of_the_embedding() -> None:
    found = of(WHOLE, 0, several=False)
    assert (total(found.forward), total(found.ending)) == (0, 3600)


def test_stages_1_and_2_keep_masters_even_of_float32() -> None:
    assert total(of(WHOLE, 1).always) == total(of(WHOLE, 2).always) == 4000 + 4000 + 8000
    assert total(of(WHOLE, 1, ranks=4).always) == 4000 + 1000 + 2000


def test_bfloat16_below_stage_2_sums_gradients_in_fp32_on_every_rank() -> None:
    """2 weights, 4/N masters, 8/N moments, 4 sums of gradients, and 2 of fresh ones."""
    for stage in (0, 1):
        found = of(NARROW, stage, ranks=2)
        assert total(found.always) == 2000 + 2000 + 4000 + 4000
        assert total(found.forward) == 2000


def test_stage_2_sums_a_share_of_the_gradients() -> None:
    """4/N sums and a bucket of 2; at the end of backward the bucket holds all gradients but the embedding's."""
    found = of(NARROW, 2, ranks=2, device="cpu")
    assert total(found.forward) == 2000
    assert total(found.ending) == 2000 + 1800
    assert total(found.stepping) == 2000 + 2000 + 2000 + 400
    assert total(of(NARROW, 2, ranks=2).forward) == 2000 + 2000  # a GPU hands the whole bucket out at once


def test_stage_3_shares_everything_but_the_bucket_and_what_is_gathered() -> None:
    """(4 weights + 4 masters + 8 moments + 4 gradients)/N, a bucket of 4; gathered 4, reduced 4."""
    found = of(WHOLE, 3, ranks=4)
    assert total(found.always) == 20_000 // 4 + 4000
    assert found.forward == (Part("gathered weights", 4000),)
    assert total(found.stepping) == 4000 + 4000
    assert of(WHOLE, 3, ranks=1).forward == ()  # one rank has everything already


def test_gloo_reduces_a_copy() -> None:
    assert total(of(WHOLE, 3, device="cpu").stepping) - total(of(WHOLE, 3).stepping) == 4000


def test_buckets_and_gathered_weights_have_an_end() -> None:
    large = Weights(trainable=8 * 10**9, frozen=0, element=2)
    found = deepspeed_memory(large, stage=3, ranks=8, device="gpu", embedding=10**9, several=True)
    assert found.always[-1] == Part("bucket", 2 * BUCKET)
    assert found.forward == (Part("gathered weights", 2 * GATHERED),)


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    half = Weights(trainable=500, frozen=500, element=4)
    for stage in (0, 1, 2):
        some, every = of(half, stage), of(WHOLE, stage)
        assert some.always[0] == every.always[0] == Part("weights", 4000)
        assert total(some.always[1:]) * 2 == total(every.always[1:])
        assert total(some.forward) < total(every.forward)


def test_frozen_weights_are_neither_flattened_nor_reduced() -> None:
    """300 of 1000 train: 300 are there twice while the engine is made, and a bucket holds 300."""
    adapted = Weights(trainable=300, frozen=700, element=4)
    for stage in (1, 2):
        assert of(adapted, stage).opening[0] == Part("weights, as loaded", 1200)
        assert Part("bucket", 1200) in of(adapted, stage).forward
    assert of(adapted, 3).opening[0] == Part("weights, as loaded", 4000)  # stage 3 parts frozen ones as well
    assert Part("bucket", 1200) in of(adapted, 3).always


@pytest.mark.parametrize("weights", [WHOLE, NARROW])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_moments_are_told_apart_by_name(weights: Weights, stage: int) -> None:
    assert [part.bytes for part in of(weights, stage).always if part.name == MOMENTS] == [8000]


@settings(max_examples=50)
@given(
    parameters=st.integers(200, 10**10),
    element=st.sampled_from((2, 4)),
    stage=st.integers(0, 3),
    ranks=st.integers(1, 64),
    device=st.sampled_from(("cpu", "gpu")),
)
def test_more_ranks_and_later_stages_never_hold_more_for_good(
    parameters: int, element: int, stage: int, ranks: int, device: Device
) -> None:
    weights = Weights(trainable=parameters, frozen=0, element=element)

    def lasting(stage: int, ranks: int) -> int:
        found = deepspeed_memory(weights, stage=stage, ranks=ranks, device=device, embedding=100, several=True)
        return sum(part.bytes for part in found.always if part.name != "bucket")

    assert lasting(stage, 2 * ranks) <= lasting(stage, ranks)
    sums = 4 * -(-parameters // ranks)  # which stage 2 holds between micro-batches only
    assert lasting(3, ranks) <= lasting(2, ranks) + sums
    assert lasting(2, ranks) <= lasting(1, ranks)
