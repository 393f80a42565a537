"""Predicts, from the configuration alone, what a run takes: memory of every device in every phase, and tokens.

Loads neither weights nor tokenizer nor DeepSpeed. The bytes are ``memory.py``'s and ``zero.py``'s; this file says which
of them exist at the same time.

    sampler │ learner │ reference        there from beginning to end
    loading, rolling out, learning, publishing   each at its largest moment; the peak is the largest of them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from condensegrpo import memory, zero
from condensegrpo.architecture import Architecture
from condensegrpo.config import RunConfig, evaluations
from condensegrpo.errors import ConfigError
from condensegrpo.learner.logprobs import CHUNK_LOGITS, DENSE_ATTENTION, side_by_side
from condensegrpo.learner.policy import DTYPES as POLICY
from condensegrpo.memory import Decoder, MicroBatch, Part, Weights
from condensegrpo.samplers.transformers import DTYPES, MAX_BATCH
from condensegrpo.zero import Device, Held

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


def plan(config: RunConfig, found: Architecture, *, ranks: int, device: Device) -> Plan:
    """The plan of a run.

    Args:
        found: the architecture of ``config.model``.

    Raises:
        ConfigError: the problems of a step do not divide over the ranks.
    """
    if config.train.problems_per_step % ranks:
        raise ConfigError(
            f"planning for {ranks} ranks: train.problems_per_step={config.train.problems_per_step} does not divide "
            f"over them. Choose a multiple, or another --ranks."
        )
    tokens, weights = _tokens(config, ranks), _weights(config, found)
    batch, requests = _largest_batch(config, ranks), _requests(config, ranks)
    learner = zero.held(
        weights,
        stage=config.learner.zero_stage,
        ranks=ranks,
        device=device,
        embedding=found.decoder.embedding,
        several=tokens.micro_batches > 1,
    )
    decoder, resident = found.decoder, _resident(config, weights)
    phases = (
        Phase(name="loading", moment="DeepSpeed opens", parts=(*resident[:1], *_opening(learner))),
        _largest("rolling out", _rolling_out(config, decoder, requests), (*resident, *learner.always)),
        _largest("learning", _learning(config, decoder, batch, learner), (*resident, *learner.always)),
        _largest("publishing", _publishing(config, weights, decoder, ranks, device), (*resident, *learner.always)),
    )
    return Plan(
        architecture=found,
        weights=weights,
        device=device,
        ranks=ranks,
        batch=batch,
        requests=requests,
        phases=phases,
        tokens=tokens,
        notes=tuple(_notes(config, found, batch)),
    )


def _tokens(config: RunConfig, ranks: int) -> Tokens:
    rollout, train = config.rollout, config.train
    turns = train.problems_per_step * train.samples_per_problem * rollout.max_turns
    fitting = max(1, config.learner.tokens_per_micro_batch // _row(config))  # rows of a micro-batch
    return Tokens(
        step=turns * (rollout.max_context_tokens + rollout.max_output_tokens),
        trained=turns * rollout.max_output_tokens,
        micro_batches=ceil(turns / ranks / fitting),
        optimiser_steps=train.steps * config.algorithm.updates_per_batch,
    )


def _row(config: RunConfig) -> int:
    """Tokens of the longest row: the last context holds whatever the row began with."""
    return config.rollout.max_context_tokens + config.rollout.max_output_tokens


def _largest_batch(config: RunConfig, ranks: int) -> MicroBatch:
    """A full micro-batch of the longest rows, or all rows of a rank if these are fewer tokens."""
    rollout, train = config.rollout, config.train
    rows = train.problems_per_step // ranks * train.samples_per_problem * rollout.max_turns
    tokens = min(config.learner.tokens_per_micro_batch, rows * _row(config))
    length = min(_row(config), tokens)
    outputs = min(length - 1, rollout.max_turns * rollout.max_output_tokens)
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


def _weights(config: RunConfig, found: Architecture) -> Weights:
    """The learner's weights: all of them are trained."""
    return Weights(trainable=found.parameters, frozen=0, element=POLICY[config.model.dtype].itemsize)


def _resident(config: RunConfig, weights: Weights) -> tuple[Part, ...]:
    """What is there from beginning to end besides the learner: the sampler's weights and the reference's."""
    parameters = weights.trainable + weights.frozen
    sampler = parameters * _sampler_element(config) if config.sampler.name == COLOCATED else 0
    reference = weights.bytes if config.algorithm.kl.coefficient else 0
    return (Part("sampler: weights", sampler), Part("reference model", reference))


def _sampler_element(config: RunConfig) -> int:
    """Bytes of an element of the sampler's weights: the learner's, unless its options say otherwise."""
    dtype = str(config.sampler.options.get("dtype", config.model.dtype))
    return DTYPES[dtype].itemsize if dtype in DTYPES else POLICY[config.model.dtype].itemsize


def _opening(learner: Held) -> tuple[Part, ...]:
    """AdamW makes its moments in the first step."""
    return tuple(part for part in learner.always if part.name != zero.MOMENTS) + learner.opening


def _rolling_out(config: RunConfig, decoder: Decoder, requests: int) -> dict[str, tuple[Part, ...]]:
    if config.sampler.name != COLOCATED:
        return {"sampled elsewhere": ()}
    element = _sampler_element(config)
    varied = [one.rollout for one in evaluations(config).values()]
    context = max(one.max_context_tokens for one in varied)
    longest = max(one.max_context_tokens + one.max_output_tokens for one in varied)
    prompts = memory.cache_bytes(decoder, requests=requests, length=context, element=element)
    cache = memory.cache_bytes(decoder, requests=requests, length=longest, element=element)
    return {
        "prompts": (
            Part("sampler: KV cache", prompts),
            Part("sampler: a layer", memory.prefill_bytes(decoder, requests=requests, length=context, element=element)),
        ),
        "last token": (
            Part("sampler: KV cache", cache),
            Part("sampler: logits", memory.decoding_bytes(decoder, requests=requests, element=element)),
        ),
    }


def _learning(config: RunConfig, decoder: Decoder, batch: MicroBatch, learner: Held) -> dict[str, tuple[Part, ...]]:
    element = POLICY[config.model.dtype].itemsize
    kept = memory.activation_bytes(decoder, batch, element)
    if config.model.attention == "eager":
        kept += memory.eager_bytes(decoder, batch, element)
    activations = Part("activations", kept)
    chunk = max(1, CHUNK_LOGITS // decoder.vocabulary)
    head = memory.head_bytes(decoder, batch, chunk_tokens=chunk, element=element)
    return {
        "LM head": (*learner.forward, activations, Part("LM head", head)),
        "last layer backward": (
            *learner.forward,
            activations,
            Part("gradients on their way", memory.layer_backward_bytes(decoder, batch, element)),
        ),
        "end of backward": (
            *learner.ending,
            Part("gradients on their way", memory.embedding_backward_bytes(decoder, element)),
        ),
        "optimiser step": learner.stepping,
    }


def _publishing(
    config: RunConfig, weights: Weights, decoder: Decoder, ranks: int, device: Device
) -> dict[str, tuple[Part, ...]]:
    """Weights go to the sampler one module at a time, the embedding is the largest; a saved policy is copied whole."""
    sharded = config.learner.zero_stage == 3 and ranks > 1
    gathered = Part("gathered weights", weights.element * decoder.embedding if sharded else 0)
    copied = Part("policy to save", weights.bytes if device == "cpu" else 0)  # else in main memory
    return {"a checkpoint": (gathered, copied)}


def _largest(name: str, moments: dict[str, tuple[Part, ...]], always: Sequence[Part]) -> Phase:
    phases = [Phase(name=name, moment=moment, parts=(*always, *parts)) for moment, parts in moments.items()]
    return max(phases, key=lambda phase: phase.bytes)


def _notes(config: RunConfig, found: Architecture, batch: MicroBatch) -> list[str]:
    notes = []
    if not found.known:
        notes.append(f"activations of {found.kind} are estimated as those of a gated layer, which were never measured")
    if config.sampler.name != COLOCATED:
        notes.append(f"memory of the sampler {config.sampler.name} is not counted")
    if _row(config) > config.learner.tokens_per_micro_batch:
        notes.append(
            f"a row may have {_row(config)} tokens, and is refused if it does: learner.tokens_per_micro_batch is "
            f"{config.learner.tokens_per_micro_batch}"
        )
    dense = config.model.attention in DENSE_ATTENTION
    if dense and not side_by_side(4 * batch.tokens // batch.length, batch.length, batch.tokens, found.decoder.hidden):
        mask = memory.mask_bytes(found.decoder, batch.tokens, POLICY[config.model.dtype].itemsize)
        notes.append(
            f"a micro-batch of few long rows and many short ones is laid out under a mask, which takes up to "
            f"{mask / 2**30:.2f} GiB more; flash attention (model.attention=flash_attention_2) has none"
        )
    return notes
