"""Settings of vLLM, as ``sampler.options`` holds them: of its engine in this process, of servers and of requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict

from condensegrpo.learner.settings import LoraSettings

# torch reads it where a function is compiled by a decorator. Without it vLLM compiles some on a CPU even if the model
# runs without compilation: seconds of every start, and it needs a C++ compiler.
NO_COMPILER = "TORCHDYNAMO_DISABLE"
ADAPTERS = "adapters"  # the name of the adapters in vLLM
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How vLLM uses its device: ``sampler.options.engine``."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kv_cache_gib: Annotated[float, Gt(0)] | None = None
    """Memory for keys and values; None: 1 GiB on a CPU, and on a GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.4
    """Share of the GPU's memory for weights, keys and values of the sampler, in (0, 1]; the learner has the rest."""
    max_num_seqs: Annotated[int, Ge(1)] | None = None
    """Requests in one step, the others wait; None: 256, or 1024 on a large GPU, at most max_num_batched_tokens, and in
    training on a GPU at most those that it can have."""
    max_num_batched_tokens: Annotated[int, Ge(1)] | None = None
    """Tokens that one step computes; None: what vLLM chooses for the device."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and CUDA graphs; None: only on a CPU, where compilation is slow."""
    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """Neighbouring ranks of one machine that share a copy of the model; each still rolls out its own groups."""


def ranks_a_copy(options: Mapping[str, object]) -> int:
    """How many ranks share a copy of the model, by the options of a sampler."""
    engine = options.get("engine")
    return int(engine.get("tensor_parallel_size", 1)) if isinstance(engine, dict) else 1


RESERVED_FLAGS = (  # flags that ``process.command`` sets, or that would undo one of them
    *("--api-key", "--middleware", "--logprobs-mode", "--generation-config", "--override-generation-config"),
    *("--worker-extension-cls", "--model", "--served-model-name", "--host", "--port", "--uds", "--config"),
)
NCCL = "nccl"  # of ServerSettings.weights
TEMPORARY = "folder"  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server runs that the sampler or ``condensegrpo serve`` starts: ``sampler.options.server``."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kv_cache_gib: Annotated[float, Gt(0)] | None = None
    """Memory for keys and values; None: 1 GiB on a CPU, what gpu_memory_utilization leaves on a GPU."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of each GPU's memory for a server, in (0, 1]."""
    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """GPUs that share one copy of the model."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and CUDA graphs; None: only on a CPU."""
    weights: str = TEMPORARY
    """How updates reach the server. folder: through a temporary folder, in /dev/shm if there is one; a path: through
    that folder, which every server can read; nccl: from GPU to GPU."""
    start_seconds: Annotated[float, Gt(0)] = 600.0
    """Time limit of a start, of loading weights, and of joining an NCCL group."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each replica, such as ["1", "2,3"]; empty: those that no rank of the learner uses."""
    flags: tuple[str, ...] = ()
    """Further flags of vLLM's server."""

    def __post_init__(self) -> None:
        for flag in self.flags:
            name = flag.partition("=")[0].replace("_", "-")  # as vLLM reads it
            if name.startswith("--") and any(reserved.startswith(name) for reserved in RESERVED_FLAGS):  # abbreviated
                raise ValueError(f"flags: {flag} is set by condensegrpo; the token or exact sampling depends on it")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """The limits of a request: ``sampler.options.requests``."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    seconds: Annotated[float, Gt(0)] = 600.0
    """Time limit of one reply, per attempt."""
    retries: Annotated[int, Ge(0)] = 3
    """Further attempts when the server is gone or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of a server."""

    path: str  # a Hugging Face folder or Hub id
    dtype: str
    max_model_len: int | None  # tokens of prompt and output together; None: as many as the model has positions
    lora: LoraSettings | None = None  # of adapters that it may compute beside the base


def engine_arguments(settings: EngineSettings | ServerSettings, *, gpu: bool) -> dict[str, object]:
    """vLLM's arguments for an engine in this process and for that of a server.

    Log-probabilities are those of the distribution sampled from, temperature included, and the model folder's
    generation defaults, which would change it, are ignored.
    """
    kv_cache_gib = settings.kv_cache_gib or (None if gpu else 1.0)
    return {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        # on a CPU a seeded request whose prompt is split over two steps crashes the engine of vLLM 0.32
        "enable_chunked_prefill": None if gpu else False,
        "enforce_eager": not gpu if settings.enforce_eager is None else settings.enforce_eager,
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * (1 << 30)),
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "tensor_parallel_size": settings.tensor_parallel_size,
    }
