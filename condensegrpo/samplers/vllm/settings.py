"""Settings that pass through to vLLM's engine in this process, as ``sampler.options.engine`` holds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict

# torch reads it where a function is compiled by a decorator. Without it vLLM compiles some on a CPU even if the model
# runs without compilation: seconds of every start, and it needs a C++ compiler.
NO_COMPILER = "TORCHDYNAMO_DISABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How vLLM uses its device: ``sampler.options.engine``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)
    kv_cache_gib: Annotated[float, Gt(0)] | None = None
    """Memory for keys and values; None: 1 GiB on a CPU, and on a GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.4
    """Share of the GPU's memory for weights, keys and values of the sampler, in (0, 1]; the learner has the rest."""
    max_num_seqs: Annotated[int, Ge(1)] | None = None
    """Requests in one step, the others wait; None: 256 on a CPU, and on a GPU what vLLM chooses for it."""
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
