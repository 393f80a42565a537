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
from condensegrpo.planning.sampling import Place, Sampling, requests, sampling
from condensegrpo.planning.zero import Device, Held

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
    if config.train.problems_per_step % ranks:
        raise ConfigError(
            f"planning for {ranks} ranks: train.problems_per_step={config.train.problems_per_step} does not divide "
            f"over them. Choose a multiple, or another --ranks."
        )
    together = config.learner.sequence_parallel
    if ranks % together:
        raise ConfigError(
            f"planning for {ranks} ranks: learner.sequence_parallel={together} ranks compute a micro-batch together, "
            f"and do not divide them. Set a divisor, or another --ranks."
        )
    place = Place(ranks=ranks, device=device, memory=memory if device == "gpu" else None)
    tokens, weights, batch = _tokens(config, ranks), _weights(config, model), largest_batch(config, ranks)
    sampler = sampling(config, model.decoder, weights, place)
    learner = zero.held(
        weights,
        stage=config.learner.zero_stage,
        ranks=ranks,
        device=device,
        embedding=model.decoder.embedding if model.adapters is None else 0,  # an adapter is small
        several=tokens.micro_batches > 1,
        offload=config.learner.offload.training,
    )
    reference = _reference(config, weights)
    moments = learning(config, model, batch, learner, device)
    if config.learner.offload.reference and device == "gpu":
        layer = formulas.prefill_bytes(model.decoder, requests=1, length=batch.tokens, element=weights.element)
        moments["reference pass"] = (*reference, Part("reference: a layer", layer))
        reference = ()
    return Plan(
        architecture=model,
        weights=weights,
        device=device,
        ranks=ranks,
        memory=place.memory,
        batch=batch,
        requests=requests(config, place),
        phases=(
            _loading(sampler, learner),
            _rolling_out(config, sampler, learner, reference, device),
            _largest("learning", moments, (*_while_learning(config, sampler), *reference, *learner.always)),
            _publishing(config, model, weights, sampler, (*reference, *learner.always), place),
        ),
        tokens=tokens,
        refusal=sampler.refusal,
        notes=(*sampler.notes, *_notes(config, model, batch, device)),
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


def _reference(config: RunConfig, weights: Weights) -> tuple[Part, ...]:
    """With adapters the reference is the learner's own base."""
    copied = config.algorithm.kl.coefficient and config.model.lora is None
    return (Part("reference model", weights.bytes),) if copied else ()


def _loading(sampler: Sampling, learner: Held) -> Phase:
    """The sampler is loaded first, and sleeps if it can while DeepSpeed opens. AdamW makes its moments later."""
    opening = (part for part in learner.always if part.name != zero.MOMENTS)
    return Phase(name="loading", moment="DeepSpeed opens", parts=(*sampler.resting, *opening, *learner.opening))


def _rolling_out(
    config: RunConfig, sampler: Sampling, learner: Held, reference: Sequence[Part], device: Device
) -> Phase:
    away = device == "gpu" and config.learner.offload.rollouts
    beside = learner.without(zero.MASTERS, zero.MOMENTS, zero.SUMS) if away else learner
    return _largest("rolling out", sampler.moments, (*reference, *beside.always))


def _while_learning(config: RunConfig, sampler: Sampling) -> tuple[Part, ...]:
    """A sampler that works ahead does not rest."""
    return sampler.largest if config.rollout.staleness else sampler.resting


def _publishing(
    config: RunConfig,
    model: Architecture,
    weights: Weights,
    sampler: Sampling,
    always: Sequence[Part],
    place: Place,
) -> Phase:
    """Weights go to the sampler one module at a time, the embedding is the largest; a saved policy is copied whole."""
    sharded = config.learner.zero_stage == 3 and place.ranks > 1
    gathered = Part("gathered weights", weights.element * model.decoder.embedding if sharded else 0)
    merged = Part("merged weight", formulas.merging_bytes(model.decoder, weights.element) if model.adapters else 0)
    parameters = weights.frozen or weights.trainable
    copied = Part("policy to save", weights.element * parameters if place.device == "cpu" else 0)  # else in main memory
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
    more = sharing(config, model, batch, device)
    if more >= SHARING_NOTED:
        notes.append(
            f"where rows share a context, each of them gathers its keys anew, which takes up to {more / 2**30:.2f} GiB "
            f"more; model.attention=flex, which runs on a GPU, gathers nothing"
        )
    return notes
