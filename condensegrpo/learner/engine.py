"""The learner: a policy under DeepSpeed. Open an engine, take one optimiser step, measure log-probabilities.

DeepSpeed is used in every case, world size 1 included. Processes come from ``torchrun`` or ``deepspeed``; a plain
``python`` is a group of one. The reference policy of a KL term is here too.

What divides by what: a token's weight already carries the denominators of the whole
optimiser step (all ranks, all micro-batches), so that loss = Σ w·l; DeepSpeed's mean over ranks is undone here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from condensegrpo.algorithms.objective import KL_LOSS, ObjectiveFunction, SummedLoss
from condensegrpo.algorithms.packing import PackedBatch, dummy
from condensegrpo.core.errors import ConfigError, LearnerError
from condensegrpo.learner.deepspeed_import import DeepSpeedEngine as DeepSpeedEngine
from condensegrpo.learner.deepspeed_import import deepspeed, restore_linear, without_deprecations, without_output
from condensegrpo.learner.head import ChunkedHead
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.lora import adapter_dropout, adapters_disabled
from condensegrpo.learner.model_folder import load_policy
from condensegrpo.learner.ranks import barrier, gather, join, reduce, set_timeouts, world_size
from condensegrpo.learner.sequence_parallel import RankGroup
from condensegrpo.learner.settings import BUCKET, Dtype, Offload, OptimizerSettings
from condensegrpo.learner.vision_tower import BatchPictures

STAGES = (0, 1, 2, 3)
MAXIMA = ("ratio", "importance", "gap")  # statistics that are reported by their maximum as well as their mean


def learning_rate(optimizer: OptimizerSettings, step: int, *, total_steps: int) -> float:
    """The learning rate of optimiser step ``step`` (from 0).

    W = warmup_steps, N = total_steps, s = step:

        s < W      lr·(s+1)/W
        constant   lr
        cosine     lr·½(1 + cos(π·min(1, (s−W)/(N−W))))
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    span = max(1, total_steps - optimizer.warmup_steps)
    return optimizer.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - optimizer.warmup_steps) / span)))


def open_deepspeed(
    policy: PreTrainedModel,
    *,
    zero_stage: int,
    optimizer: OptimizerSettings,
    total_steps: int,
    dtype: Dtype,
    offload: Offload = "none",
    sequence_parallel: int = 1,
) -> DeepSpeedEngine:
    """A DeepSpeed engine that trains ``policy``, those of its weights that take a gradient; every rank must call it.

    Its forward is that of ``TrainedLogprobs``. The policy stays in evaluation mode: without dropout the learner's
    log-probabilities agree with the sampler's (for that of adapters see ``optimizer_step``). In bfloat16, master
    weights, optimiser and accumulated gradients are fp32; ZeRO 0 then runs as ZeRO 1, since DeepSpeed's ZeRO 0 would
    accumulate gradients in bfloat16.

    Args:
        policy: on the CPU.
        total_steps: of the run; a cosine schedule would be 0 after them.
        zero_stage: what the ranks divide among them: 0 nothing, 1 optimiser, 2 gradients as well, 3 weights as well.
        dtype: of the weights.
        offload: what lies in the machine's memory instead of the GPU's. The optimiser's step is then taken by the CPU.
        sequence_parallel: how many consecutive ranks compute every micro-batch together; they must be given the same.
    """
    if zero_stage not in STAGES:
        raise ConfigError(
            f"opening DeepSpeed with ZeRO stage {zero_stage}: wanted one of {STAGES}; set learner.zero_stage."
        )
    join()
    if dtype == "bfloat16":
        zero_stage = max(zero_stage, 1)
    module = TrainedLogprobs(policy.eval())
    module.check()
    deepspeed.utils.set_z3_leaf_modules(module, [ChunkedHead])
    trainable = [tensor for tensor in policy.parameters() if tensor.requires_grad]
    barrier()  # a rank may still load its policy, and DeepSpeed's new groups have torch's time limit at first
    if sequence_parallel > 1:
        module.share_rows(sequence_parallel)
    with without_output():
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=trainable,
            optimizer=partial(
                AdamW,
                lr=optimizer.lr,
                betas=optimizer.betas,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                fused=True,
            ),
            lr_scheduler=lambda adamw: LambdaLR(
                adamw, lambda step: learning_rate(optimizer, step, total_steps=total_steps) / optimizer.lr
            ),
            config=deepspeed_settings(
                zero_stage,
                dtype,
                offload,
                grad_clip=optimizer.grad_clip,
                elements=sum(tensor.numel() for tensor in policy.parameters()),
                trainable=sum(tensor.numel() for tensor in trainable),
            ),
        )
    set_timeouts()
    return engine


def close_deepspeed(engine: DeepSpeedEngine) -> None:
    """Free what the engine holds. Its policy is not to be used any more; the process group stays."""
    engine.destroy()
    restore_linear()


def optimizer_step(
    engine: DeepSpeedEngine,
    batches: Sequence[PackedBatch],
    objective: ObjectiveFunction,
    *,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Exactly one optimiser step over the micro-batches of all ranks; every rank must call it, with or without any.

    loss = Σ w·l + Σ u·k over all trained tokens (``objective.py``). Ranks with fewer micro-batches than others take
    dummies of weight 0, since every forward and backward pass is a collective operation. The dropout of adapters is
    active here and nowhere else.

    Args:
        batches: this rank's own; their weights are those of the whole optimiser step.
        objective: of log-probabilities (T,) and the micro-batch they belong to; as ``PerToken`` it costs less.
        temperature: that the trained tokens were sampled at.

    Returns:
        Over all ranks: ``loss``, ``grad_norm`` before clipping, ``lr``, ``tokens`` of non-zero weight, the mean over
        those of each statistic of the objective (of ``KL_LOSS`` the sum), and the largest of those in ``MAXIMA``.
    """
    passes, stand_in = _passes(engine, batches)
    if not passes:
        raise LearnerError(
            "taking an optimiser step: no rank has a micro-batch. Skip the step when no trajectory carries a signal."
        )
    rate = float(engine.get_lr()[0])
    figures: list[BatchFigures] = []
    with without_deprecations(), adapter_dropout(engine.module):
        for number, packed in enumerate(passes, start=1):
            batch = engine.module.place(packed, engine.device, stand_in=stand_in)
            engine.set_gradient_accumulation_boundary(number == len(passes))
            summed: SummedLoss = engine(batch, temperature, objective=objective)
            engine.backward(summed.loss * world_size())
            figures.append(figures_of(summed, batch.predicted_here))
        stats = _step_statistics(figures)
        grad_norm = _step(engine, stats["loss"])
    return {**stats, "grad_norm": grad_norm, "lr": rate}


@torch.no_grad()
def measure_logprobs(
    engine: DeepSpeedEngine, batches: Sequence[PackedBatch], *, temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """The log-probabilities (T,) of every micro-batch's trained tokens under the engine's current weights.

    Every rank must call it, with or without micro-batches.
    """
    with without_deprecations():
        passes, stand_in = _passes(engine, batches)
        placed = (engine.module.place(packed, engine.device, stand_in=stand_in) for packed in passes)
        logps = [engine(batch, temperature) for batch in placed]
    return tuple(logps[: len(batches)])


def _passes(engine: DeepSpeedEngine, batches: Sequence[PackedBatch]) -> tuple[list[PackedBatch], str | None]:
    """This rank's micro-batches, with dummies up to the largest number of any rank, and a stand-in picture.

    Where passes of the vision tower are collective, micro-batches without pictures compute the stand-in.
    It waits for every rank through main memory: no rank enters a pass while another is still sampling or packing.
    """
    picture = next((sha256 for batch in batches for sha256 in batch.pictures), None)
    counts, pictures = zip(*gather((len(batches), picture)), strict=True)
    passes = [*batches, *(dummy() for _ in range(max(counts) - len(batches)))]
    collective = engine.module.trains_tower or engine.zero_optimization_stage() == 3
    stand_in = next(filter(None, pictures), None) if collective else None
    return passes, stand_in


def _step(engine: DeepSpeedEngine, loss: float) -> float:
    """Update the weights; the norm of the gradient before clipping. Loss and gradient are the same on every rank."""
    if not math.isfinite(loss):
        raise _not_finite("loss", loss)
    if engine.zero_optimization_stage() == 0:  # DeepSpeed neither records nor checks the norm there
        grads = [tensor.grad for tensor in engine.module.parameters() if tensor.grad is not None]
        grad_norm = float(torch.nn.utils.get_total_norm(grads))
        if not math.isfinite(grad_norm):
            raise _not_finite("gradient norm", grad_norm)
        engine.step()
        return grad_norm
    engine.step()
    grad_norm = float(engine.get_global_grad_norm())
    if not engine.was_step_applied():
        raise _not_finite("gradient norm", grad_norm)
    return grad_norm


def _not_finite(quantity: str, value: float) -> LearnerError:
    return LearnerError(
        f"taking an optimiser step: the {quantity} is {value}, wanted a finite number; the weights were left as they "
        f"are. Resume from the last checkpoint with a lower learner.optimiser.lr (and --allow-changes), "
        f"or start a new run with model.dtype=float32."
    )


class BatchFigures(NamedTuple):
    """The statistics of one micro-batch, on its device; tokens without weight are left out."""

    names: tuple[str, ...]
    sums: Tensor  # float64: the loss, the tokens, then each statistic by ``names``
    largest: Tensor  # float64, by ``names``


def figures_of(summed: SummedLoss, here: PackedBatch) -> BatchFigures:
    """The statistics of a micro-batch, of which this rank predicts the trained tokens ``here``.

    Nothing waits for the device: selecting tokens by a mask would, to learn how many they are.
    """
    loss, counted_T = summed.loss.detach().double(), (here.weights != 0) | (here.kl_weights != 0)
    statistics = [statistic_T.double() for statistic_T in summed.statistics.values()]
    sums = [torch.where(counted_T, statistic_T, 0.0).sum() for statistic_T in statistics]
    nothing = loss.new_full((1,), -math.inf)  # rows may hold no trained token at all
    largest = [torch.cat([nothing, torch.where(counted_T, statistic_T, -math.inf)]).max() for statistic_T in statistics]
    return BatchFigures(
        names=tuple(summed.statistics),
        sums=torch.stack([loss, counted_T.sum().double(), *sums]),
        largest=torch.stack([nothing[0], *largest])[1:],
    )


def _step_statistics(figures: Sequence[BatchFigures]) -> dict[str, float]:
    """The statistics of a step from those of this rank's micro-batches; every rank must call it."""
    names = figures[0].names
    sums = reduce(torch.stack([each.sums for each in figures]).sum(dim=0), distributed.ReduceOp.SUM)
    largest = reduce(torch.stack([each.largest for each in figures]).amax(dim=0), distributed.ReduceOp.MAX)
    loss, tokens, *values = torch.cat([sums, largest]).tolist()  # the first time in the step that the host waits
    statistics = {"loss": loss, "tokens": tokens}
    for name, total in zip(names, values[: len(names)], strict=True):
        statistics[name] = total if name == KL_LOSS else total / max(tokens, 1.0)
    maxima = dict(zip(names, values[len(names) :], strict=True))
    for name in MAXIMA:
        if name in maxima:
            statistics[f"{name}_max"] = maxima[name] if tokens else 0.0
    return statistics


def deepspeed_settings(
    zero_stage: int, dtype: Dtype, offload: Offload = "none", *, grad_clip: float, elements: int, trainable: int
) -> dict[str, object]:
    """DeepSpeed's configuration.

    Args:
        elements: numbers in the policy's weights.
        trainable: those of them that train.
    """
    zero: dict[str, object] = {
        "stage": zero_stage,
        "reduce_bucket_size": min(BUCKET, max(trainable, 1)),
        "stage3_prefetch_bucket_size": min(BUCKET, max(elements, 1)),
    }
    on_cpu = {"device": "cpu", "pin_memory": torch.accelerator.is_available()}  # there is nothing to pin without a GPU
    if offload != "none":
        zero["offload_optimizer"] = on_cpu
    if offload == "optimiser_and_weights":
        zero["offload_param"] = on_cpu
    settings: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand: the number of micro-batches varies
        "gradient_clipping": grad_clip,
        "zero_optimization": zero,
        # AdamW is torch's fused one wherever it runs: DeepSpeed's own for CPUs would have to be compiled first
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bfloat16":
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings


# Micro-batches and the temperature that their tokens were sampled at: the same, with the reference's log-probabilities
# of their trained tokens. The divergence is that between the distributions at this temperature.
Reference = Callable[[Sequence[PackedBatch], float], list[PackedBatch]]


def open_reference(
    source: str,
    *,
    dtype: Dtype,
    attention: str,
    device: torch.device | str,
    group: RankGroup | None = None,
    pictures: BatchPictures | None = None,
) -> TrainedLogprobs:
    """The model of a local folder or Hub id, frozen. Every rank holds a whole copy, outside DeepSpeed.

    Args:
        device: where its weights are; ``against_copy`` moves it for as long as it is used.
        group: ``TrainedLogprobs.group`` of the learner, whose micro-batches it computes.
        pictures: likewise.
    """
    module = TrainedLogprobs(load_policy(source, dtype=dtype, attention=attention).requires_grad_(False))
    module.kernel = attention
    module.check()
    module.group, module.pictures = group, pictures
    return module.to(device)


@torch.no_grad()
def against_copy(
    reference: TrainedLogprobs, device: torch.device | str, batches: Sequence[PackedBatch], temperature: float
) -> list[PackedBatch]:
    """The batches with the log-probabilities of a frozen copy, which is on ``device`` meanwhile.

    Collective among the ranks that compute micro-batches together, and not otherwise.
    """
    home = next(reference.parameters()).device
    try:
        reference.to(device)
        logps = [reference(reference.place(batch, torch.device(device)), temperature) for batch in batches]
    finally:
        reference.to(home)
    return _with_reference(batches, logps)


def against_base(engine: DeepSpeedEngine, batches: Sequence[PackedBatch], temperature: float) -> list[PackedBatch]:
    """The batches with the learner's log-probabilities without its adapters; every rank must call it."""
    with adapters_disabled(engine.module):
        logps = measure_logprobs(engine, batches, temperature=temperature)
    return _with_reference(batches, logps)


def _with_reference(batches: Sequence[PackedBatch], logps: Sequence[Tensor]) -> list[PackedBatch]:
    """The batches with measured log-probabilities, which are read only when all passes are under way."""
    return [replace(batch, reference=logp_T.cpu()) for batch, logp_T in zip(batches, logps, strict=True)]
