"""What the sampler holds on the learner's device in each phase of a run, in bytes.

transformers   its weights from beginning to end; keys, values and logits while it samples
vllm           a share of the device (sampler.options.engine), taken when it starts; on a GPU it sleeps while the
               learner works, wakes its weights for an update and the rest for the next request
others         nothing here: they sample on other devices
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from condensegrpo.config.load import evaluations
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.dtypes import DTYPES
from condensegrpo.planning import formulas
from condensegrpo.planning.formulas import Decoder, Part, Weights
from condensegrpo.planning.zero import Device
from condensegrpo.samplers.transformers import MAX_BATCH
from condensegrpo.samplers.vllm.adapters import native_rank
from condensegrpo.samplers.vllm.settings import EngineSettings

COLOCATED, VLLM = "transformers", "vllm"  # the samplers that share the learner's device
CACHE = "sampler: KV cache"
GIB = 1 << 30
LARGE_GPU = 70 * GIB  # from here on vLLM computes more at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerMemory:
    """The sampler's parts at the moments of a run."""

    awake: tuple[Part, ...]  # before and after it samples
    moments: dict[str, tuple[Part, ...]]  # while it samples
    resting: tuple[Part, ...]  # while the learner works
    updating: tuple[Part, ...]  # while it takes new weights
    merges: bool = True  # adapters reach it as one weight with the base
    refusal: str | None = None  # why it would not start
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> tuple[Part, ...]:
        """Of its moments."""
        return max(self.moments.values(), key=lambda parts: sum(part.bytes for part in parts))


class RankDevice(NamedTuple):
    """The device on which a rank runs."""

    ranks: int  # devices of the run
    kind: Device  # of each
    memory: int | None  # bytes of a GPU, of which vLLM has a share; None: not known, or a CPU


def sampler_memory(config: RunConfig, decoder: Decoder, weights: Weights, device: RankDevice) -> SamplerMemory:
    """What the sampler of a configuration holds on each device."""
    if config.sampler.name == COLOCATED:
        return _transformers(config, decoder, weights, device)
    if config.sampler.name == VLLM:
        return _vllm(config, decoder, weights, device)
    nothing = (Part("sampler: weights", 0),)
    note = f"memory of the sampler {config.sampler.name} is not counted: it samples on devices of its own"
    return SamplerMemory(
        awake=nothing, moments={"sampled elsewhere": nothing}, resting=nothing, updating=nothing, notes=(note,)
    )


def requests(config: RunConfig, device: RankDevice) -> int:
    """Requests that are sampled at the same time: every trajectory of a rank has one at most, up to the sampler's most.

    They are those of a step or of an evaluation.
    """
    train, evaluate = config.train, config.evaluate
    trained = train.problems_per_step // device.ranks * train.samples_per_problem
    evaluated = ceil(evaluate.problems / device.ranks) * evaluate.samples
    most: object = max(trained, evaluated)
    if config.sampler.name == COLOCATED:
        most = config.sampler.options.get("max_batch", MAX_BATCH)
    elif config.sampler.name == VLLM:
        most = _engine(config, device).max_num_seqs
    if not isinstance(most, int) or most < 1:
        raise ConfigError(f"planning the sampler: sampler.options.max_batch is {most!r}, wanted a number from 1 on.")
    return min(most, max(trained, evaluated))


def _transformers(config: RunConfig, decoder: Decoder, weights: Weights, device: RankDevice) -> SamplerMemory:
    element, waiting = _element(config), requests(config, device)
    context, longest = _lengths(config)
    copy = _weights(weights, element)
    prompts = formulas.cache_bytes(decoder, requests=waiting, length=context, element=element)
    cache = formulas.cache_bytes(decoder, requests=waiting, length=longest, element=element)
    layer = formulas.prefill_bytes(decoder, requests=waiting, length=context, element=element)
    logits = formulas.decoding_bytes(decoder, requests=waiting, element=element)
    return SamplerMemory(
        awake=(copy,),
        moments={
            "prompts": (copy, Part(CACHE, prompts), Part("sampler: a layer", layer)),
            "last token": (copy, Part(CACHE, cache), Part("sampler: logits", logits)),
        },
        resting=(copy,),
        updating=(copy,),
    )


def _vllm(config: RunConfig, decoder: Decoder, weights: Weights, device: RankDevice) -> SamplerMemory:
    """On a GPU vLLM takes its share whole; where that is not known, what all requests at once can use."""
    settings, element, longest = _engine(config, device), _element(config), _lengths(config)[1]
    copy = _weights(weights, element)
    rank = native_rank(config.model.lora, dtype=_dtype(config))
    adapters = Part("sampler: adapters", _adapters(config, weights, rank) * element)
    step = formulas.sampling_step_bytes(
        decoder, tokens=settings.max_num_batched_tokens or 0, requests=settings.max_num_seqs or 0, element=element
    )
    waiting = requests(config, device)
    useful = formulas.paged_cache_bytes(decoder, requests=waiting, length=longest, element=element)
    least = useful // waiting  # of one request
    if settings.kv_cache_gib is not None:
        cache, option = int(settings.kv_cache_gib * GIB), "kv_cache_gib"
    elif device.memory is not None:
        vllm_bytes = int(settings.gpu_memory_utilization * device.memory)
        cache, option = vllm_bytes - copy.bytes - adapters.bytes - step, "gpu_memory_utilization"
    else:
        cache, option = useful, ""
    refusal = (
        f"vLLM would not start: sampler.options.engine.{option} leaves {max(0, cache) / GIB:.2f} GiB for keys and "
        f"values, and a request of {longest:,} tokens takes {least / GIB:.2f} GiB"
    )
    unknown = "keys and values of vLLM are those of all requests at once; --device-memory says how much it has for them"
    taken = (copy, adapters, Part(CACHE, max(cache, least)), Part("sampler: a step", step))
    sleeps = device.kind == "gpu" and config.sampler.options.get("sleep") is not False
    woken = (copy, adapters) if sleeps else taken
    on_its_way = Part("a weight on its way", element * decoder.embedding if rank is None else 0)
    return SamplerMemory(
        awake=taken,
        moments={"vLLM's share": taken},
        resting=(Part(copy.name, 0),) if sleeps else taken,
        updating=(*woken, on_its_way),
        merges=rank is None,
        refusal=refusal if cache < least else None,
        notes=() if option else (unknown,),
    )


def _engine(config: RunConfig, device: RankDevice) -> EngineSettings:
    """The settings of vLLM's engine, with the sizes that are chosen by the device."""
    options: Any = config.sampler.options.get("engine", {})
    try:
        settings: EngineSettings = TypeAdapter(EngineSettings).validate_python(options)
    except ValidationError as error:
        raise ConfigError(f"planning the sampler: sampler.options.engine is {options!r}: {error}") from error
    large = device.memory is not None and device.memory >= LARGE_GPU
    return replace(
        settings,
        kv_cache_gib=settings.kv_cache_gib or (1.0 if device.kind == "cpu" else None),
        max_num_seqs=settings.max_num_seqs or (1024 if large else 256),
        max_num_batched_tokens=settings.max_num_batched_tokens or (16384 if large else 8192),
    )


def _weights(weights: Weights, element: int) -> Part:
    """Adapters are merged into them."""
    return Part("sampler: weights", (weights.frozen or weights.trainable) * element)


def _adapters(config: RunConfig, weights: Weights, rank: int | None) -> int:
    """Elements of the adapters that vLLM computes itself, with room for its next larger rank."""
    lora = config.model.lora
    return 0 if lora is None or rank is None else weights.trainable * rank // lora.rank


def _dtype(config: RunConfig) -> str:
    """Of the sampler's weights: the learner's, unless its options say otherwise."""
    dtype = str(config.sampler.options.get("dtype", config.model.dtype))
    return dtype if dtype in DTYPES else config.model.dtype


def _element(config: RunConfig) -> int:
    return DTYPES[_dtype(config)].itemsize


def _lengths(config: RunConfig) -> tuple[int, int]:
    """Tokens of the longest context, and of the longest one with its reply, in training and every evaluation."""
    limits = [varied.rollout.limits for varied in evaluations(config).values()]
    context = max(limit.max_context_tokens for limit in limits)
    return context, max(limit.max_context_tokens + limit.max_output_tokens for limit in limits)
