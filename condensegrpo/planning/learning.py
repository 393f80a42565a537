"""What is planned, a configuration on its devices, and the memory of an optimiser step there, in bytes."""

from dataclasses import dataclass, replace
from math import ceil

import torch

from condensegrpo.algorithms.objective import PerToken
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.config.schema import RunConfig
from condensegrpo.learner.attention_kernels import planned_kernel
from condensegrpo.learner.devices import DTYPES
from condensegrpo.learner.head import CHUNK_LOGITS, tile_tokens
from condensegrpo.planning import formulas
from condensegrpo.planning.architecture import Architecture
from condensegrpo.planning.formulas import Branch, Decoder, Gathered, MicroBatch, Part, Weights, gathered
from condensegrpo.planning.zero import DeepSpeedMemory, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A configuration on its devices."""

    config: RunConfig
    model: Architecture
    ranks: int  # devices of the run
    device: Device  # of each
    memory: int | None  # bytes of a GPU, of which vLLM has a share; None: not known, or a CPU
    checkpointed: int  # decoder layers, the first ones, that backward computes again

    @property
    def on_gpu(self) -> bool:
        """Whether every rank has a GPU."""
        return self.device == "gpu"

    @property
    def element(self) -> int:
        """Bytes of an element of the learner's weights."""
        return DTYPES[self.config.model.dtype].itemsize

    @property
    def trained(self) -> bool:
        """Whether the model's weights are trained, and not adapters beside them."""
        return self.model.adapters is None

    @property
    def weights(self) -> Weights:
        """The learner's weights: all of them are trained, or all but a vision tower's, or adapters beside all."""
        adapters, parameters = self.model.adapters, self.model.parameters
        if adapters is None:
            frozen = 0 if self.model.tower is None or self.trains_tower else self.model.tower.parameters
            return Weights(trainable=parameters - frozen, frozen=frozen, element=self.element)
        return Weights(trainable=adapters.parameters, frozen=parameters, element=self.element)

    @property
    def compiled(self) -> bool:
        """Whether the decoder's layers are certainly compiled; with ``auto`` only a trial at the start decides."""
        return self.config.learner.compile_layers is True

    @property
    def trains_tower(self) -> bool:
        """Whether a vision tower takes gradients."""
        return self.model.tower is not None and self.config.model.vision == "train"

    @property
    def kernel(self) -> str:
        """The kernel of ``model.attention`` that memory is counted for."""
        return planned_kernel(self.config.model.attention, gpu=self.on_gpu)

    @property
    def batch(self) -> MicroBatch:
        """A full micro-batch of the longest rows, or all rows of the ranks that share it if these are fewer tokens."""
        limits, train, learner = self.config.rollout.limits, self.config.train, self.config.learner
        problems = train.problems_per_step * learner.sequence_parallel // self.ranks
        rows = problems * train.samples_per_problem * limits.max_turns
        tokens = min(learner.tokens_per_micro_batch, rows * limits.turn_tokens)
        length = min(limits.turn_tokens, tokens)
        outputs = min(length - 1, limits.max_turns * limits.max_output_tokens)
        return MicroBatch(tokens=tokens, length=length, trained=ceil(tokens / length * outputs))

    @property
    def rank_batch(self) -> MicroBatch:
        """A rank's tokens of a micro-batch (``learner.sequence_parallel``)."""
        batch, ranks = self.batch, self.config.learner.sequence_parallel
        return replace(batch, tokens=ceil(batch.tokens / ranks), trained=ceil(batch.trained / ranks))


def learning(run: PlannedRun, learner: DeepSpeedMemory) -> dict[str, tuple[Part, ...]]:
    """What comes on top of the weights and the optimiser at each moment of an optimiser step."""
    decoder, element, trained = run.model.decoder, run.element, run.trained
    kept, again = activations(run)
    backward = formulas.layer_backward_bytes(decoder, run.rank_batch, element, trained=trained)
    ending = formulas.embedding_backward_bytes(decoder, element) if trained else 0
    pictures, layer = _pictures(run)
    return {
        **({"vision tower": (*learner.forward, *pictures, *layer)} if layer else {}),
        "LM head": (*learner.forward, *pictures, kept, Part("LM head", head(run, run.rank_batch))),
        "last layer backward": (*learner.forward, *pictures, kept, again, Part("gradients on their way", backward)),
        "end of backward": (*learner.ending, *pictures, *layer, Part("gradients on their way", ending)),
        "optimiser step": learner.stepping,
    }


def _pictures(run: PlannedRun) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """What pictures add until the end of backward, and a layer of the tower at work; () for a model of text.

    There are at most as many as a micro-batch has tokens for, and each is computed once.
    """
    tower, batch, element = run.model.tower, run.rank_batch, run.element
    if tower is None:
        return (), ()
    layer = formulas.tower_layer_bytes(tower, batch, element, trained=run.trains_tower)
    kept = formulas.tower_bytes(tower, batch, element, checkpointed=run.checkpointed > 0) if run.trains_tower else 0
    pixels = Part("pixels", formulas.pixels_bytes(tower, batch))
    return (pixels, Part("vision tower: activations", kept)), (Part("vision tower: a layer", layer),)


def activations(run: PlannedRun) -> tuple[Part, Part]:
    """What forward keeps for backward, and what backward computes again, a layer at a time.

    Attention sees the whole micro-batch. Where ranks share it, each has a part of the heads, and a layer keeps the
    output by heads and by tokens unless the kernel copies it anyway; fewer key heads than ranks are repeated.
    """
    element, decoder, adapters, of_rank = run.element, run.model.decoder, run.model.adapters, run.rank_batch
    ranks, width = run.config.learner.sequence_parallel, 0 if adapters is None else adapters.width
    output = decoder.queries if ranks > 1 and run.kernel != "sdpa" else 0
    repeated = 2 * decoder.keys * max(0, ranks / decoder.kv_heads - 1)
    exchanged = ceil(element * of_rank.tokens * (output + repeated))  # in a layer

    def kernel(layers: int) -> int:
        return ceil(_attention(run, replace(decoder, layers=layers)) / ranks)

    whole, again = decoder.layers - run.checkpointed, 0
    kept = formulas.activation_bytes(
        decoder, of_rank, element, width=width, checkpointed=run.checkpointed, compiled=run.compiled
    )
    kept += kernel(whole) + whole * exchanged
    if not whole:  # else a layer is computed again when the last one, which was kept, is gone
        layer = formulas.layer_bytes(decoder, element, trained=run.trained, compiled=run.compiled)
        again = ceil(of_rank.tokens * (layer + element * width / decoder.layers)) + kernel(1) - kernel(0) + exchanged
    return Part("activations", kept), Part("a layer, computed again", again)


def _attention(run: PlannedRun, decoder: Decoder) -> int:
    """What the kernel of ``model.attention`` keeps more than plain attention."""
    batch, element = run.batch, run.element
    if run.kernel == "eager":
        return formulas.eager_bytes(decoder, batch, element)
    if run.model.plain is not None:
        return 0
    if run.kernel == "flex":
        return formulas.intervals_bytes(batch)
    if run.kernel == "flash":
        return formulas.branches_bytes(decoder, batch, batch.tokens, element)
    return formulas.paths_bytes(decoder, batch, _rows_alone(batch), element)


def sharing(run: PlannedRun) -> int:
    """What a micro-batch keeps more where all samples of a problem continue one full context by full outputs.

    The kernels sdpa and flash gather the keys of a context for each of its continuations; flex gathers nothing. Of
    layers that are computed again they are there for one at a time.
    """
    batch, limits, element = run.batch, run.config.rollout.limits, run.element
    context, output = limits.max_context_tokens, limits.max_output_tokens
    samples = min(run.config.train.samples_per_problem, (batch.tokens - context) // output)
    if run.model.plain is not None or samples < 2 or run.kernel == "flex":
        return 0
    tokens = context + samples * output
    decoder = replace(run.model.decoder, layers=max(1, run.model.decoder.layers - run.checkpointed))
    if run.kernel == "flash":
        keys = ceil(batch.tokens * (tokens + (samples - 1) * context) / tokens)
        return formulas.branches_bytes(decoder, batch, keys, element)
    tree = gathered([Branch(above=0, length=context + output), *[Branch(above=context, length=output)] * (samples - 1)])
    shared = Gathered(*(ceil(batch.tokens * size / tokens) for size in tree))
    alone = formulas.paths_bytes(decoder, batch, _rows_alone(batch), element)
    return formulas.paths_bytes(decoder, batch, shared, element) - alone


def _rows_alone(batch: MicroBatch) -> Gathered:
    """Of rows of one length that share nothing; the last may be a part of one, which counts as that part."""
    row = gathered([Branch(above=0, length=batch.length)])
    return Gathered(*(ceil(batch.tokens * size / batch.length) for size in row))


def head(run: PlannedRun, batch: MicroBatch) -> int:
    """The head takes one pass unless the objective looks at whole turns."""
    decoder, element = run.model.decoder, run.element
    if isinstance(objective(run.config.algorithm), PerToken):
        tile = tile_tokens(torch.device("cuda" if run.on_gpu else "cpu"))
        return formulas.head_bytes(decoder, batch, tile=tile, element=element, trained=run.trained)
    chunk = max(1, CHUNK_LOGITS // decoder.vocabulary)
    return formulas.chunked_head_bytes(decoder, batch, chunk_tokens=chunk, element=element, trained=run.trained)
