"""Predicts, from the configuration alone, what a run takes: memory of every device in every phase, and tokens.

Loads neither weights nor tokenizer nor DeepSpeed. The bytes are those of ``learning.py``, ``sampling.py`` and
``zero.py``; this file says which of them exist at the same time.

    sampler │ learner │ reference        there from beginning to end, unless they sleep or lie in main memory
    loading, rolling out, learning, publishing   each at its largest moment; the peak is the largest of them
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from condensegrpo.config.checks import check_ranks
from condensegrpo.config.load import vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.learner.layers import checkpointed_layers
from condensegrpo.planning import formulas, zero
from condensegrpo.planning.architecture import Architecture, architecture
from condensegrpo.planning.formulas import Part
from condensegrpo.planning.learning import PlannedRun, learning, sharing
from condensegrpo.planning.sampling import SamplerMemory, requests, sampler_memory
from condensegrpo.planning.zero import DeepSpeedMemory, Device, deepspeed_memory

SHARING_NOTED, SENT_NOTED = 1 << 28, 1 << 28  # bytes
GIB = 1 << 30
USABLE = 0.9  # of a device: the rest is for CUDA, NCCL, and what torch's allocator reserves beyond the tensors in it
FILLED = 0.8  # of a device, up to which layers keep their activations: no GPU has confirmed the formulas yet
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

    run: PlannedRun
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
        """Whether the run starts, and its tensors take at most the usable part of ``room`` bytes of each device."""
        return self.refusal is None and self.peak.bytes <= USABLE * room


def plan(config: RunConfig, model: Architecture, *, ranks: int, device: Device, memory: int | None = None) -> Plan:
    """The plan of a run.

    Args:
        model: the architecture of ``config.model``.
        memory: bytes of each GPU, of which vLLM takes a share; None: not known. With ``checkpoint_activations: auto``
            as few layers are computed again as it allows; on a GPU of unknown memory all are.

    Raises:
        ConfigError: as ``check_ranks``.
    """
    check_ranks(config, ranks)
    setting, layers = config.learner.checkpoint_activations, model.decoder.layers
    run = PlannedRun(
        config=config,
        model=model,
        ranks=ranks,
        device=device,
        memory=memory if device == "gpu" else None,
        checkpointed=checkpointed_layers(setting, layers, gpu=device == "gpu"),
    )
    tokens, sampler = _tokens(run), sampler_memory(run)
    states = partial(
        deepspeed_memory,
        run.weights,
        ranks=ranks,
        device=device,
        embedding=model.decoder.embedding if run.trained else 0,  # an adapter is small
        several=tokens.micro_batches > 1,
        offload=config.learner.offload.training,
    )
    learner = states(stage=config.learner.zero_stage)
    if setting == "auto" and run.memory is not None and model.known:
        room = FILLED * run.memory
        fits = partial(_learning_fits, run, sampler, learner, room=room)
        run = replace(run, checkpointed=bisect_left(range(layers), True, key=fits))
    with_stage_1 = _phases(replace(run, checkpointed=layers), sampler, states(stage=1))
    return Plan(
        run=run,
        requests=requests(run),
        phases=_phases(run, sampler, learner),
        tokens=tokens,
        refusal=sampler.refusal,
        notes=(*sampler.notes, *_notes(run), *_traffic(run, tokens, with_stage_1)),
    )


def config_on_devices(config: RunConfig, *, ranks: int, memory: int | None) -> RunConfig:
    """The configuration with as many checkpointed layers as GPUs of so many bytes require, if it leaves that open.

    It is left as it is where ``memory`` is not known.
    """
    if config.learner.checkpoint_activations != "auto" or memory is None:
        return config
    planned = plan(config, architecture(config.model), ranks=ranks, device="gpu", memory=memory)
    return vary(config, (f"learner.checkpoint_activations={planned.run.checkpointed}",))


def _learning_fits(
    run: PlannedRun, sampler: SamplerMemory, learner: DeepSpeedMemory, checkpointed: int, *, room: float
) -> bool:
    phases = _phases(replace(run, checkpointed=checkpointed), sampler, learner)
    return next(phase.bytes for phase in phases if phase.name == "learning") <= room


def _tokens(run: PlannedRun) -> Tokens:
    limits, train, learner = run.config.rollout.limits, run.config.train, run.config.learner
    turns = train.problems_per_step * train.samples_per_problem * limits.max_turns
    fitting = max(1, learner.tokens_per_micro_batch // limits.turn_tokens)  # rows of a micro-batch
    return Tokens(
        step=turns * limits.turn_tokens,
        trained=turns * limits.max_output_tokens,
        micro_batches=ceil(turns * learner.sequence_parallel / run.ranks / fitting),
        optimiser_steps=train.steps * run.config.algorithm.updates_per_batch,
    )


def _phases(run: PlannedRun, sampler: SamplerMemory, learner: DeepSpeedMemory) -> tuple[Phase, ...]:
    """The phases in their order. With adapters the reference is the learner's base, and takes nothing more.

    The sampler is loaded first, and sleeps if it can while DeepSpeed opens. AdamW makes its moments later. A sampler
    that works ahead does not rest while the learner works.
    """
    config, offload = run.config, run.config.learner.offload
    copied = config.algorithm.kl.coefficient and config.model.lora is None
    reference = (Part("reference model", run.weights.bytes),) if copied else ()
    moments = learning(run, learner)
    if offload.reference and run.on_gpu:
        layer = formulas.prefill_bytes(run.model.decoder, requests=1, length=run.batch.tokens, element=run.element)
        moments["reference pass"] = (*reference, Part("reference: a layer", layer))
        reference = ()
    opening = (*learner.without(zero.MOMENTS).always, *learner.opening)
    away = (zero.MASTERS, zero.MOMENTS, zero.SUMS) if run.on_gpu and offload.rollouts else ()
    while_learning = sampler.largest if config.rollout.staleness else sampler.resting
    return (
        Phase(name="loading", moment="DeepSpeed opens", parts=(*sampler.resting, *opening)),
        _largest("rolling out", sampler.moments, (*reference, *learner.without(*away).always)),
        _largest("learning", moments, (*while_learning, *reference, *learner.always)),
        _largest("publishing", _publishing(run, sampler), (*reference, *learner.always)),
    )


def _publishing(run: PlannedRun, sampler: SamplerMemory) -> dict[str, tuple[Part, ...]]:
    """Weights go to the sampler one module at a time, the embedding is the largest; a saved policy is copied whole."""
    decoder, element = run.model.decoder, run.element
    sharded = run.config.learner.zero_stage == 3 and run.ranks > 1
    gathered = Part("gathered weights", element * decoder.embedding if sharded else 0)
    merged = Part("merged weight", 0 if run.trained else formulas.merging_bytes(decoder, element))
    copied = Part("policy to save", 0 if run.on_gpu else element * run.model.parameters)  # else in main memory
    return {
        "new weights": (*sampler.updating, gathered, *([merged] if sampler.merges else [])),
        "a checkpoint": (*sampler.awake, gathered, merged, copied),
    }


def _largest(name: str, moments: dict[str, tuple[Part, ...]], always: tuple[Part, ...]) -> Phase:
    phases = [Phase(name=name, moment=moment, parts=(*always, *parts)) for moment, parts in moments.items()]
    return max(phases, key=lambda phase: phase.bytes)


def _traffic(run: PlannedRun, tokens: Tokens, with_stage_1: tuple[Phase, ...]) -> list[str]:
    """What each device sends to the others, where it does so in every micro-batch and ZeRO 1 only once a step.

    A ring of N ranks sends (N − 1)/N of a tensor when it gathers or scatters it, and twice that when it reduces it for
    all of them, as DeepSpeed does in stage 2. Stage 3 scatters gradients, and gathers weights in every pass.
    """
    stage, weights, layers = run.config.learner.zero_stage, run.weights, run.model.decoder.layers
    ring = (run.ranks - 1) / run.ranks
    gathered = (2 + run.checkpointed / layers) * weights.bytes if stage == 3 else 0
    sent = ring * ((2 if stage == 2 else 1) * weights.element * weights.trainable + gathered)
    if stage < 2 or not run.on_gpu or tokens.micro_batches < 2 or sent < SENT_NOTED:
        return []
    once, needed = 2 * ring * formulas.FLOAT * weights.trainable, max(phase.bytes for phase in with_stage_1)
    return [
        f"ZeRO {stage} sends {sent / GIB:.1f} GiB from each device in every micro-batch, "
        f"{sent * tokens.micro_batches / GIB:,.0f} GiB a step; learner.zero_stage=1 sends {once / GIB:.1f} GiB once a "
        f"step and takes at least {needed / GIB:.1f} GiB of a device. Between nodes use it where that fits"
    ]


def _notes(run: PlannedRun) -> list[str]:
    config, model, notes = run.config, run.model, []
    row, budget = config.rollout.limits.turn_tokens, config.learner.tokens_per_micro_batch
    if not model.known:
        notes.append(f"activations of {model.kind} are estimated as those of a gated layer, which were never measured")
    if row > budget:
        notes.append(
            f"a row may have {row} tokens, and is refused if it does: learner.tokens_per_micro_batch is {budget}"
        )
    if model.adapters is not None and model.adapters.layers != LINEAR_LAYERS * model.decoder.layers:
        notes.append("activations are counted as if every linear layer had an adapter")
    if config.model.lora is not None and config.warm_start.steps:
        notes.append("not counted: the warm start, which trains all weights")
    if model.tower is not None:
        notes.append(
            f"the vision tower ({model.tower.parameters:,} parameters, model.vision: {config.model.vision}) is counted "
            f"as if all {run.batch.tokens:,} tokens of a micro-batch were those of distinct pictures: "
            f"{run.batch.tokens * model.tower.patches:,} patches; the sampler's is counted by its weights alone"
        )
    copied = sharing(run)
    if copied >= SHARING_NOTED:
        notes.append(
            f"where rows share a context, each of them gathers its keys anew, which takes up to {copied / GIB:.2f} "
            f"GiB more; model.attention=flex, which runs on a GPU, gathers nothing"
        )
    return notes
