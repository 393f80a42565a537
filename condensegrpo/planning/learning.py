"""What a micro-batch takes on one device while the learner works on it, at each moment, in bytes."""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch

from condensegrpo.algorithms.objective import PerToken
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.config.schema import RunConfig
from condensegrpo.learner.activation_checkpointing import is_on
from condensegrpo.learner.attention_kernels import planned_kernel
from condensegrpo.learner.dtypes import DTYPES
from condensegrpo.learner.fused_head import tile_tokens
from condensegrpo.learner.head import CHUNK_LOGITS
from condensegrpo.planning import formulas
from condensegrpo.planning.architecture import Architecture
from condensegrpo.planning.formulas import Branch, Decoder, Gathered, MicroBatch, Part, gathered
from condensegrpo.planning.zero import DeepSpeedMemory, Device


class Activations(NamedTuple):
    """Of a micro-batch, in bytes."""

    kept: int  # from forward to backward
    again: int  # computed again in backward, a layer at a time; 0 without activation checkpointing


def row_length(config: RunConfig) -> int:
    """Tokens of the longest row: the last context holds whatever the row began with."""
    return config.rollout.limits.max_context_tokens + config.rollout.limits.max_output_tokens


def largest_batch(config: RunConfig, ranks: int) -> MicroBatch:
    """A full micro-batch of the longest rows, or all rows of the ranks that share it if these are fewer tokens."""
    rollout, train, row = config.rollout, config.train, row_length(config)
    rows = (
        train.problems_per_step
        * config.learner.sequence_parallel
        // ranks
        * train.samples_per_problem
        * rollout.limits.max_turns
    )
    tokens = min(config.learner.tokens_per_micro_batch, rows * row)
    length = min(row, tokens)
    outputs = min(length - 1, rollout.limits.max_turns * rollout.limits.max_output_tokens)
    return MicroBatch(tokens=tokens, length=length, trained=ceil(tokens / length * outputs))


def learning(
    config: RunConfig, model: Architecture, batch: MicroBatch, learner: DeepSpeedMemory, device: Device
) -> dict[str, tuple[Part, ...]]:
    """What comes on top of the weights and the optimiser at each moment of an optimiser step.

    Args:
        batch: of all ranks that compute it together, each with a part of its tokens.
    """
    element, decoder, trained = DTYPES[config.model.dtype].itemsize, model.decoder, model.adapters is None
    saved, of_rank = activations(config, model, batch, device), rank_part(config, batch)
    kept, again = Part("activations", saved.kept), Part("a layer, computed again", saved.again)
    backward = formulas.layer_backward_bytes(decoder, of_rank, element, trained=trained)
    ending = formulas.embedding_backward_bytes(decoder, element) if trained else 0
    return {
        "LM head": (*learner.forward, kept, _head(config, model, of_rank, device)),
        "last layer backward": (*learner.forward, kept, again, Part("gradients on their way", backward)),
        "end of backward": (*learner.ending, Part("gradients on their way", ending)),
        "optimiser step": learner.stepping,
    }


def rank_part(config: RunConfig, batch: MicroBatch) -> MicroBatch:
    """A rank's tokens of a micro-batch (``learner.sequence_parallel``)."""
    ranks = config.learner.sequence_parallel
    return replace(batch, tokens=ceil(batch.tokens / ranks), trained=ceil(batch.trained / ranks))


def activations(config: RunConfig, model: Architecture, batch: MicroBatch, device: Device) -> Activations:
    """What forward keeps for backward, with the kernel and the checkpointing of the configuration.

    Attention sees the whole micro-batch. Where ranks share it, each has a part of the heads, and a layer keeps the
    output by heads and by tokens unless the kernel copies it anyway; fewer key heads than ranks are repeated.
    """
    element, decoder, trained = DTYPES[config.model.dtype].itemsize, model.decoder, model.adapters is None
    ranks, of_rank = config.learner.sequence_parallel, rank_part(config, batch)
    output = decoder.queries if ranks > 1 and kernel_of(config, device) != "sdpa" else 0
    repeated = 2 * decoder.keys * max(0, ranks / decoder.kv_heads - 1)
    exchanged = ceil(element * of_rank.tokens * (output + repeated))  # in a layer

    def kernel(layers: int) -> int:
        return ceil(_attention(config, model, replace(decoder, layers=layers), batch, device) / ranks)

    if not is_on(config.learner.checkpoint_activations, gpu=device == "gpu"):
        if model.adapters is None:
            kept = formulas.activation_bytes(decoder, of_rank, element)
        else:
            kept = formulas.adapted_activation_bytes(decoder, of_rank, element, width=model.adapters.width)
        return Activations(kept=kept + kernel(decoder.layers) + decoder.layers * exchanged, again=0)
    width = 0 if model.adapters is None else model.adapters.width / decoder.layers
    layer = formulas.layer_bytes(decoder, element, trained=trained) + element * width
    return Activations(
        kept=formulas.checkpointed_bytes(decoder, of_rank, element, trained=trained) + kernel(0),
        again=ceil(of_rank.tokens * layer) + kernel(1) - kernel(0) + exchanged,
    )


def _attention(config: RunConfig, model: Architecture, decoder: Decoder, batch: MicroBatch, device: Device) -> int:
    """What the kernel of ``model.attention`` keeps more than plain attention."""
    element, kernel = DTYPES[config.model.dtype].itemsize, kernel_of(config, device)
    if kernel == "eager":
        return formulas.eager_bytes(decoder, batch, element)
    if model.plain is not None:
        return 0
    if kernel == "flex":
        return formulas.intervals_bytes(batch)
    if kernel == "flash":
        return formulas.branches_bytes(decoder, batch, batch.tokens, element)
    return formulas.paths_bytes(decoder, batch, _rows_alone(batch), element)


def kernel_of(config: RunConfig, device: Device) -> str:
    """The kernel of ``model.attention`` that memory is counted for."""
    return planned_kernel(config.model.attention, gpu=device == "gpu")


def sharing(config: RunConfig, model: Architecture, batch: MicroBatch, device: Device) -> int:
    """What a micro-batch keeps more where all samples of a problem continue one full context by full outputs.

    The kernels sdpa and flash gather the keys of a context for each of its continuations; flex gathers nothing. With
    activation checkpointing they are there for one layer at a time.
    """
    context, output = config.rollout.limits.max_context_tokens, config.rollout.limits.max_output_tokens
    samples = min(config.train.samples_per_problem, (batch.tokens - context) // output)
    kernel, checkpointing = kernel_of(config, device), is_on(config.learner.checkpoint_activations, gpu=device == "gpu")
    if model.plain is not None or samples < 2 or kernel == "flex":
        return 0
    tree = gathered([Branch(above=0, length=context + output), *[Branch(above=context, length=output)] * (samples - 1)])
    tokens = context + samples * output
    shared = Gathered(*(ceil(batch.tokens * size / tokens) for size in tree))
    element, decoder = DTYPES[config.model.dtype].itemsize, model.decoder
    decoder = replace(decoder, layers=1) if checkpointing else decoder
    if kernel == "flash":
        keys = ceil(batch.tokens * (tokens + (samples - 1) * context) / tokens)
        return formulas.branches_bytes(decoder, batch, keys, element)
    alone = formulas.paths_bytes(decoder, batch, _rows_alone(batch), element)
    return formulas.paths_bytes(decoder, batch, shared, element) - alone


def _rows_alone(batch: MicroBatch) -> Gathered:
    """Of rows of one length that share nothing; the last may be a part of one, which counts as that part."""
    row = gathered([Branch(above=0, length=batch.length)])
    return Gathered(*(ceil(batch.tokens * size / batch.length) for size in row))


def _head(config: RunConfig, model: Architecture, batch: MicroBatch, device: Device) -> Part:
    """The head takes one pass unless the objective looks at whole turns."""
    element, trained = DTYPES[config.model.dtype].itemsize, model.adapters is None
    if isinstance(objective(config.algorithm), PerToken):
        tile = tile_tokens(torch.device("cpu" if device == "cpu" else "cuda"))
        size = formulas.head_bytes(model.decoder, batch, tile=tile, element=element, trained=trained)
    else:
        chunk = max(1, CHUNK_LOGITS // model.decoder.vocabulary)
        size = formulas.chunked_head_bytes(model.decoder, batch, chunk_tokens=chunk, element=element, trained=trained)
    return Part("LM head", size)
