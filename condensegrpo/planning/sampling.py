"""What the sampler holds on the learner's device in each phase of a run, in bytes.

transformers   its weights from beginning to end; keys, values and logits while it samples
vllm           a share of the device (sampler.options.engine), taken when it starts; on a GPU it sleeps while the
               learner works, but for its CUDA graphs, wakes its weights for an update and the rest for the next request
others         nothing here: they sample on other devices

Beside each, the initial policy where it writes (rollout.condense.writer): its weights, and keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from condensegrpo.config.load import evaluations, longest_request
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.devices import DTYPES
from condensegrpo.planning import formulas
from condensegrpo.planning.formulas import Part
from condensegrpo.planning.learning import PlannedRun
from condensegrpo.samplers.transformers import MAX_BATCH
from condensegrpo.samplers.vllm.settings import NCCL, TEMPORARY, EngineSettings, ServerSettings
from condensegrpo.samplers.vllm.weights import native_rank

COLOCATED, VLLM = "transformers", "vllm"  # the samplers that share the learner's device
SERVERS = "vllm_server"
WEIGHTS, CACHE = "sampler: weights", "sampler: KV cache"
GIB = 1 << 30
LARGE_GPU = 70 * GIB  # from here on vLLM computes more at a time
# the lower end of what vLLM's log says of them ("additional 1~3 GiB memory per GPU"): a guess, unlike all other terms
GRAPHS = Part("sampler: CUDA graphs", 1 * GIB)
T = TypeVar("T")


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


def sampler_memory(run: PlannedRun) -> SamplerMemory:
    """What the sampler of a configuration holds on each device, the initial policy included where it writes."""
    memory = _of_policy(run)
    if all(each.rollout.condense.writer == "policy" for each in evaluations(run.config).values()):
        return memory
    element, length = DTYPES[_dtype(run)].itemsize, longest_request(run.config)
    copy = Part("initial policy: weights", run.model.parameters * element)
    cache = formulas.cache_bytes(run.model.decoder, requests=requests(run), length=length, element=element)
    writing = (copy, Part("initial policy: KV cache", cache))
    return replace(
        memory,
        awake=(*memory.awake, copy),
        moments={name: (*parts, *writing) for name, parts in memory.moments.items()},
        resting=(*memory.resting, copy),
        updating=(*memory.updating, copy),
    )


def _of_policy(run: PlannedRun) -> SamplerMemory:
    name = run.config.sampler.name
    if name == COLOCATED:
        return _transformers(run)
    if name == VLLM:
        return _vllm(run)
    nothing = (Part(WEIGHTS, 0),)
    note = f"memory of the sampler {name} is not counted: it samples on devices of its own"
    notes = (note, *(_written(run) if name == SERVERS else ()))
    return SamplerMemory(
        awake=nothing, moments={"sampled elsewhere": nothing}, resting=nothing, updating=nothing, notes=notes
    )


def _written(run: PlannedRun) -> Iterator[str]:
    """What updates of vLLM servers need in main memory or on a disk; adapters alone are small."""
    settings, dtype = _settings(run, "server", ServerSettings), _dtype(run)
    if settings.weights == NCCL or native_rank(run.config.model.sampled_lora, dtype=dtype) is not None:
        return
    size = run.model.parameters * DTYPES[dtype].itemsize / GIB
    where = "/dev/shm of each machine" if settings.weights == TEMPORARY else settings.weights
    yield (
        f"an update writes {size:.2f} GiB of weights for the servers into {where}, once for all ranks; those of the "
        f"update before are still there: it needs {2 * size:.2f} GiB"
    )


def requests(run: PlannedRun) -> int:
    """Requests that are sampled at the same time: every trajectory of a rank has one at most, up to the sampler's most.

    They are those of a step or of an evaluation, and of all ranks that share a copy of the model.
    """
    train, evaluate, sampler = run.config.train, run.config.evaluate, run.config.sampler
    trained = train.problems_per_step // run.ranks * train.samples_per_problem
    evaluated = ceil(evaluate.problems / run.ranks) * evaluate.samples
    trajectories = max(trained, evaluated)
    most: object = trajectories
    if sampler.name == COLOCATED:
        most = sampler.options.get("max_batch", MAX_BATCH)
    elif sampler.name == VLLM:
        engine = _engine(run)
        most, trajectories = engine.max_num_seqs, trajectories * engine.tensor_parallel_size
    if not isinstance(most, int) or most < 1:
        raise ConfigError(f"planning the sampler: sampler.options.max_batch is {most!r}, wanted a number from 1 on.")
    return min(most, trajectories)


def _transformers(run: PlannedRun) -> SamplerMemory:
    decoder, element, waiting = run.model.decoder, DTYPES[_dtype(run)].itemsize, requests(run)
    varied = [each.rollout for each in evaluations(run.config).values()]
    context = max(rollout.limits.max_context_tokens for rollout in varied)
    copy = Part(WEIGHTS, run.model.parameters * element)
    prompts = formulas.cache_bytes(decoder, requests=waiting, length=context, element=element)
    cache = formulas.cache_bytes(decoder, requests=waiting, length=longest_request(run.config), element=element)
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


def _vllm(run: PlannedRun) -> SamplerMemory:
    """On a GPU vLLM takes its share whole; where that is not known, what all requests at once can use.

    Ranks that share a copy of the model have a part of its weights each (``tensor_parallel_size``), norms apart, and of
    the keys and values; adapters are counted whole, which is at most twice what they take.
    """
    settings, dtype, longest = _engine(run), _dtype(run), longest_request(run.config)
    sharing, heads = settings.tensor_parallel_size, run.model.decoder.heads
    if run.ranks % sharing or heads % sharing:
        raise ConfigError(
            f"planning the sampler: sampler.options.engine.tensor_parallel_size is {sharing}, and {run.ranks} ranks "
            f"and {heads} heads are to be divided by it. Set a divisor of both."
        )
    decoder = formulas.shard_of(run.model.decoder, sharing)
    element, rank = DTYPES[dtype].itemsize, native_rank(run.config.model.sampled_lora, dtype=dtype)
    copy = Part(WEIGHTS, ceil(run.model.parameters * element / sharing))
    adapters = Part("sampler: adapters", _adapters(run, rank) * element)
    graphs = GRAPHS if run.on_gpu and not settings.enforce_eager else GRAPHS._replace(bytes=0)
    step = formulas.sampling_step_bytes(
        decoder, tokens=settings.max_num_batched_tokens or 0, requests=settings.max_num_seqs or 0, element=element
    )
    least = formulas.paged_cache_bytes(decoder, requests=1, length=longest, element=element)
    if settings.kv_cache_gib is not None:
        cache, option = int(settings.kv_cache_gib * GIB), "kv_cache_gib"
    elif run.memory is not None:
        vllm_bytes = int(settings.gpu_memory_utilization * run.memory)
        cache, option = vllm_bytes - copy.bytes - adapters.bytes - graphs.bytes - step, "gpu_memory_utilization"
    else:
        cache, option = least * requests(run), ""
    refusal = (
        f"vLLM would not start: sampler.options.engine.{option} leaves {max(0, cache) / GIB:.2f} GiB for keys and "
        f"values, and a request of {longest:,} tokens takes {least / GIB:.2f} GiB"
    )
    unknown = "keys and values of vLLM are those of all requests at once; --device-memory says how much it has for them"
    pinned = (
        f"while the learner works, vLLM keeps the frozen base in pinned main memory: {copy.bytes / GIB:.1f} GiB a "
        f"rank, {copy.bytes * run.ranks / GIB:.1f} GiB for all; model.lora.sampler=merged needs none of it"
    )
    taken = (copy, adapters, graphs, Part(CACHE, max(cache, least)), Part("sampler: a step", step))
    sleeps = run.on_gpu and run.config.sampler.options.get("sleep") is not False
    moves = sleeps and rank is not None and not run.config.rollout.staleness
    on_its_way = Part("a weight on its way", element * decoder.embedding if rank is None else 0)
    return SamplerMemory(
        awake=taken,
        moments={"vLLM's share": taken},
        resting=(Part(WEIGHTS, 0), graphs) if sleeps else taken,
        updating=(*((copy, adapters, graphs) if sleeps else taken), on_its_way),
        merges=rank is None,
        refusal=refusal if cache < least else None,
        notes=(*(() if option else (unknown,)), *((pinned,) if moves else ())),
    )


def _engine(run: PlannedRun) -> EngineSettings:
    """The settings of vLLM's engine, with the sizes that are chosen by the device."""
    settings = _settings(run, "engine", EngineSettings)
    large = run.memory is not None and run.memory >= LARGE_GPU
    return replace(
        settings,
        kv_cache_gib=settings.kv_cache_gib or (None if run.on_gpu else 1.0),
        max_num_seqs=settings.max_num_seqs or (1024 if large else 256),
        max_num_batched_tokens=settings.max_num_batched_tokens or (16384 if large else 8192),
    )


def _settings(run: PlannedRun, key: str, kind: type[T]) -> T:
    """A section of the sampler's options."""
    options: Any = run.config.sampler.options.get(key, {})
    try:
        settings: T = TypeAdapter(kind).validate_python(options)
    except ValidationError as error:
        raise ConfigError(f"planning the sampler: sampler.options.{key} is {options!r}: {error}") from error
    return settings


def _adapters(run: PlannedRun, rank: int | None) -> int:
    """Elements of the adapters that vLLM computes itself, with room for its next larger rank."""
    lora = run.config.model.sampled_lora
    return 0 if lora is None or rank is None else run.weights.trainable * rank // lora.rank


def _dtype(run: PlannedRun) -> str:
    """Of the sampler's weights: the learner's, unless its options say otherwise."""
    dtype = str(run.config.sampler.options.get("dtype", run.config.model.dtype))
    return dtype if dtype in DTYPES else run.config.model.dtype
