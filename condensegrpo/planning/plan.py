"""Predicts, from the configuration alone, what a run takes: memory of every device in every phase, and tokens.

Loads neither weights nor tokenizer nor DeepSpeed. The bytes are those of ``learning.py``, ``sampling.py`` and
``zero.py``; this file says which of them exist at the same time.

    sampler │ learner │ reference        there from beginning to end, unless they sleep or lie in main memory
    loading, rolling out, learning, publishing   each at its largest moment; the peak is the largest of them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.dtypes import DTYPES
from condensegrpo.planning import formulas, zero
from condensegrpo.planning.architecture import Architecture
from condensegrpo.planning.formulas import MicroBatch, Part, Weights
from condensegrpo.planning.learning import largest_batch, learning, row_length, sharing
from condensegrpo.planning.sampling import COLOCATED as COLOCATED
from condensegrpo.planning.sampling import RankDevice, SamplerMemory, requests, sampler_memory
from condensegrpo.planning.zero import DeepSpeedMemory, Device, deepspeed_memory

SHARING_NOTED = 1 << 28  # bytes
LINEAR_LAYERS = 7  # of a gated decoder layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a step samples and trains on, at most: every trajectory as long as it may be."""

    step: int  # of contexts and outputs, over all ranks
    trained: int  # outputs of these
    micro_batches: int  # of one rank and one optimiser step
    optimiser_steps: int  # of the whole run


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of the run at its largest moment."""

    name: str
    moment: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run takes on each of its devices."""

    architecture: Architecture
    weights: Weights
    device: Device
    ranks: int
    memory: int | None  # bytes of each GPU, if they were given
    batch: MicroBatch
    requests: int  # generated at once
    phases: tuple[Phase, ...]
    tokens: Tokens
    refusal: str | None  # why the run would not start, whatever memory it has
    notes: tuple[str, ...]  # what the figures leave out, for this configuration

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    def fits(self, room: int) -> bool:
        """Whether the run starts and takes at most ``room`` bytes of each device."""
        return self.refusal is None and self.peak.bytes <= room


def plan(config: RunConfig, model: Architecture, *, ranks: int, device: Device, memory: int | None = None) -> Plan:
    """The plan of a run.

    Args:
        model: the architecture of ``config.model``.
        memory: bytes of each GPU, of which vLLM takes a share; None: not known.

    Raises:
        ConfigError: the problems of a step do not divide over the ranks.
    """
    _check_divides(config, ranks)
    device_of_rank = RankDevice(ranks=ranks, kind=device, memory=memory if device == "gpu" else None)
    tokens, weights, batch = _tokens(config, ranks), _weights(config, model), largest_batch(config, ranks)
    sampler = sampler_memory(config, model.decoder, weights, device_of_rank)
    learner = deepspeed_memory(
        weights,
        stage=config.learner.zero_stage,
        ranks=ranks,
        device=device,
        embedding=model.decoder.embedding if model.adapters is None else 0,  # an adapter is small
        several=tokens.micro_batches > 1,
        offload=config.learner.offload.training,
    )
    return Plan(
        architecture=model,
        weights=weights,
        device=device,
        ranks=ranks,
        memory=device_of_rank.memory,
        batch=batch,
        requests=requests(config, device_of_rank),
        phases=_phases(config, model, weights, batch, sampler, learner, device_of_rank),
        tokens=tokens,
        refusal=sampler.refusal,
        notes=(*sampler.notes, *_notes(config, model, batch, device)),
    )


def _check_divides(config: RunConfig, ranks: int) -> None:
    if config.train.problems_per_step % ranks:
        raise ConfigError(
            f"planning for {ranks} ranks: train.problems_per_step={config.train.problems_per_step} does not divide "
            f"over them. Choose a multiple, or another --ranks."
        )
    if ranks % config.learner.sequence_parallel:
        raise ConfigError(
            f"planning for {ranks} ranks: learner.sequence_parallel={config.learner.sequence_parallel} ranks compute a "
            f"micro-batch together, and do not divide them. Set a divisor, or another --ranks."
        )


def _tokens(config: RunConfig, ranks: int) -> Tokens:
    rollout, train = config.rollout, config.train
    turns = train.problems_per_step * train.samples_per_problem * rollout.limits.max_turns
    fitting = max(1, config.learner.tokens_per_micro_batch // row_length(config))  # rows of a micro-batch
    return Tokens(
        step=turns * row_length(config),
        trained=turns * rollout.limits.max_output_tokens,
        micro_batches=ceil(turns * config.learner.sequence_parallel / ranks / fitting),
        optimiser_steps=train.steps * config.algorithm.updates_per_batch,
    )


def _weights(config: RunConfig, model: Architecture) -> Weights:
    """The learner's weights: all of them are trained, or adapters beside all of them."""
    trained, frozen = (model.adapters or model).parameters, model.parameters if model.adapters else 0
    return Weights(trainable=trained, frozen=frozen, element=DTYPES[config.model.dtype].itemsize)


def _phases(
    config: RunConfig,
    model: Architecture,
    weights: Weights,
    batch: MicroBatch,
    sampler: SamplerMemory,
    learner: DeepSpeedMemory,
    device: RankDevice,
) -> tuple[Phase, ...]:
    """The phases in their order. With adapters the reference is the learner's base, and takes nothing more.

    The sampler is loaded first, and sleeps if it can while DeepSpeed opens. AdamW makes its moments later. A sampler
    that works ahead does not rest while the learner works.
    """
    offload, on_gpu = config.learner.offload, device.kind == "gpu"
    copied = config.algorithm.kl.coefficient and config.model.lora is None
    reference = (Part("reference model", weights.bytes),) if copied else ()
    moments = learning(config, model, batch, learner, device.kind)
    if offload.reference and on_gpu:
        layer = formulas.prefill_bytes(model.decoder, requests=1, length=batch.tokens, element=weights.element)
        moments["reference pass"] = (*reference, Part("reference: a layer", layer))
        reference = ()
    opening = (*learner.without(zero.MOMENTS).always, *learner.opening)
    away = (zero.MASTERS, zero.MOMENTS, zero.SUMS) if on_gpu and offload.rollouts else ()
    while_learning = sampler.largest if config.rollout.staleness else sampler.resting
    return (
        Phase(name="loading", moment="DeepSpeed opens", parts=(*sampler.resting, *opening)),
        _largest("rolling out", sampler.moments, (*reference, *learner.without(*away).always)),
        _largest("learning", moments, (*while_learning, *reference, *learner.always)),
        _publishing(config, model, weights, sampler, (*reference, *learner.always), device),
    )


def _publishing(
    config: RunConfig,
    model: Architecture,
    weights: Weights,
    sampler: SamplerMemory,
    always: Sequence[Part],
    device: RankDevice,
) -> Phase:
    """Weights go to the sampler one module at a time, the embedding is the largest; a saved policy is copied whole."""
    sharded = config.learner.zero_stage == 3 and device.ranks > 1
    gathered = Part("gathered weights", weights.element * model.decoder.embedding if sharded else 0)
    merged = Part("merged weight", formulas.merging_bytes(model.decoder, weights.element) if model.adapters else 0)
    parameters = weights.frozen or weights.trainable
    copied = Part("policy to save", weights.element * parameters if device.kind == "cpu" else 0)  # else in main memory
    moments = {
        "new weights": (*sampler.updating, gathered, *([merged] if sampler.merges else [])),
        "a checkpoint": (*sampler.awake, gathered, merged, copied),
    }
    return _largest("publishing", moments, always)


def _largest(name: str, moments: dict[str, tuple[Part, ...]], always: Sequence[Part]) -> Phase:
    phases = [Phase(name=name, moment=moment, parts=(*always, *parts)) for moment, parts in moments.items()]
    return max(phases, key=lambda phase: phase.bytes)


def _notes(config: RunConfig, model: Architecture, batch: MicroBatch, device: Device) -> list[str]:
    notes = []
    if not model.known:
        notes.append(f"activations of {model.kind} are estimated as those of a gated layer, which were never measured")
    if row_length(config) > config.learner.tokens_per_micro_batch:
        notes.append(
            f"a row may have {row_length(config)} tokens, and is refused if it does: learner.tokens_per_micro_batch is "
            f"{config.learner.tokens_per_micro_batch}"
        )
    if model.adapters is not None and model.adapters.layers != LINEAR_LAYERS * model.decoder.layers:
        notes.append("activations are counted as if every linear layer had an adapter")
    if config.model.lora is not None and config.warm_start.steps:
        notes.append("not counted: the warm start, which trains all weights")
    copied = sharing(config, model, batch, device)
    if copied >= SHARING_NOTED:
        notes.append(
            f"where rows share a context, each of them gathers its keys anew, which takes up to {copied / 2**30:.2f} "
            f"GiB more; model.attention=flex, which runs on a GPU, gathers nothing"
        )
    return notes
