"""Draws the replies of one batch with transformers' ``generate``: token ids in, token ids and log-probabilities out.

For models that decoding.py does not support: a batch takes as long as its longest reply. Every row has its own
temperature, stops, length and random stream, so a reply does not depend on its batch (up to rounding: a padded row's
logits differ in the last bits). Independent of queues, event loops and weight versions.

Legend: _B rows of the batch, _P the longest prompt, _V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from condensegrpo.core.trajectory import Finish, Generation, SamplingParams
from condensegrpo.samplers.picking import Decode, DrawnReply, extend, finishes

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
    replies, ended = [DrawnReply(params=each) for each in params], dict[DrawnReply, Finish]()

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
    return tuple(reply.generation(ended.get(reply, Finish.ABORT)) for reply in replies)
