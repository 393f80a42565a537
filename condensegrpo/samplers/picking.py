"""Draws the next token of every reply from its logits, with a random number of the reply's stream, and ends replies.

``sample_batch`` draws with transformers' ``generate``, for models that decoding.py does not support: a batch takes as
long as its longest reply. Every row has its own temperature, stops, length and random stream, so a reply does not
depend on its batch (up to rounding: a padded row's logits differ in the last bits).

Legend: _B rows of the batch, _P the longest prompt, _V vocabulary.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers.packed_attention import ROWS, up

Decode = Callable[[list[list[int]]], list[str]]  # rows of token ids → their texts, special tokens included
R = TypeVar("R", bound="DrawnReply")


@dataclass(slots=True, kw_only=True, eq=False)
class DrawnReply:
    """A reply under way."""

    params: SamplingParams
    # random.Random keeps all bits of the seed (a torch generator keeps 32) and its numbers never change
    uniforms: random.Random = field(init=False)
    # last tokens that contain a stop string which the last one completes: each is at least a byte
    tail: int = field(init=False)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the output, nats

    def __post_init__(self) -> None:
        self.uniforms = random.Random(self.params.seed)
        self.tail = max((len(text.encode()) for text in self.params.stop_strings), default=0)

    def generation(self, finish: FinishReason) -> Generation:
        """The reply as it is now."""
        return Generation(token_ids=tuple(self.output), logprobs=tuple(self.logprobs), finish=finish)


def extend(replies: Mapping[int, DrawnReply], logits_BV: Tensor) -> None:
    """Draw the next token of every reply, from its row of the logits."""
    # elementwise functions may round the rest of a tensor that fills no vector in another way: keep to whole rows
    more = up(len(replies), ROWS) - len(replies)
    uniforms = [[reply.uniforms.random()] for reply in replies.values()] + [[0.0]] * more
    temperatures = [[reply.params.temperature] for reply in replies.values()] + [[1.0]] * more
    picked = pick(
        logits_BV[[*replies, *[0] * more]],
        logits_BV.new_tensor(uniforms, dtype=torch.float64),
        logits_BV.new_tensor(temperatures, dtype=torch.float32),
    )
    tokens, logprobs = (column[: len(replies), 0].tolist() for column in picked)
    if not all(map(math.isfinite, logprobs)):
        raise SamplerError.not_numbers(f"{len(replies)} replies")
    for reply, token, logprob in zip(replies.values(), tokens, logprobs, strict=True):
        reply.output.append(token)
        reply.logprobs.append(logprob)


def finishes(replies: Sequence[R], decode: Decode) -> dict[R, FinishReason]:
    """The replies that the token just drawn ends; ``decode`` is only called for stop strings."""
    stopping = [reply for reply in replies if reply.output[-1] in reply.params.stop_ids]
    if with_strings := [reply for reply in replies if reply.tail]:
        texts = decode([reply.output[-reply.tail :] for reply in with_strings])
        pairs = zip(with_strings, texts, strict=True)
        stopping += [reply for reply, text in pairs if any(stop in text for stop in reply.params.stop_strings)]
    full = [reply for reply in replies if len(reply.output) >= reply.params.max_tokens]
    return dict.fromkeys(full, FinishReason.LENGTH) | dict.fromkeys(stopping, FinishReason.STOP)


def pick(logits_BV: Tensor, uniform_B1: Tensor, temperature_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of every row, and its log-probability.

    token = min {v : CDF_v > u·CDF_V},  CDF = cumulative sum of softmax(logits/T)

    This inverts the distribution function: one uniform per token, and no token of probability zero is ever drawn. Rows
    do not depend on each other.

    Args:
        logits_BV: the model's, of any floating type.
        uniform_B1: float64, in [0, 1).
        temperature_B1: 0 is greedy.

    Returns:
        Tokens (B, 1), and log_softmax(logits/T)[token] (B, 1) in fp32, nats; at T = 1 for greedy rows. Where logits are
        not numbers the log-probability is not finite.
    """
    greedy_B1 = temperature_B1 == 0
    logp_BV = torch.log_softmax(logits_BV.float() / torch.where(greedy_B1, 1.0, temperature_B1), dim=-1)
    cdf_BV = logp_BV.double().exp_().cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))  # u·total may round up to the total
    target_B1 = torch.minimum(uniform_B1 * total_B1, below_total_B1)
    drawn_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)  # NaN: past it
    token_B1 = torch.where(greedy_B1, logp_BV.argmax(dim=-1, keepdim=True), drawn_B1) if greedy_B1.any() else drawn_B1
    return token_B1, logp_BV.gather(1, token_B1)


PAD = 0  # any id of the vocabulary: the mask alone says where prompts are padded, so pad == eos is harmless


def sample_batch(
    model: Any,  # noqa: ANN401  transformers' classes are untyped
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    decode: Decode,
    abandoned: Callable[[], bool],
) -> tuple[Generation, ...]:
    """One reply to each prompt.

    Args:
        model: a causal language model in eval mode whose ``generation_config`` is blank.
        decode: only called if a row has stop strings.
        abandoned: called after every token; once true, unfinished rows end as ``FinishReason.ABORT``.
    """
    device: torch.device = model.device
    width = max(map(len, prompts))
    ids_BP = torch.tensor([[PAD] * (width - len(ids)) + list(ids) for ids in prompts], device=device)
    mask_BP = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    replies, ended = [DrawnReply(params=each) for each in params], dict[DrawnReply, FinishReason]()

    def draw(input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logits of the next token (B, V): 0 for the token drawn and minus infinity for all others."""
        going = {row: reply for row, reply in enumerate(replies) if reply not in ended}
        extend(going, scores)
        ended.update(finishes([*going.values()], decode))
        token_B1 = torch.tensor([reply.output[-1:] for reply in replies], device=device)
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B1, 0.0)

    def done(input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """(B,) True for the rows that are done."""
        gone = abandoned()
        return torch.tensor([gone or reply in ended for reply in replies], device=device)

    model.generate(
        ids_BP,
        attention_mask=mask_BP,
        generation_config=GenerationConfig(
            max_new_tokens=max(each.max_tokens for each in params), do_sample=False, use_cache=True, pad_token_id=PAD
        ),
        logits_processor=LogitsProcessorList([draw]),
        stopping_criteria=StoppingCriteriaList([done]),
    )
    return tuple(reply.generation(ended.get(reply, FinishReason.ABORT)) for reply in replies)
