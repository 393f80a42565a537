"""What DeepSpeed holds of a model on one device, in bytes, at every ZeRO stage: pure formulas of numbers.

Read from DeepSpeed 0.19's optimisers as ``learner/engine.py`` sets them up. Which one that is:

    float32   stage 0   torch's own AdamW on the parameters
    bfloat16  stage 0, 1   BF16_Optimizer: fp32 gradients of everything on every rank
              stage 1 (float32), 2   DeepSpeedZeroOptimizer: weights in one flat buffer, masters even of float32
              stage 3   DeepSpeedZeroOptimizer_Stage3: everything in N parts

Legend: P trainable parameters, N ranks, B elements of the bucket, V·H the embedding, e bytes of an element.
Frozen weights lie on every rank as they are, below stage 3; only trainable ones are flattened and have a bucket.
"""

from typing import Literal, NamedTuple

from condensegrpo.learner.settings import BUCKET, Offload
from condensegrpo.planning.formulas import FLOAT, Part, Weights

GATHERED = 1_000_000_000  # elements that stage 3 keeps gathered at most (stage3_max_live_parameters)

MOMENTS = "Adam's moments"
MASTERS, SUMS, REDUCTION = "fp32 masters", "gradients, summed", "reduction over ranks"

Device = Literal["cpu", "gpu"]


class DeepSpeedMemory(NamedTuple):
    """What there is always, and what comes on top of it at the moments of an optimiser step."""

    always: tuple[Part, ...]
    opening: tuple[Part, ...]  # instead of the moments, while the engine is made
    forward: tuple[Part, ...]  # in the forward pass of the last micro-batch
    ending: tuple[Part, ...]  # at the end of its backward pass
    stepping: tuple[Part, ...]  # in the reduction over ranks and the optimiser's step

    def without(self, *names: str) -> "DeepSpeedMemory":
        """The same, some parts left out."""
        return DeepSpeedMemory(*(tuple(part for part in parts if part.name not in names) for parts in self))


def deepspeed_memory(
    weights: Weights,
    *,
    stage: int,
    ranks: int,
    device: Device,
    embedding: int,
    several: bool,
    offload: Offload = "none",
) -> DeepSpeedMemory:
    """What DeepSpeed holds on each of ``ranks`` devices.

    Args:
        several: a step has more than one micro-batch, so that gradients of earlier ones are there from the start. With
            a single one backward ends with those of all parameters but the embedding, which comes last.
        device: a GPU's allocator hands a bucket out as a whole; main memory is taken only where it is written, so that
            on a CPU a bucket counts when gradients have reached it.
        embedding: elements of the largest trainable parameter.
        offload: what is in main memory instead of a GPU's; on a CPU that is the same.
    """
    on_gpu = device == "gpu"
    if stage == 3:
        gathers = ranks > 1 or offload == "optimiser_and_weights"
        memory = _everything_sharded(weights, ranks, on_gpu, gathers=gathers)
    elif stage == 2:
        memory = _gradients_sharded(weights, ranks, embedding, several, on_gpu)
    else:
        memory = _gradients_whole(weights, stage, ranks, embedding, several, on_gpu, offload)
    if offload == "none" or not on_gpu:
        return memory
    moved = memory.without(MASTERS, "masters' copy", MOMENTS, SUMS)
    return moved.without("weights") if offload == "optimiser_and_weights" else moved


def _bucket(weights: Weights) -> Part:
    return Part("bucket", weights.element * min(BUCKET, weights.trainable))


def _optimiser_state(elements: int) -> tuple[Part, Part]:
    return Part(MASTERS, FLOAT * elements), Part(MOMENTS, 2 * FLOAT * elements)


def _flattening(weights: Weights) -> Part:
    """Trainable weights before they are flattened."""
    return Part("weights, as loaded", weights.element * weights.trainable)


def _gradients_whole(
    weights: Weights, stage: int, ranks: int, embedding: int, several: bool, on_gpu: bool, offload: Offload
) -> DeepSpeedMemory:
    """Stages 0 and 1: every rank has the gradients of all parameters, and reduces them at the end of the step.

    In float32 they add up where they are; stage 1 sends them through the bucket. BF16_Optimizer has fresh ones in
    bfloat16 until the next optimiser step, and their sums in fp32 always.
    """
    parameters, narrow = weights.trainable, weights.element != FLOAT and offload == "none"
    plain = stage == 0 and weights.element == FLOAT  # torch's AdamW
    bucket = () if plain or narrow else (_bucket(weights),)
    reduced = bucket[0].bytes if bucket else FLOAT * min(parameters, BUCKET)
    reserved = bucket if on_gpu else ()
    masters, moments = _optimiser_state(-(-parameters // ranks))
    state = (masters, moments, Part(SUMS, FLOAT * parameters)) if narrow else (masters, moments)
    size = weights.element if narrow else FLOAT  # of a fresh gradient
    fresh = Part("gradients", size * parameters)
    return DeepSpeedMemory(
        always=(Part("weights", weights.bytes), *(_optimiser_state(parameters)[1:] if plain else state)),
        opening=() if plain else (_flattening(weights),),
        forward=(fresh if several else Part(fresh.name, 0), *reserved),
        ending=(fresh if several else Part(fresh.name, size * (parameters - embedding)), *reserved),
        stepping=(*(() if narrow else (fresh,)), Part(REDUCTION, reduced)),
    )


def _gradients_sharded(weights: Weights, ranks: int, embedding: int, several: bool, on_gpu: bool) -> DeepSpeedMemory:
    """Stage 2: gradients go into the bucket as they come; what a rank answers for is added up in fp32."""
    shard, element, bucket = -(-weights.trainable // ranks), weights.element, _bucket(weights)
    sums = Part(SUMS, FLOAT * shard)
    before = (sums,) if several else ()
    reached = Part(bucket.name, min(bucket.bytes, element * (weights.trainable - embedding)))
    widened = FLOAT * embedding if element != FLOAT else 0  # the largest gradient in fp32, on its way to the sum
    return DeepSpeedMemory(
        always=(Part("weights", weights.bytes), *_optimiser_state(shard)),
        opening=(_flattening(weights), Part("masters' copy", element * shard)),
        forward=(*before, bucket) if on_gpu else before,
        ending=(*before, bucket if on_gpu else reached),
        stepping=(sums, bucket, Part(REDUCTION, bucket.bytes + widened)),
    )


def _everything_sharded(weights: Weights, ranks: int, on_gpu: bool, *, gathers: bool) -> DeepSpeedMemory:
    """Stage 3: everything in N parts; what forward gathers stays, since it keeps up to ``GATHERED`` elements."""
    shard, element, bucket = -(-weights.trainable // ranks), weights.element, _bucket(weights)
    parameters = weights.trainable + weights.frozen
    gathered = (Part("gathered weights", element * min(parameters, GATHERED)),) if gathers else ()
    widened = FLOAT * -(-min(weights.trainable, BUCKET) // ranks) if element != FLOAT else 0  # a rank's part in fp32
    copied = 0 if on_gpu else bucket.bytes  # gloo reduces a copy, by the measured peak
    return DeepSpeedMemory(
        always=(
            Part("weights", element * -(-parameters // ranks)),
            *_optimiser_state(shard),
            Part(SUMS, FLOAT * shard),
            bucket,
        ),
        opening=(Part("weights, as loaded", weights.bytes),),
        forward=gathered,
        ending=gathered,
        stepping=(*gathered, Part(REDUCTION, bucket.bytes + max(copied, widened))),
    )
