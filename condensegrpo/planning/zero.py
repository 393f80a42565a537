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
MASTERS, SUMS = "fp32 masters", "gradients, summed"

Device = Literal["cpu", "gpu"]


class Held(NamedTuple):
    """What there is always, and what comes on top of it at the moments of an optimiser step."""

    always: tuple[Part, ...]
    opening: tuple[Part, ...]  # instead of the moments, while the engine is made
    forward: tuple[Part, ...]  # in the forward pass of the last micro-batch
    ending: tuple[Part, ...]  # at the end of its backward pass
    stepping: tuple[Part, ...]  # in the reduction over ranks and the optimiser's step

    def without(self, *names: str) -> "Held":
        """The same, some parts left out."""
        return Held(*(tuple(part for part in parts if part.name not in names) for parts in self))


def held(
    weights: Weights,
    *,
    stage: int,
    ranks: int,
    device: Device,
    embedding: int,
    several: bool,
    offload: Offload = "none",
) -> Held:
    """What DeepSpeed holds on each of ``ranks`` devices.

    Args:
        several: a step has more than one micro-batch, so that gradients of earlier ones are there from the start. With
            a single one backward ends with those of all parameters but the embedding, which comes last.
        device: a GPU's allocator hands a bucket out as a whole; main memory is taken only where it is written, so that
            on a CPU a bucket counts when gradients have reached it.
        embedding: elements of the largest trainable parameter.
        offload: what is in main memory instead of a GPU's; on a CPU that is the same.
    """
    whole = _held(weights, stage, ranks, device, embedding, several, offload)
    if offload == "none" or device == "cpu":
        return whole
    moved = whole.without(MASTERS, "masters' copy", MOMENTS, SUMS)
    return moved.without("weights") if offload == "optimiser_and_weights" else moved


def _held(
    weights: Weights, stage: int, ranks: int, device: Device, embedding: int, several: bool, offload: Offload
) -> Held:
    parameters, element = weights.trainable, weights.element
    begun = parameters if several else 0
    ended = parameters if several else parameters - embedding
    bucket = Part("bucket", element * min(BUCKET, parameters))
    if element != FLOAT and stage < 2 and offload == "none":
        return _bf16(weights, ranks, begun, ended)
    if stage == 0 and element == FLOAT:
        return Held(
            always=(Part("weights", weights.bytes), _moments(parameters)),
            opening=(),
            forward=(_gradients(begun),),
            ending=(_gradients(ended),),
            stepping=(_gradients(parameters), _reduction(FLOAT * min(parameters, BUCKET))),
        )
    if stage <= 1:
        return _stage1(weights, ranks, begun, ended, bucket, device)
    if stage == 2:
        return _stage2(weights, ranks, embedding, several, bucket, device)
    return _stage3(weights, ranks, bucket, device, gathers=ranks > 1 or offload == "optimiser_and_weights")


def _gradients(parameters: int) -> Part:
    return Part("gradients", FLOAT * parameters)


def _moments(parameters: int) -> Part:
    return Part(MOMENTS, 2 * FLOAT * parameters)


def _masters(parameters: int) -> Part:
    return Part(MASTERS, FLOAT * parameters)


def _loaded(weights: Weights) -> Part:
    """Trainable weights before they are flattened."""
    return Part("weights, as loaded", weights.element * weights.trainable)


def _reduction(size: int) -> Part:
    return Part("reduction over ranks", size)


def _share(parameters: int, ranks: int) -> int:
    """The largest rank's part."""
    return -(-parameters // ranks)


def _bf16(weights: Weights, ranks: int, begun: int, ended: int) -> Held:
    """Fresh gradients in bfloat16 until the next optimiser step, and their sums in fp32, always and on every rank."""
    parameters, own, element = weights.trainable, _share(weights.trainable, ranks), weights.element
    sums = Part(SUMS, FLOAT * parameters)
    return Held(
        always=(Part("weights", weights.bytes), _masters(own), _moments(own), sums),
        opening=(_loaded(weights),),
        forward=(Part("gradients", element * begun),),
        ending=(Part("gradients", element * ended),),
        stepping=(_reduction(FLOAT * min(parameters, BUCKET)),),
    )


def _stage1(weights: Weights, ranks: int, begun: int, ended: int, bucket: Part, device: Device) -> Held:
    """Gradients of all micro-batches add up where they are, and go through the bucket at the end."""
    own = _share(weights.trainable, ranks)
    waiting = (bucket,) if device == "gpu" else ()
    return Held(
        always=(Part("weights", weights.bytes), _masters(own), _moments(own)),
        opening=(_loaded(weights),),
        forward=(_gradients(begun), *waiting),
        ending=(_gradients(ended), *waiting),
        stepping=(_gradients(weights.trainable), _reduction(bucket.bytes)),
    )


def _stage2(weights: Weights, ranks: int, embedding: int, several: bool, bucket: Part, device: Device) -> Held:
    """Gradients go into the bucket as they come; what a rank answers for is added up in fp32."""
    own, element = _share(weights.trainable, ranks), weights.element
    sums = Part(SUMS, FLOAT * own)
    before = (sums,) if several else ()
    reached = Part(bucket.name, min(bucket.bytes, element * (weights.trainable - embedding)))
    widened = FLOAT * embedding if element != FLOAT else 0  # the largest gradient in fp32, on its way to the sum
    return Held(
        always=(Part("weights", weights.bytes), _masters(own), _moments(own)),
        opening=(_loaded(weights), Part("masters' copy", element * own)),
        forward=(*before, bucket) if device == "gpu" else before,
        ending=(*before, bucket if device == "gpu" else reached),
        stepping=(sums, bucket, _reduction(bucket.bytes + widened)),
    )


def _stage3(weights: Weights, ranks: int, bucket: Part, device: Device, *, gathers: bool) -> Held:
    """Everything in N parts; what forward gathers stays, since stage 3 keeps up to ``GATHERED`` elements for reuse."""
    own, element = _share(weights.trainable, ranks), weights.element
    parameters = weights.trainable + weights.frozen
    gathered = (Part("gathered weights", element * min(parameters, GATHERED)),) if gathers else ()
    widened = FLOAT * _share(min(weights.trainable, BUCKET), ranks) if element != FLOAT else 0  # a rank's part in fp32
    sent = bucket.bytes if device == "cpu" else 0  # gloo reduces a copy, by the measured peak
    return Held(
        always=(
            Part("weights", element * _share(parameters, ranks)),
            _masters(own),
            _moments(own),
            Part(SUMS, FLOAT * own),
            bucket,
        ),
        opening=(Part("weights, as loaded", weights.bytes),),
        forward=gathered,
        ending=gathered,
        stepping=(*gathered, _reduction(bucket.bytes + max(sent, widened))),
    )
