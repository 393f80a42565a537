"""Predicts the memory of each device and the tokens of a step from the configuration alone: no weights are loaded.

A run loads, then samples and learns by turns: the columns of a plan, each at its largest moment. Terms are tensors of
transformers' layers, torch's autograd and DeepSpeed 0.19; docs/results/memory-prediction.md compares them with peaks.

Legend: S tokens of a micro-batch, L of its longest row, H hidden size, Q and K widths of queries and keys, F width of
the MLP, V vocabulary, P trainable parameters, e bytes of an element of the weights.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from condensegrpo.algorithms.objective import PerToken
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.config.checks import check_ranks
from condensegrpo.config.load import evaluations, longest_request, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.attention_kernels import planned_kernel
from condensegrpo.learner.devices import DTYPES
from condensegrpo.learner.head import CHUNK_LOGITS, tile_tokens
from condensegrpo.learner.layers import checkpointed_layers
from condensegrpo.learner.settings import BUCKET
from condensegrpo.planning.architecture import Architecture, Decoder, architecture
from condensegrpo.samplers.decoding import PASS_TOKENS
from condensegrpo.samplers.transformers import MAX_BATCH
from condensegrpo.samplers.vllm.settings import EngineSettings

COLOCATED, VLLM = "transformers", "vllm"  # the samplers that share the learner's device
FLOAT, GIB = 4, 1 << 30  # bytes of fp32: master weights, moments, norms
USABLE = 0.9  # of a device: the rest is for CUDA, NCCL, and what torch's allocator reserves beyond its tensors
FILLED = 0.8  # of a device, up to which layers keep their activations
GATHERED = 1_000_000_000  # elements that ZeRO 3 keeps gathered at most (stage3_max_live_parameters)
PIECE = 128  # queries that attention along tree paths computes at a time
GRAPHS = 1 * GIB  # of vLLM's CUDA graphs: the lower end of what its log says, "additional 1~3 GiB memory per GPU"

Device = Literal["cpu", "gpu"]
Bytes = dict[str, int]  # part → its bytes


class MicroBatch(NamedTuple):
    """The largest micro-batch, of all ranks that share it."""

    tokens: int  # S
    length: int  # L
    trained: int  # outputs


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
        """e."""
        return DTYPES[self.config.model.dtype].itemsize

    @property
    def weights(self) -> int:
        """Elements of the learner's weights, adapters included."""
        return self.model.parameters + (self.model.adapters or 0)

    @property
    def trainable(self) -> int:
        """P: the adapters if there are any, else all weights but those of a frozen vision tower."""
        tower = self.model.tower if self.config.model.vision != "train" else None
        return self.model.adapters or self.model.parameters - (0 if tower is None else tower.parameters)

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


class Tokens(NamedTuple):
    """Tokens of a step at most, with every trajectory as long as it may be."""

    step: int  # of contexts and outputs, over all ranks
    trained: int  # outputs of these
    micro_batches: int  # of one rank and one optimiser step


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The memory that a run takes on each of its devices."""

    run: PlannedRun
    requests: int  # generated at once
    phases: dict[str, Bytes]  # loading, sampling, learning
    tokens: Tokens
    refusal: str | None  # why the run would not start, whatever memory it has
    notes: tuple[str, ...]  # what the figures leave out, for this configuration

    def total(self, phase: str) -> int:
        """Bytes of all parts of a phase."""
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.total)

    @property
    def bytes(self) -> int:
        """Bytes of the phase that takes most."""
        return self.total(self.peak)

    @property
    def states(self) -> int:
        """Bytes of weights, optimiser and gradients while learning, which are there whatever a run trains on."""
        return sum(_states(self.run).learning.values())

    def fits(self, room: int) -> bool:
        """Whether the run starts, and its tensors take at most the usable part of ``room`` bytes of each device."""
        return self.refusal is None and self.bytes <= USABLE * room


def predict_memory(
    config: RunConfig, model: Architecture, *, ranks: int, device: Device, memory: int | None = None
) -> Plan:
    """The plan of a run.

    Args:
        model: the architecture of ``config.model``.
        memory: bytes of each GPU, of which vLLM takes a share; None: not known. With ``checkpoint_activations: auto``
            as few layers are computed again as it allows; on a GPU of unknown memory all are.

    Raises:
        ConfigError: as ``check_ranks``.
    """
    check_ranks(config, ranks)
    learner, limits, train, layers = config.learner, config.rollout.limits, config.train, model.decoder.layers
    run = PlannedRun(
        config=config,
        model=model,
        ranks=ranks,
        device=device,
        memory=memory if device == "gpu" else None,
        checkpointed=checkpointed_layers(learner.checkpoint_activations, layers, gpu=device == "gpu"),
    )
    sampler = _sampler(run)
    if learner.checkpoint_activations == "auto" and run.memory is not None and model.known:
        room = FILLED * run.memory

        def fits(count: int) -> bool:
            return sum(_phases(replace(run, checkpointed=count), sampler)["learning"].values()) <= room

        run = replace(run, checkpointed=bisect_left(range(layers), True, key=fits))
    turns = train.problems_per_step * train.samples_per_problem * limits.max_turns
    rows = max(1, learner.tokens_per_micro_batch // limits.turn_tokens)  # of a micro-batch
    micro_batches = ceil(turns * learner.sequence_parallel / ranks / rows)
    notes = list(sampler.notes)
    if not model.known:
        notes.append(f"activations of {model.kind} are estimated as those of a gated layer, which were never measured")
    if limits.turn_tokens > learner.tokens_per_micro_batch:
        notes.append(
            f"a row may have {limits.turn_tokens} tokens, and is refused if it does: learner.tokens_per_micro_batch is "
            f"{learner.tokens_per_micro_batch}"
        )
    if model.tower is not None:
        notes.append("the vision tower is counted as if all tokens of a micro-batch were those of distinct pictures")
    return Plan(
        run=run,
        requests=_requests(run),
        phases=_phases(run, sampler),
        tokens=Tokens(turns * limits.turn_tokens, turns * limits.max_output_tokens, micro_batches),
        refusal=sampler.refusal,
        notes=tuple(notes),
    )


def config_on_devices(config: RunConfig, *, ranks: int, memory: int | None) -> RunConfig:
    """The configuration with as many checkpointed layers as GPUs of so many bytes require, if it leaves that open.

    It is left as it is where ``memory`` is not known.
    """
    if config.learner.checkpoint_activations != "auto" or memory is None:
        return config
    planned = predict_memory(config, architecture(config.model), ranks=ranks, device="gpu", memory=memory)
    return vary(config, (f"learner.checkpoint_activations={planned.run.checkpointed}",))


def _phases(run: PlannedRun, sampler: "_Sampler") -> dict[str, Bytes]:
    """The sampler is loaded first. With adapters the reference is the learner's base, and takes nothing more."""
    config, offload, states = run.config, run.config.learner.offload, _states(run)
    copied = config.algorithm.kl.coefficient and config.model.lora is None and not (run.on_gpu and offload.reference)
    reference = {"reference model": run.weights * run.element if copied else 0}
    away = ("fp32 masters", "Adam's moments", "gradients") if run.on_gpu and offload.rollouts else ()
    resting = sampler.sampling if config.rollout.staleness else sampler.resting  # one that works ahead does not rest
    return {
        "loading": {**sampler.resting, **states.loading},
        "sampling": {**sampler.sampling, **states.idle, **dict.fromkeys(away, 0), **reference},
        "learning": {**resting, **states.learning, **reference, **_learning(run)},
    }


class _States(NamedTuple):
    loading: Bytes
    idle: Bytes
    learning: Bytes


def _states(run: PlannedRun) -> _States:
    """Weights, optimiser and gradients that DeepSpeed holds on each rank, unless they are offloaded.

    float32   stage 0      torch's AdamW on the parameters: no masters
    bfloat16  stage 0, 1   fp32 sums of all gradients on every rank beside fresh ones; a part of masters and moments
    float32   stage 1      whole gradients and a bucket; a part of masters, which DeepSpeed keeps even then
              stage 2, 3   a part of masters, moments and summed gradients, and a bucket
              stage 3      also a part of the weights; gathered ones stay for reuse

    A bucket counts on a GPU, and in stage 3; main memory is taken only where it has been written. While DeepSpeed opens
    there are also the weights that it flattens or spreads, and no moments.
    """
    stage, offload = run.config.learner.zero_stage, run.config.learner.offload.training if run.on_gpu else "none"
    element, trainable, kept = run.element, run.trainable, offload == "none"
    part, weights, gathered = ceil(trainable / run.ranks), run.weights, 0
    bucket = element * min(BUCKET, trainable) if run.on_gpu or stage == 3 else 0
    plain, between_steps = stage == 0 and element == FLOAT, 0
    if stage == 3:
        if run.ranks > 1 or offload == "optimiser_and_weights":
            gathered = min(weights, GATHERED)
        weights = 0 if offload == "optimiser_and_weights" else ceil(weights / run.ranks)
    if stage >= 2:
        gradients = bucket + (FLOAT * part if kept else 0)
        between_steps = gradients if stage == 3 else 0
    elif element != FLOAT and kept:
        between_steps = FLOAT * trainable
        gradients = between_steps + element * trainable
    else:
        gradients = FLOAT * trainable + (0 if plain else bucket)
    masters = {"weights": element * weights, "fp32 masters": FLOAT * part if kept and not plain else 0}
    moments = {"Adam's moments": 2 * FLOAT * (trainable if plain else part) if kept else 0}
    loaded = 0 if plain else element * (run.weights if stage == 3 else trainable)
    return _States(
        loading={**masters, "gradients": between_steps, "weights, as loaded": loaded},
        idle={**masters, **moments, "gradients": between_steps},
        learning={**masters, "gathered weights": element * gathered, **moments, "gradients": gradients},
    )


def _learning(run: PlannedRun) -> Bytes:
    """Activations, and the largest of what comes on top of them or after them.

    a layer's backward      gradients of the MLP's product, of act(gate) and of up, less the product: 2F a token; of the
                            residual and the layer: 2H; of the down projection and the head
    embedding's gradients   a tied one has two and their sum, when activations are gone
    """
    decoder, element, sharing = run.model.decoder, run.element, run.config.learner.sequence_parallel
    tokens, embedding = ceil(run.batch.tokens / sharing), decoder.embedding if run.model.adapters is None else 0
    kept, again = _activations(run, tokens)
    backward = tokens * (2 * decoder.ffn + 2 * decoder.hidden) + (decoder.hidden * decoder.ffn if embedding else 0)
    moments = {
        "logits": (kept, _head(run, ceil(run.batch.trained / sharing), embedding)),
        "a layer's backward": (kept, again + element * (backward + embedding)),
        "embedding's gradients": (0, element * embedding * (3 if decoder.tied else 1)),
        "reduction over ranks": (0, FLOAT * min(BUCKET, run.trainable)),
    }
    name = max(moments, key=lambda moment: sum(moments[moment]))
    return {"vision tower": _tower(run, tokens), "activations": moments[name][0], name: moments[name][1]}


def _activations(run: PlannedRun, tokens: int) -> tuple[int, int]:
    """Bytes that forward keeps, and those of a layer that backward computes again when no later one is kept."""
    decoder, element, trained = run.model.decoder, run.element, run.model.adapters is None
    layer = layer_bytes(decoder, element, trained=trained, compiled=run.config.learner.compile_layers is True)
    layer += element * run.model.adapters_width // decoder.layers  # A·x of every adapter
    a_layer = tokens * layer + ceil(_pairs(run) / run.config.learner.sequence_parallel)
    ends = 2 * decoder.head_size * element + (FLOAT + (element if trained else 0)) * decoder.hidden
    whole = decoder.layers - run.checkpointed
    kept = whole * a_layer + tokens * (run.checkpointed * element * decoder.hidden + ends)
    return kept, 0 if whole else a_layer


def layer_bytes(decoder: Decoder, element: int, *, trained: bool = True, compiled: bool = False) -> int:
    """Bytes that one decoder layer keeps of a token until backward, with flash attention.

        two norms                     x in fp32, x̂ and y each
        norms of queries and keys     x, x̂ (their y is rotated and not kept)
        attention                     q, k, v and its output
        MLP                           gate, up, act(gate), their product

    Without training its weights no x̂ is kept. A compiled layer computes x̂, act(gate) and copies in fp32 again.

    Example: Llama with H = Q = 48, K = 16, F = 112 in float32: 2·12·48 + 4·(2·48 + 2·16) + 4·4·112 = 3456.
    """
    norm, normed = FLOAT + (2 if trained else 1) * element, FLOAT + (element if trained else 0)
    if compiled:
        norm, normed = 2 * element, element
    attended = decoder.queries + decoder.keys
    kept = 2 * norm * decoder.hidden + 2 * element * attended + (normed * attended if decoder.normed_heads else 0)
    return kept + (3 if compiled else 4) * element * decoder.ffn


def _pairs(run: PlannedRun) -> int:
    """Bytes that a layer's attention keeps for pairs of tokens: none with flash attention and flex.

    eager   the softmax of every pair and head in fp32, and its copy in e; keys and values repeated for every head
    sdpa    along tree paths, a piece of 128 queries at most with all keys before it: queries and outputs by piece, keys
            and values by piece, the mask in e for every query head that shares a key head
    """
    decoder, element, batch = run.model.decoder, run.element, run.batch
    kernel = planned_kernel(run.config.model.attention, gpu=run.on_gpu)
    if kernel == "eager":
        copies = FLOAT + (element if element != FLOAT else 0)
        repeated = 2 * (decoder.queries - decoder.keys) * element
        return batch.tokens * (decoder.heads * batch.length * copies + repeated)
    if kernel != "sdpa" or not run.model.computes_trees:
        return 0
    keys = ceil(batch.tokens * (1 + max(1, batch.length / PIECE)) / 2)
    pairs = min(PIECE, batch.length) * keys * decoder.heads // decoder.kv_heads
    return element * (decoder.queries * batch.tokens + 2 * decoder.keys * (keys - batch.tokens) + pairs)


def _head(run: PlannedRun, trained: int, embedding: int) -> int:
    """Hidden states of trained positions with their gradient, and the LM head in the last of its tiles or chunks.

    tile                         logits in fp32, below fp32 also in e twice; the gradient of the head's weight in fp32
    chunk (objectives of turns)  three fp32 tensors; the weight's gradient that earlier chunks left
    """
    decoder, element = run.model.decoder, run.element
    narrow = 0 if element == FLOAT else element
    size, logit, weight = max(1, CHUNK_LOGITS // decoder.vocabulary), 3 * FLOAT, element
    if isinstance(objective(run.config.algorithm), PerToken):
        size = tile_tokens(torch.device("cuda" if run.on_gpu else "cpu"))
        logit, weight = FLOAT + 2 * narrow, FLOAT + narrow
    logits = logit * min(trained, size) * decoder.vocabulary
    return logits + 2 * element * trained * decoder.hidden + weight * embedding


def _tower(run: PlannedRun, tokens: int) -> int:
    """Pixels in fp32, and the tower's activations if it trains (of a gated layer), else one layer at work."""
    tower, element = run.model.tower, run.element
    if tower is None:
        return 0
    layer = (2 * tower.hidden + 3 * tower.ffn) * element
    if run.config.model.vision == "train":
        layer = (8 + 8 * element) * tower.hidden + 4 * element * tower.ffn
        layer = layer + tower.layers * element * tower.hidden if run.checkpointed else tower.layers * layer
    return tokens * tower.patches * (FLOAT * tower.pixels + layer)


# --- the sampler


class _Sampler(NamedTuple):
    sampling: Bytes
    resting: Bytes  # while the learner works
    refusal: str | None = None  # why it would not start
    notes: tuple[str, ...] = ()


def _requests(run: PlannedRun) -> int:
    """Requests that are sampled at the same time, of a step or an evaluation: every trajectory has one at most."""
    train, evaluate, sampler = run.config.train, run.config.evaluate, run.config.sampler
    trained = train.problems_per_step // run.ranks * train.samples_per_problem
    trajectories = max(trained, ceil(evaluate.problems / run.ranks) * evaluate.samples)
    most: object = trajectories
    if sampler.name == COLOCATED:
        most = sampler.options.get("max_batch", MAX_BATCH)
    elif sampler.name == VLLM:
        engine = _engine(run)
        most, trajectories = engine.max_num_seqs, trajectories * engine.tensor_parallel_size
    if not isinstance(most, int) or most < 1:
        raise ConfigError(f"planning the sampler: sampler.options.max_batch is {most!r}, wanted a number from 1 on.")
    return min(most, trajectories)


def _sampler(run: PlannedRun) -> _Sampler:
    """The sampler's memory on each device, and that of the initial policy where it writes summaries."""
    name, dtype = run.config.sampler.name, str(run.config.sampler.options.get("dtype", run.config.model.dtype))
    element = DTYPES.get(dtype, DTYPES[run.config.model.dtype]).itemsize
    if name == COLOCATED:
        sampler = _transformers(run, element)
    elif name == VLLM:
        sampler = _vllm(run, element)
    else:
        note = f"memory of the sampler {name} is not counted: it samples on devices of its own"
        sampler = _Sampler({}, {}, notes=(note,))
    if all(each.rollout.condense.writer == "policy" for each in evaluations(run.config).values()):
        return sampler
    copy, cache = run.model.parameters * element, _cache(run, element, longest_request(run.config))
    resting = {**sampler.resting, "initial policy": copy}
    return sampler._replace(sampling={**sampler.sampling, "initial policy": copy + cache}, resting=resting)


def _cache(run: PlannedRun, element: int, length: int) -> int:
    """Keys and values of all requests; one layer is there twice while a token is appended to it."""
    return 2 * run.model.decoder.keys * element * _requests(run) * length * (run.model.decoder.layers + 1)


def _transformers(run: PlannedRun, element: int) -> _Sampler:
    """Its weights always; while it samples, keys and values, and prompts in one layer or the logits of a token.

    Models with continuous batching compute a pass of prompts at a time; of others all prompts go through together, with
    a mask of every pair as booleans and in e. Logits: the model's, in fp32, log-probabilities, and probabilities and
    their cumulative sum in double.
    """
    decoder, requests = run.model.decoder, _requests(run)
    context = max(each.rollout.limits.max_context_tokens for each in evaluations(run.config).values())
    tokens, mask = requests * context, (1 + element) * context
    if run.model.known:
        tokens, mask = min(PASS_TOKENS, tokens), 0
    prompts = tokens * (element * (2 * decoder.hidden + 3 * decoder.ffn) + mask)
    logits = requests * decoder.vocabulary * (element + 2 * FLOAT + 16)
    moments = {
        "sampler: prompts": (_cache(run, element, context), prompts),
        "sampler: logits": (_cache(run, element, longest_request(run.config)), logits),
    }
    name = max(moments, key=lambda moment: sum(moments[moment]))
    copy = {"sampler: weights": run.model.parameters * element}
    return _Sampler({**copy, "sampler: KV cache": moments[name][0], name: moments[name][1]}, copy)


def _vllm(run: PlannedRun, element: int) -> _Sampler:
    """On a GPU vLLM takes its share of the device; where that is not known, room for all requests at once.

    While the learner works it sleeps, but for its CUDA graphs. Ranks that share a copy of the model have a part of its
    weights, keys and values each (``tensor_parallel_size``); fewer key heads than ranks are repeated.
    """
    settings, decoder, longest = _engine(run), run.model.decoder, longest_request(run.config)
    sharing = settings.tensor_parallel_size
    if run.ranks % sharing or decoder.heads % sharing:
        raise ConfigError(
            f"planning the sampler: sampler.options.engine.tensor_parallel_size is {sharing}, and {run.ranks} ranks "
            f"and {decoder.heads} heads are to be divided by it. Set a divisor of both."
        )
    graphs = {"sampler: CUDA graphs": GRAPHS if run.on_gpu and not settings.enforce_eager else 0}
    weights = ceil(run.model.parameters * element / sharing)
    step = element * (settings.max_num_batched_tokens or 0) * (2 * decoder.hidden + 3 * ceil(decoder.ffn / sharing))
    step += (settings.max_num_seqs or 0) * decoder.vocabulary * (element + 2 * FLOAT)
    least = 2 * max(1, decoder.kv_heads // sharing) * decoder.head_size * element * decoder.layers * longest
    cache, option = least * _requests(run), ""
    notes: tuple[str, ...] = ()
    if settings.kv_cache_gib is not None:
        cache, option = int(settings.kv_cache_gib * GIB), "kv_cache_gib"
    elif run.memory is not None:
        share = int(settings.gpu_memory_utilization * run.memory)
        cache, option = share - weights - step - sum(graphs.values()), "gpu_memory_utilization"
    else:
        notes = ("vLLM is counted with room for all requests at once; --device-memory says how much it has",)
    refusal = (
        f"vLLM would not start: sampler.options.engine.{option} leaves {max(0, cache) / GIB:.2f} GiB for keys and "
        f"values, and a request of {longest:,} tokens takes {least / GIB:.2f} GiB"
    )
    taken = {"sampler: weights": weights, "sampler: KV cache": max(cache, least), "sampler: a step": step, **graphs}
    sleeps = run.on_gpu and run.config.sampler.options.get("sleep") is not False
    return _Sampler(taken, graphs if sleeps else taken, refusal if cache < least else None, notes)


def _engine(run: PlannedRun) -> EngineSettings:
    """The settings of vLLM's engine, with the sizes that it chooses by the device."""
    options: Any = run.config.sampler.options.get("engine", {})
    try:
        settings = TypeAdapter(EngineSettings).validate_python(options)
    except ValidationError as error:
        raise ConfigError(f"planning the sampler: sampler.options.engine is {options!r}: {error}") from error
    large = run.memory is not None and run.memory >= 70 * GIB
    return replace(
        settings,
        kv_cache_gib=settings.kv_cache_gib or (None if run.on_gpu else 1.0),
        max_num_seqs=settings.max_num_seqs or (1024 if large else 256),
        max_num_batched_tokens=settings.max_num_batched_tokens or (16384 if large else 8192),
    )
