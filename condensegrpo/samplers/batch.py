"""Draws the replies of one batch with transformers' ``generate``: token ids in, token ids and log-probabilities out.

For models that decoding.py does not support: a batch takes as long as its longest reply. Every row has its own
temperature, stops, length and random stream, so a reply does not depend on its batch (up to rounding: a padded row's
logits differ in the last bits). Independent of queues, event loops and weight versions.

Legend: _B rows of the batch, _P the longest prompt, _T sampled tokens, _V vocabulary, _S stop ids.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import Finish, Generation, SamplingParams
from condensegrpo.samplers.picking import pick

Decode = Callable[[list[list[int]]], list[str]]  # rows of token ids → their texts, special tokens included
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
        abandoned: called after every token; once true, unfinished rows end as ``Finish.ABORT``.

    Raises:
        SamplerError: the model's logits are not numbers.
    """
    device: torch.device = model.device
    width = max(map(len, prompts))
    ids_BP = torch.tensor([[PAD] * (width - len(ids)) + list(ids) for ids in prompts], device=device)
    mask_BP = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    picker = _Picker(params, device)
    stopper = _Stopper(params, width, decode=decode, abandoned=abandoned, device=device)
    model.generate(
        ids_BP,
        attention_mask=mask_BP,
        generation_config=GenerationConfig(
            max_new_tokens=max(each.max_tokens for each in params), do_sample=False, use_cache=True, pad_token_id=PAD
        ),
        logits_processor=LogitsProcessorList([picker]),
        stopping_criteria=StoppingCriteriaList([stopper]),
    )
    return _trimmed(picker, stopper)


class _Picker(LogitsProcessor):  # type: ignore[misc]  # transformers' classes are untyped
    """Draws the next token of every row itself and hides all others, so that greedy decoding must take it."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        steps = max(each.max_tokens for each in params)
        self._uniform_BT = torch.tensor(
            [_uniforms(each.seed, each.max_tokens, steps) for each in params], dtype=torch.float64, device=device
        )
        self._temperature_B1 = torch.tensor([[each.temperature] for each in params], device=device)
        self.tokens: list[Tensor] = []  # (B, 1) per step
        self.logprobs: list[Tensor] = []  # (B, 1) per step, nats

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logits of the next token (B, V): 0 for the token drawn and minus infinity for all others."""
        step = len(self.tokens)
        token_B1, logp_B1 = pick(scores, self._uniform_BT[:, step : step + 1], self._temperature_B1)
        self.tokens.append(token_B1)
        self.logprobs.append(logp_B1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B1, 0.0)


class _Stopper(StoppingCriteria):  # type: ignore[misc]  # transformers' classes are untyped
    """Ends each row at its own stop id, stop string or length, and records where and why."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompt_width: int,
        *,
        decode: Decode,
        abandoned: Callable[[], bool],
        device: torch.device,
    ) -> None:
        most = max(len(each.stop_ids) for each in params)
        stop_ids = [list(each.stop_ids) + [-1] * (most - len(each.stop_ids)) for each in params]  # no token is -1
        self._stop_BS = torch.tensor(stop_ids, dtype=torch.long, device=device).reshape(len(params), most)
        self._limit_B = torch.tensor([each.max_tokens for each in params], device=device)
        self._strings = {row: each.stop_strings for row, each in enumerate(params) if each.stop_strings}
        # a token is at least one byte of text, so this many last tokens contain every stop string that they complete
        self._tail = max((len(text.encode()) for texts in self._strings.values() for text in texts), default=0)
        self._prompt_width = prompt_width
        self._decode = decode
        self._abandoned = abandoned
        self.length_B = torch.zeros(len(params), dtype=torch.long, device=device)  # tokens that belong to the reply
        self.stopped_B = torch.zeros(len(params), dtype=torch.bool, device=device)  # at a stop id or string
        self.full_B = torch.zeros(len(params), dtype=torch.bool, device=device)  # at max_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """(B,) True for the rows that are done."""
        going_B = ~(self.stopped_B | self.full_B)
        self.length_B += going_B
        stop_B = (input_ids[:, -1:] == self._stop_BS).any(dim=1)
        if self._strings:
            stop_B |= self._completed(input_ids, going_B)
        self.stopped_B |= going_B & stop_B
        self.full_B |= going_B & ~stop_B & (self.length_B >= self._limit_B)
        done_B: Tensor = self.stopped_B | self.full_B
        return torch.ones_like(done_B) if self._abandoned() else done_B

    def _completed(self, input_ids: Tensor, going_B: Tensor) -> Tensor:
        """(B,) True where the last token completes a stop string of its row."""
        going = going_B.tolist()
        rows = [row for row in self._strings if going[row]]
        start = max(self._prompt_width, input_ids.shape[1] - self._tail)
        texts = self._decode(input_ids[rows, start:].tolist()) if rows else []
        hits = [row for row, text in zip(rows, texts, strict=True) if any(stop in text for stop in self._strings[row])]
        completed_B = torch.zeros_like(going_B)
        completed_B[hits] = True
        return completed_B


def _uniforms(seed: int, count: int, width: int) -> list[float]:
    """``count`` numbers in [0, 1) from the stream of ``seed``, padded to ``width``.

    ``random.Random`` keeps all bits of the seed (a torch generator keeps 32) and its numbers never change.
    """
    stream = random.Random(seed)
    return [stream.random() for _ in range(count)] + [0.0] * (width - count)


def _trimmed(picker: _Picker, stopper: _Stopper) -> tuple[Generation, ...]:
    """Each row up to its own end."""
    tokens_BT = torch.cat(picker.tokens, dim=1).tolist()
    logprobs_BT = torch.cat(picker.logprobs, dim=1).tolist()
    ends = zip(stopper.length_B.tolist(), stopper.stopped_B.tolist(), stopper.full_B.tolist(), strict=True)
    replies = []
    for tokens, logprobs, (length, stopped, full) in zip(tokens_BT, logprobs_BT, ends, strict=True):
        if not all(map(math.isfinite, logprobs[:length])):
            raise SamplerError.not_numbers(f"{len(tokens_BT)} replies")
        finish = Finish.STOP if stopped else Finish.LENGTH if full else Finish.ABORT
        replies.append(Generation(token_ids=tuple(tokens[:length]), logprobs=tuple(logprobs[:length]), finish=finish))
    return tuple(replies)
