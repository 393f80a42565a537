"""Predicts, from the configuration alone, what a run takes: memory of every device in every phase, and tokens.

Loads neither weights nor tokenizer nor DeepSpeed. The bytes are ``formulas.py``'s and ``zero.py``'s; this file says
which of them exist at the same time.

    sampler │ learner │ reference        there from beginning to end
    loading, rolling out, learning, publishing   each at its largest moment; the peak is the largest of them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from condensegrpo.algorithms.objective import Tokenwise
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.config.load import evaluations
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.dtypes import DTYPES
from condensegrpo.learner.fused_head import tile_tokens
from condensegrpo.learner.head import CHUNK_LOGITS
from condensegrpo.planning import formulas, zero
from condensegrpo.planning.architecture import Architecture
from condensegrpo.planning.formulas import Branch, Decoder, Gathered, MicroBatch, Part, Weights, gathered
from condensegrpo.planning.zero import Device, Held
from condensegrpo.samplers.transformers import MAX_BATCH

SHARING_NOTED = 1 << 28  # bytes
LINEAR_LAYERS = 7  # of a gated decoder layer
COLOCATED = "transformers"  # the sampler that shares the learner's process and device


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
    batch: MicroBatch
    requests: int  # generated at once
    phases: tuple[Phase, ...]
    tokens: Tokens
    notes: tuple[str, ...]  # what the figures leave out, for this configuration

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)


def plan(config: RunConfig, model: Architecture, *, ranks: int, device: Device) -> Plan:
    """The plan of a run.

    Args:
        model: the architecture of ``config.model``.

    Raises:
        ConfigError: the problems of a step do not divide over the ranks.
    """
    if config.train.problems_per_step % ranks:
        raise ConfigError(
            f"planning for {ranks} ranks: train.problems_per_step={config.train.problems_per_step} does not divide "
            f"over them. Choose a multiple, or another --ranks."
        )
    tokens, weights = _tokens(config, ranks), _weights(config, model)
    batch, requests = _largest_batch(config, ranks), _requests(config, ranks)
    learner = zero.held(
        weights,
        stage=config.learner.zero_stage,
        ranks=ranks,
        device=device,
        embedding=model.decoder.embedding if model.adapters is None else 0,  # an adapter is small
        several=tokens.micro_batches > 1,
    )
    decoder, resident = model.decoder, _resident(config, weights)
    # AdamW makes its moments in the first step
    opening = (*(part for part in learner.always if part.name != zero.MOMENTS), *learner.opening)
    phases = (
        Phase(name="loading", moment="DeepSpeed opens", parts=(*resident[:1], *opening)),
        _largest("rolling out", _rolling_out(config, decoder, requests), (*resident, *learner.always)),
        _largest("learning", _learning(config, model, batch, learner, device), (*resident, *learner.always)),
        _largest("publishing", _publishing(config, weights, model, ranks, device), (*resident, *learner.always)),
    )
    return Plan(
        architecture=model,
        weights=weights,
        device=device,
        ranks=ranks,
        batch=batch,
        requests=requests,
        phases=phases,
        tokens=tokens,
        notes=tuple(_notes(config, model, batch)),
    )


def _tokens(config: RunConfig, ranks: int) -> Tokens:
    rollout, train = config.rollout, config.train
    turns = train.problems_per_step * train.samples_per_problem * rollout.limits.max_turns
    fitting = max(1, config.learner.tokens_per_micro_batch // _row(config))  # rows of a micro-batch
    return Tokens(
        step=turns * (rollout.limits.max_context_tokens + rollout.limits.max_output_tokens),
        trained=turns * rollout.limits.max_output_tokens,
        micro_batches=ceil(turns / ranks / fitting),
        optimiser_steps=train.steps * config.algorithm.updates_per_batch,
    )


def _row(config: RunConfig) -> int:
    """Tokens of the longest row: the last context holds whatever the row began with."""
    return config.rollout.limits.max_context_tokens + config.rollout.limits.max_output_tokens


def _largest_batch(config: RunConfig, ranks: int) -> MicroBatch:
    """A full micro-batch of the longest rows, or all rows of a rank if these are fewer tokens."""
    rollout, train = config.rollout, config.train
    rows = train.problems_per_step // ranks * train.samples_per_problem * rollout.limits.max_turns
    tokens = min(config.learner.tokens_per_micro_batch, rows * _row(config))
    length = min(_row(config), tokens)
    outputs = min(length - 1, rollout.limits.max_turns * rollout.limits.max_output_tokens)
    return MicroBatch(tokens=tokens, length=length, trained=ceil(tokens / length * outputs))


def _requests(config: RunConfig, ranks: int) -> int:
    """Requests that wait at the same time: every trajectory of a rank, of a step or an evaluation, has one at most."""
    train, evaluate = config.train, config.evaluate
    trained = train.problems_per_step // ranks * train.samples_per_problem
    evaluated = ceil(evaluate.problems / ranks) * evaluate.samples
    most = config.sampler.options.get("max_batch", MAX_BATCH)
    if not isinstance(most, int) or most < 1:
        raise ConfigError(f"planning the sampler: sampler.options.max_batch is {most!r}, wanted a number from 1 on.")
    return min(most, max(trained, evaluated))


def _weights(config: RunConfig, model: Architecture) -> Weights:
    """The learner's weights: all of them are trained, or adapters beside all of them."""
    trained, frozen = (model.adapters or model).parameters, model.parameters if model.adapters else 0
    return Weights(trainable=trained, frozen=frozen, element=DTYPES[config.model.dtype].itemsize)


def _resident(config: RunConfig, weights: Weights) -> tuple[Part, ...]:
    """What is there from beginning to end besides the learner: the sampler's weights and the reference's.

    With adapters the sampler has them added to its weights, and the reference is the learner's own base.
    """
    parameters = weights.frozen or weights.trainable
    sampler = parameters * _sampler_element(config) if config.sampler.name == COLOCATED else 0
    reference = weights.bytes if config.algorithm.kl.coefficient and config.model.lora is None else 0
    return (Part("sampler: weights", sampler), Part("reference model", reference))


def _sampler_element(config: RunConfig) -> int:
    """Bytes of an element of the sampler's weights: the learner's, unless its options say otherwise."""
    dtype = str(config.sampler.options.get("dtype", config.model.dtype))
    return DTYPES.get(dtype, DTYPES[config.model.dtype]).itemsize


def _rolling_out(config: RunConfig, decoder: Decoder, requests: int) -> dict[str, tuple[Part, ...]]:
    if config.sampler.name != COLOCATED:
        return {"sampled elsewhere": ()}
    element = _sampler_element(config)
    limits = [varied.rollout.limits for varied in evaluations(config).values()]
    context = max(each.max_context_tokens for each in limits)
    longest = max(each.max_context_tokens + each.max_output_tokens for each in limits)
    prompts = formulas.cache_bytes(decoder, requests=requests, length=context, element=element)
    cache = formulas.cache_bytes(decoder, requests=requests, length=longest, element=element)
    return {
        "prompts": (
            Part("sampler: KV cache", prompts),
            Part(
                "sampler: a layer", formulas.prefill_bytes(decoder, requests=requests, length=context, element=element)
            ),
        ),
        "last token": (
            Part("sampler: KV cache", cache),
            Part("sampler: logits", formulas.decoding_bytes(decoder, requests=requests, element=element)),
        ),
    }


def _learning(
    config: RunConfig, model: Architecture, batch: MicroBatch, learner: Held, device: Device
) -> dict[str, tuple[Part, ...]]:
    element, decoder, trained = DTYPES[config.model.dtype].itemsize, model.decoder, model.adapters is None
    activations = Part("activations", _activations(config, model, batch))
    backward = formulas.layer_backward_bytes(decoder, batch, element, trained=trained)
    ending = formulas.embedding_backward_bytes(decoder, element) if trained else 0
    return {
        "LM head": (*learner.forward, activations, _head(config, model, batch, device)),
        "last layer backward": (*learner.forward, activations, Part("gradients on their way", backward)),
        "end of backward": (*learner.ending, Part("gradients on their way", ending)),
        "optimiser step": learner.stepping,
    }


def _activations(config: RunConfig, model: Architecture, batch: MicroBatch) -> int:
    element, decoder = DTYPES[config.model.dtype].itemsize, model.decoder
    if model.adapters is None:
        kept = formulas.activation_bytes(decoder, batch, element)
    else:
        kept = formulas.adapted_activation_bytes(decoder, batch, element, width=model.adapters.width)
    if model.plain is None:
        kept += formulas.paths_bytes(decoder, batch, _rows_alone(batch), element)
    if config.model.attention == "eager":
        kept += formulas.eager_bytes(decoder, batch, element)
    return kept


def _rows_alone(batch: MicroBatch) -> Gathered:
    """Of rows of one length that share nothing; the last may be a part of one, which counts as that part."""
    row = gathered([Branch(above=0, length=batch.length)])
    return Gathered(*(ceil(batch.tokens * size / batch.length) for size in row))


def _head(config: RunConfig, model: Architecture, batch: MicroBatch, device: Device) -> Part:
    """The head takes one pass unless the objective looks at whole turns."""
    element, trained = DTYPES[config.model.dtype].itemsize, model.adapters is None
    if isinstance(objective(config.algorithm), Tokenwise):
        tile = tile_tokens(torch.device("cpu" if device == "cpu" else "cuda"))
        size = formulas.head_bytes(model.decoder, batch, tile=tile, element=element, trained=trained)
    else:
        chunk = max(1, CHUNK_LOGITS // model.decoder.vocabulary)
        size = formulas.chunked_head_bytes(model.decoder, batch, chunk_tokens=chunk, element=element, trained=trained)
    return Part("LM head", size)


def _publishing(
    config: RunConfig, weights: Weights, model: Architecture, ranks: int, device: Device
) -> dict[str, tuple[Part, ...]]:
    """Weights go to the sampler one module at a time, the embedding is the largest; a saved policy is copied whole."""
    sharded = config.learner.zero_stage == 3 and ranks > 1
    gathered = Part("gathered weights", weights.element * model.decoder.embedding if sharded else 0)
    merged = Part("merged weight", formulas.merging_bytes(model.decoder, weights.element) if model.adapters else 0)
    parameters = weights.frozen or weights.trainable
    copied = Part("policy to save", weights.element * parameters if device == "cpu" else 0)  # else in main memory
    return {"a checkpoint": (gathered, merged, copied)}


def _largest(name: str, moments: dict[str, tuple[Part, ...]], always: Sequence[Part]) -> Phase:
    phases = [Phase(name=name, moment=moment, parts=(*always, *parts)) for moment, parts in moments.items()]
    return max(phases, key=lambda phase: phase.bytes)


def _notes(config: RunConfig, model: Architecture, batch: MicroBatch) -> list[str]:
    notes = []
    if not model.known:
        notes.append(f"activations of {model.kind} are estimated as those of a gated layer, which were never measured")
    if config.sampler.name != COLOCATED:
        notes.append(f"memory of the sampler {config.sampler.name} is not counted")
    if _row(config) > config.learner.tokens_per_micro_batch:
        notes.append(
            f"a row may have {_row(config)} tokens, and is refused if it does: learner.tokens_per_micro_batch is "
            f"{config.learner.tokens_per_micro_batch}"
        )
    if model.adapters is not None and model.adapters.layers != LINEAR_LAYERS * model.decoder.layers:
        notes.append("activations are counted as if every linear layer had an adapter")
    if config.model.lora is not None and config.warm_start.steps:
        notes.append("not counted: the warm start, which trains all weights")
    if config.learner.offload.training != "none":
        notes.append(
            f"not counted: learner.offload.training={config.learner.offload.training}, which takes less on a GPU"
        )
    if config.learner.offload.reference:
        notes.append("not counted: learner.offload.reference, which takes less on a GPU while it learns")
    more = _sharing(config, model, batch)
    if more >= SHARING_NOTED:
        notes.append(
            f"where rows share a context, each of them gathers its keys anew, which takes up to {more / 2**30:.2f} GiB "
            f"more; flash attention (model.attention=flash_attention_2) shares nothing and gathers nothing"
        )
    return notes


def _sharing(config: RunConfig, model: Architecture, batch: MicroBatch) -> int:
    """What a micro-batch keeps more where all samples of a problem continue one full context by full outputs."""
    context, output = config.rollout.limits.max_context_tokens, config.rollout.limits.max_output_tokens
    samples = min(config.train.samples_per_problem, (batch.tokens - context) // output)
    if model.plain is not None or samples < 2:
        return 0
    tree = gathered([Branch(above=0, length=context + output), *[Branch(above=context, length=output)] * (samples - 1)])
    tokens = context + samples * output
    shared = Gathered(*(ceil(batch.tokens * size / tokens) for size in tree))
    element = DTYPES[config.model.dtype].itemsize
    alone = formulas.paths_bytes(model.decoder, batch, _rows_alone(batch), element)
    return formulas.paths_bytes(model.decoder, batch, shared, element) - alone
