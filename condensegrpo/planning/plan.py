"""Predicts the memory of each device and the tokens of a step from the configuration alone: no weights are loaded.

A run loads, then samples and learns by turns. docs/how-to/plan-memory.md lists the terms: tensors of transformers,
torch's autograd and DeepSpeed 0.19. docs/results/memory-prediction.md compares them with measured peaks.
"""

from bisect import bisect_left
from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from condensegrpo.algorithms.objective import PerToken
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.config.checks import check_ranks
from condensegrpo.config.load import evaluations, longest_request, vary
from condensegrpo.config.schema import ModelSettings, RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.attention_kernels import planned_kernel
from condensegrpo.learner.devices import DTYPES
from condensegrpo.learner.head import CHUNK_LOGITS, tile_tokens
from condensegrpo.learner.layers import checkpointed_layers
from condensegrpo.learner.logprobs import why_no_trees
from condensegrpo.learner.lora_targets import adapted_layers
from condensegrpo.learner.model_folder import attention_of, auto_class, composite, configuration
from condensegrpo.learner.new_model import new_config
from condensegrpo.learner.settings import BUCKET
from condensegrpo.learner.vision_tower import tower
from condensegrpo.samplers.transformers import MAX_BATCH
from condensegrpo.samplers.vllm.settings import EngineSettings

COLOCATED, VLLM = "transformers", "vllm"  # the samplers that share the learner's device
FLOAT, GIB = 4, 1 << 30  # bytes of fp32: master weights, moments, norms
USABLE = 0.9  # of a device: the rest is for CUDA, NCCL, and what torch's allocator reserves beyond its tensors
FILLED = 0.8  # of a device, up to which layers keep their activations
GATHERED = 1_000_000_000  # elements that ZeRO 3 keeps gathered at most (stage3_max_live_parameters)
PIECE = 128  # queries that attention along tree paths computes at a time
GRAPHS = 1 * GIB  # of vLLM's CUDA graphs: the lower end of what its log says, "additional 1~3 GiB memory per GPU"

# models whose decoders have gated layers with RMS norms
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava_onevision")
Device = Literal["cpu", "gpu"]
Bytes = dict[str, int]  # part → its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's kind and size: of a decoder of gated layers with RMS norms, such as Llama, Mistral, Qwen2 and Qwen3."""

    kind: str  # transformers' model_type
    hidden: int  # H
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int  # F
    vocabulary: int  # V
    normed_heads: bool  # queries and keys have norms, as in Qwen3
    tied: bool  # the LM head is the embedding
    parameters: int  # elements, a tied one once
    adapters: int  # elements of model.lora's A and B; 0: all weights train
    adapters_width: int  # ranks of all adapters together
    tower: int  # elements of the vision tower with its projector; 0: a model of text
    known: bool  # its layers are those that the plan counts
    computes_trees: bool  # else the learner takes plain rows


def architecture(model: ModelSettings) -> Architecture:
    """The sizes of a policy, built from ``config.json`` or ``model.new`` on torch's meta device, without weights."""
    new, lora = model.new, model.lora
    config = deepcopy(configuration(str(model.path)) if new is None else new_config(new, vocab_size=new.vocab_size))
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            policy = auto_class(config).from_config(config)
        heads, rank = getattr(text, "num_attention_heads", 1), 0 if lora is None else lora.rank
        adapted = [] if lora is None else adapted_layers(policy, lora.targets, model.vision)
        return Architecture(
            kind=config.model_type,
            hidden=text.hidden_size,
            layers=text.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            ffn=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            vocabulary=text.vocab_size,
            normed_heads=any(name.endswith("q_norm.weight") for name, _ in policy.named_parameters()),
            tied=policy.get_output_embeddings().weight is policy.get_input_embeddings().weight,
            parameters=sum(tensor.numel() for tensor in policy.parameters()),
            adapters=rank * sum(layer.in_features + layer.out_features for layer in adapted),
            adapters_width=rank * len(adapted),
            tower=sum(tensor.numel() for _, tensor in tower(policy)) if composite(config) else 0,
            known=config.model_type in KNOWN,
            computes_trees=why_no_trees(text.to_dict(), attention_of(config, model.attention)) is None,
        )
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"reading the size of {model.path or 'model.new'}: {type(error).__name__}: {error}. Set model.path to a "
            f"causal language model that the installed transformers knows."
        ) from error


class MicroBatch(NamedTuple):
    """The largest micro-batch, of all ranks that share it."""

    tokens: int
    length: int  # of its longest row
    trained: int  # outputs


class Tokens(NamedTuple):
    """Tokens of a step at most, with every trajectory as long as it may be."""

    step: int  # of contexts and outputs, over all ranks
    trained: int  # outputs of these
    micro_batches: int  # of one rank and one optimiser step


class Plan:
    """The memory that a run takes on each of its devices, and the tokens of a step at most."""

    def __init__(
        self,
        config: RunConfig,
        model: Architecture,
        *,
        ranks: int,
        device: Device,
        memory: int | None = None,
        per_token: bool | None = None,
    ) -> None:
        """Plan a run of ``config.model``, whose sizes are ``model``, on devices of ``memory`` bytes each.

        ``per_token`` is known of a plan with the same algorithm: whether its objective is a sum over tokens.
        """
        check_ranks(config, ranks)
        limits, train, learner, layers = config.rollout.limits, config.train, config.learner, model.layers
        self.config, self.model, self.ranks, self.device, self.on_gpu = config, model, ranks, device, device == "gpu"
        self.memory = memory if self.on_gpu else None  # None: not known, or a CPU
        self.per_token = isinstance(objective(config.algorithm), PerToken) if per_token is None else per_token
        self.element = DTYPES[config.model.dtype].itemsize  # bytes of a weight
        self.weights = model.parameters + model.adapters  # elements of the learner's
        self.trainable = model.adapters or model.parameters - (0 if config.model.vision == "train" else model.tower)
        turns = train.problems_per_step * train.samples_per_problem * limits.max_turns
        rows = max(1, learner.tokens_per_micro_batch // limits.turn_tokens)  # of a micro-batch
        micro_batches = ceil(turns * learner.sequence_parallel / ranks / rows)
        self.tokens = Tokens(turns * limits.turn_tokens, turns * limits.max_output_tokens, micro_batches)
        tokens = min(learner.tokens_per_micro_batch, turns * learner.sequence_parallel // ranks * limits.turn_tokens)
        length = min(limits.turn_tokens, tokens)
        outputs = min(length - 1, limits.max_turns * limits.max_output_tokens)
        self.batch = MicroBatch(tokens=tokens, length=length, trained=ceil(tokens / length * outputs))
        name = config.sampler.name
        options = config.sampler.options.get("engine", {}) if name == VLLM else {}
        try:
            self.engine = TypeAdapter(EngineSettings).validate_python(options)
        except ValidationError as error:
            raise ConfigError(f"planning the sampler: sampler.options.engine is {options!r}: {error}") from error
        self.requests = _requests(self)
        sampling, resting, self.refusal = _sampler(self)  # refusal: why the run would not start
        loading, idle, learning = _states(self)
        self.states = sum(learning.values())  # bytes that do not depend on the rows
        reference = {"reference model": self.weights * self.element}
        if not config.algorithm.kl.coefficient or config.model.lora or (self.on_gpu and learner.offload.reference):
            reference = {}  # the base of adapters is their reference
        if self.on_gpu and learner.offload.rollouts:
            idle |= {"fp32 masters": 0, "Adam's moments": 0, "gradients": 0}
        beside = sampling if config.rollout.staleness else resting  # a sampler that works ahead does not sleep
        learning = beside | learning | reference
        # layers that backward computes again: with auto as few as the memory of a GPU allows, all if it is not known
        self.checkpointed = checkpointed_layers(learner.checkpoint_activations, layers, gpu=self.on_gpu)
        if learner.checkpoint_activations == "auto" and self.memory is not None and model.known:
            room = FILLED * self.memory - sum(learning.values())
            counts = range(layers)
            self.checkpointed = bisect_left(counts, True, key=lambda n: sum(_activations(self, n).values()) <= room)
        learning |= _activations(self, self.checkpointed)
        self.phases = {"loading": resting | loading, "sampling": sampling | idle | reference, "learning": learning}
        self.peak = max(self.phases, key=self.total)
        self.bytes = self.total(self.peak)

        shared = name == VLLM and self.on_gpu and self.memory is None and self.engine.kv_cache_gib is None
        notes = (
            (name not in (COLOCATED, VLLM), f"the sampler {name} is not counted: it samples on other devices"),
            (shared, "vLLM is counted with room for all requests at once; --device-memory says how much it has"),
            (not model.known, f"activations of {model.kind} are estimated as those of a gated layer, never measured"),
            (model.tower, "pictures and activations of the vision tower are not counted"),
        )
        self.notes = tuple(note for applies, note in notes if applies)

    def total(self, phase: str) -> int:
        """Bytes of all parts of a phase."""
        return sum(self.phases[phase].values())

    def fits(self, room: int) -> bool:
        """Whether the run starts, and its tensors take at most the usable part of ``room`` bytes of each device."""
        return self.refusal is None and self.bytes <= USABLE * room


def config_on_devices(config: RunConfig, *, ranks: int, memory: int | None) -> RunConfig:
    """The configuration with what GPUs of ``memory`` bytes determine, where it is open.

    As many layers are checkpointed as they require; vLLM prepares for the requests that the run can have, by which it
    captures CUDA graphs.
    """
    layers = config.learner.checkpoint_activations == "auto"
    if memory is None or not (layers or config.sampler.name == VLLM):
        return config
    planned = Plan(config, architecture(config.model), ranks=ranks, device="gpu", memory=memory)
    found = [f"learner.checkpoint_activations={planned.checkpointed}"] if layers else []
    if config.sampler.name == VLLM and planned.engine.max_num_seqs is None:
        found.append(f"sampler.options.engine.max_num_seqs={planned.requests}")
    return vary(config, found) if found else config


def _states(plan: Plan) -> tuple[Bytes, Bytes, Bytes]:
    """Weights, optimiser and gradients of a rank while DeepSpeed loads, between steps, and in a step."""
    stage, offload = plan.config.learner.zero_stage, plan.config.learner.offload.training if plan.on_gpu else "none"
    element, trainable, kept, weights = plan.element, plan.trainable, offload == "none", plan.weights
    part, gathered, between_steps = ceil(trainable / plan.ranks), 0, 0
    bucket = element * min(BUCKET, trainable) if plan.on_gpu or stage == 3 else 0  # of main memory what is written
    plain = stage == 0 and element == FLOAT  # torch's AdamW on the parameters
    if stage == 3:
        gathered = min(weights, GATHERED) if plan.ranks > 1 or offload == "optimiser_and_weights" else 0
        weights = 0 if offload == "optimiser_and_weights" else ceil(weights / plan.ranks)
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
    loaded = 0 if plain else element * (plan.weights if stage == 3 else trainable)
    return (
        {**masters, "gradients": between_steps, "weights, as loaded": loaded},
        {**masters, **moments, "gradients": between_steps},
        {**masters, "gathered weights": element * gathered, **moments, "gradients": gradients},
    )


def _activations(plan: Plan, checkpointed: int) -> Bytes:
    """Activations, and the largest of what comes on top of them or after them."""
    decoder, element, full = plan.model, plan.element, not plan.model.adapters
    sharing = plan.config.learner.sequence_parallel
    tokens, trained = ceil(plan.batch.tokens / sharing), ceil(plan.batch.trained / sharing)
    layer = layer_bytes(decoder, element, trained=full, compiled=plan.config.learner.compile_layers is True)
    layer += element * decoder.adapters_width // decoder.layers  # A·x of every adapter
    a_layer, whole = tokens * layer + ceil(_pairs(plan) / sharing), decoder.layers - checkpointed
    ends = 2 * decoder.head_size * element + (FLOAT + (element if full else 0)) * decoder.hidden
    kept = whole * a_layer + tokens * (checkpointed * element * decoder.hidden + ends)
    embedding = decoder.vocabulary * decoder.hidden if full else 0
    # of a token: gradients of the MLP's product, of act(gate) and of up less the product, the residual and the layer
    backward = tokens * (2 * decoder.ffn + 2 * decoder.hidden) + (decoder.hidden * decoder.ffn if full else 0)
    size, logit, weight = max(1, CHUNK_LOGITS // decoder.vocabulary), 3 * FLOAT, element  # a chunk: three fp32 tensors
    if plan.per_token:
        narrow = 0 if element == FLOAT else element  # a tile, in fp32, and below fp32 also narrow twice
        size = tile_tokens(torch.device("cuda" if plan.on_gpu else "cpu"))
        logit, weight = FLOAT + 2 * narrow, FLOAT + narrow
    logits = logit * min(trained, size) * decoder.vocabulary + weight * embedding
    moments = {
        "logits": (kept, logits + 2 * element * trained * decoder.hidden),
        "a layer's backward": (kept, (0 if whole else a_layer) + element * (backward + embedding)),
        "embedding's gradients": (0, element * embedding * (3 if decoder.tied else 1)),
    }
    name = max(moments, key=lambda moment: sum(moments[moment]))
    return {"activations": moments[name][0], name: moments[name][1]}


def layer_bytes(decoder: Architecture, element: int, *, trained: bool = True, compiled: bool = False) -> int:
    """Bytes that one decoder layer keeps of a token until backward, with flash attention.

    Two norms keep x in fp32, x̂ and y; norms of queries and keys x and x̂; attention q, k, v and its output; the MLP
    gate, up, act(gate) and their product. Without training no x̂ is kept. Compiled layers compute some of these again.
    """
    norm, normed = FLOAT + (2 if trained else 1) * element, FLOAT + (element if trained else 0)
    if compiled:
        norm, normed = 2 * element, element
    attended = (decoder.heads + decoder.kv_heads) * decoder.head_size
    kept = 2 * norm * decoder.hidden + 2 * element * attended + (normed * attended if decoder.normed_heads else 0)
    return kept + (3 if compiled else 4) * element * decoder.ffn


def _pairs(plan: Plan) -> int:
    """Bytes that a layer's attention keeps for pairs of tokens: none with flash attention and flex."""
    decoder, element, batch = plan.model, plan.element, plan.batch
    kernel = planned_kernel(plan.config.model.attention, gpu=plan.on_gpu)
    if kernel == "eager":  # the softmax in fp32, and its copy below fp32; keys and values repeated for every head
        softmax = decoder.heads * batch.length * (FLOAT + (0 if element == FLOAT else element))
        return batch.tokens * (softmax + 2 * (decoder.heads - decoder.kv_heads) * decoder.head_size * element)
    if kernel != "sdpa" or not plan.model.computes_trees:
        return 0
    # pieces of queries, each with all keys before it: queries, outputs, keys and values by piece, and the mask
    keys = ceil(batch.tokens * (1 + max(1, batch.length / PIECE)) / 2)
    pairs = min(PIECE, batch.length) * keys * decoder.heads // decoder.kv_heads
    heads = decoder.heads * batch.tokens + 2 * decoder.kv_heads * (keys - batch.tokens)
    return element * (decoder.head_size * heads + pairs)


def _requests(plan: Plan) -> int:
    """Requests sampled at the same time, of steps or an evaluation: one of each trajectory at most."""
    train, evaluate, sampler = plan.config.train, plan.config.evaluate, plan.config.sampler
    trained = train.problems_per_step // plan.ranks * train.samples_per_problem * (1 + plan.config.rollout.staleness)
    trajectories = max(trained, ceil(evaluate.problems / plan.ranks) * evaluate.samples)
    most: object = trajectories
    if sampler.name == COLOCATED:
        most = sampler.options.get("max_batch", MAX_BATCH)
    elif sampler.name == VLLM:
        trajectories *= plan.engine.tensor_parallel_size
        chosen = 1024 if (plan.memory or 0) >= 70 * GIB else 256  # by vLLM, which computes a token of each in a step
        most = plan.engine.max_num_seqs or min(chosen, plan.engine.max_num_batched_tokens or chosen)
    if not isinstance(most, int) or most < 1:
        raise ConfigError(f"planning the sampler: sampler.options.max_batch is {most!r}, wanted a number from 1 on.")
    return min(most, trajectories)


def _sampler(plan: Plan) -> tuple[Bytes, Bytes, str | None]:
    """Its parts while it samples and while the learner works, and why it would not start."""
    config, decoder, longest = plan.config, plan.model, longest_request(plan.config)
    element = DTYPES.get(str(config.sampler.options.get("dtype")), DTYPES[config.model.dtype]).itemsize
    weights = plan.model.parameters * element
    # keys and values of one layer are there twice while a token is appended to them
    cache = 2 * decoder.kv_heads * decoder.head_size * element * plan.requests * longest * (decoder.layers + 1)
    sampling, resting, refusal = dict[str, int](), dict[str, int](), None
    if config.sampler.name == COLOCATED:
        resting = {"sampler: weights": weights}
        # the model's, in fp32, log-probabilities; probabilities and their cumulative sum in double
        logits = plan.requests * decoder.vocabulary * (element + 2 * FLOAT + 16)
        sampling = {**resting, "sampler: KV cache": cache, "sampler: logits": logits}
    elif config.sampler.name == VLLM:
        sampling, resting, refusal = _vllm(plan, element, longest)
    if writers := len({each.rollout.condense.writer for each in evaluations(config).values()} - {"policy"}):
        sampling["other writers"], resting["other writers"] = writers * (weights + cache), writers * weights
    return sampling, resting, refusal


def _vllm(plan: Plan, element: int, longest: int) -> tuple[Bytes, Bytes, str | None]:
    """On a GPU vLLM takes its share of the device; where that is not known, room for all requests at once."""
    settings, decoder, sharing = plan.engine, plan.model, plan.engine.tensor_parallel_size
    if plan.ranks % sharing or decoder.heads % sharing:
        raise ConfigError(
            f"planning the sampler: sampler.options.engine.tensor_parallel_size is {sharing}, and {plan.ranks} ranks "
            f"and {decoder.heads} heads are to be divided by it. Set a divisor of both."
        )
    large = (plan.memory or 0) >= 70 * GIB  # by which vLLM chooses what is not set
    tokens = settings.max_num_batched_tokens or (16384 if large else 8192)
    step = element * tokens * (2 * decoder.hidden + 3 * ceil(decoder.ffn / sharing))
    step += (settings.max_num_seqs or plan.requests) * decoder.vocabulary * (element + 2 * FLOAT)
    graphs = {"sampler: CUDA graphs": GRAPHS if plan.on_gpu and not settings.enforce_eager else 0}
    weights = ceil(decoder.parameters * element / sharing)
    # ranks that share a copy have a part of its keys and values each; fewer key heads than ranks are repeated
    least = 2 * max(1, decoder.kv_heads // sharing) * decoder.head_size * element * decoder.layers * longest
    cache, option = least * plan.requests, ""
    if settings.kv_cache_gib is not None or not plan.on_gpu:
        cache, option = int((settings.kv_cache_gib or 1) * GIB), "kv_cache_gib"
    elif plan.memory is not None:
        share = int(settings.gpu_memory_utilization * plan.memory)
        cache, option = share - weights - step - sum(graphs.values()), "gpu_memory_utilization"
    refusal = (
        f"vLLM would not start: sampler.options.engine.{option} leaves {max(0, cache) / GIB:.2f} GiB for keys and "
        f"values, and a request of {longest:,} tokens takes {least / GIB:.2f} GiB"
    )
    taken = {"sampler: weights": weights, "sampler: KV cache": max(cache, least), "sampler: a step": step, **graphs}
    sleeps = plan.on_gpu and plan.config.sampler.options.get("sleep") is not False
    return taken, graphs if sleeps else taken, refusal if cache < least else None
