"""A local Hugging Face model that writes summaries, greedily: those requested at the same time in one batch.

A batch rounds otherwise than a prompt by itself. A text is that of the prompt by itself whatever else is written: one
that a batch chose by a margin within ``NEAR`` anywhere is written again alone, and models in less than fp32, whose
rounding is a thousand times coarser, write one text at a time.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.protocols.condenser import WrittenSummary
from condensegrpo.core.request_queue import Outcomes, QueuedRequest, RequestQueue
from condensegrpo.core.trajectory import FinishReason

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


MAX_TOKENS = 32768  # of prompts and summaries, padded to the longest, that are processed at once
NEAR = 1e-3  # margin of logits below which rounding might choose another token; it changes logits in fp32 by 1e-5 or so

_Prompt = tuple[list[int], QueuedRequest[str, WrittenSummary]]  # the ids of a request's text


@dataclass(eq=False, kw_only=True)
class LocalModel:
    """Answers one user message with the model's chat template, in a thread of its own."""

    model: str  # folder or Hub id; loaded at the first summary
    device: str
    seconds: float  # time limit of a batch of summaries
    max_tokens: int  # of a summary

    def __post_init__(self) -> None:
        self._queue = RequestQueue(drive=self._write, worker=ThreadPoolExecutor(1, "summary_model"), settle=True)

    def check(self) -> None:
        """Check that the model is there. Loads no weights."""
        from transformers import AutoConfig, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(self.model)
            tokenizer = AutoTokenizer.from_pretrained(self.model)
        except (OSError, ValueError) as error:
            raise ValueError(f"loading {self.model}, which is to write the summaries: {error}") from error
        if tokenizer.chat_template is None:
            raise ValueError(f"loading {self.model}, which is to write the summaries: it has no chat template")
        largest, rows = max(tokenizer.get_vocab().values()), config.get_text_config().vocab_size
        if largest >= rows:
            raise ValueError(
                f"loading {self.model}, which is to write the summaries: its tokenizer has ids up to {largest}, and "
                f"the model has embeddings for {rows} ids"
            )

    async def write(self, text: str) -> WrittenSummary:
        """The model's reply to a text; a SummaryRefused if it cannot write one."""
        try:
            return await self._queue.submit(text)
        except (OSError, ValueError, RuntimeError, TemplateError) as error:  # out of memory is a RuntimeError
            raise SummaryRefused(f"writing with {self.model}: {type(error).__name__}: {error}") from error

    def _write(self, requests: Sequence[QueuedRequest[str, WrittenSummary]]) -> Outcomes[str, WrittenSummary]:
        """Driver: all summaries, in batches that fit."""
        model, tokenizer = _loaded(self.model, on_rank(self.device))
        most = getattr(model.config, "max_position_embeddings", None)
        prompts = list[_Prompt]()
        for request in requests:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": _as_text(request.value, tokenizer)}],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
            if most is not None and len(ids) + self.max_tokens > most:
                needed = f"{len(ids)} tokens and {self.max_tokens} of a summary, where {self.model} has room for {most}"
                yield request, SummaryRefused(needed)
            else:
                prompts.append((ids, request))
        room = MAX_TOKENS if model.dtype.itemsize >= 4 else 0  # bytes of a number
        for part in _parts(prompts, self.max_tokens, room):
            written = self._written([ids for ids, _ in part])
            yield from zip((request for _, request in part), written, strict=True)

    def _written(self, prompts: Sequence[Sequence[int]]) -> Iterator[WrittenSummary | SummaryRefused]:
        """The replies that each prompt gets by itself.

        A row is padded by its own first id: what the model's generation settings do to ids that occurred, such as a
        repetition penalty, concerns no other id than without padding.
        """
        import torch
        from transformers import LogitsProcessorList

        model, tokenizer = _loaded(self.model, on_rank(self.device))
        margins, width = Margins(), max(map(len, prompts))
        ids = torch.tensor([[*[row[0]] * (width - len(row)), *row] for row in prompts], device=model.device)
        mask = torch.tensor([[*[0] * (width - len(row)), *[1] * len(row)] for row in prompts], device=model.device)
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        started = time.monotonic()
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=self.max_tokens,
                max_time=self.seconds,
                pad_token_id=ends[0] if ends else 0,  # after the end of a row
                logits_processor=LogitsProcessorList([margins]),
            )
        late = time.monotonic() - started >= self.seconds
        for number, row in enumerate(output[:, width:].tolist()):
            end = next((index for index, token in enumerate(row) if token in ends), None)
            if len(prompts) > 1 and margins.least(number, len(row) if end is None else end + 1) < NEAR:
                yield from self._written([prompts[number]])
            elif end is None and late:
                yield SummaryRefused(f"{self.model} did not finish within {self.seconds:g} seconds")
            else:
                finish = FinishReason.LENGTH if end is None else FinishReason.STOP
                yield WrittenSummary(text=tokenizer.decode(row[:end], skip_special_tokens=False), finish=finish)


class Margins:
    """A logits processor that records by how much the greedy token of each row leads the next one."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []  # (B,) each

    def __call__(self, input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        """The logits (B, V) as they are."""
        first_B2 = scores.topk(2, dim=-1).values
        self._steps.append(first_B2[:, 0] - first_B2[:, 1])
        return scores

    def least(self, row: int, tokens: int) -> float:
        """The least margin of the first tokens of a row."""
        return min(step[row].item() for step in self._steps[:tokens])


def _as_text(text: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text with a zero-width space in every control token's text, so that results of tools end no message."""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            text = text.replace(token.content, f"{token.content[:1]}\u200b{token.content[1:]}")
    return text


def _parts(prompts: Sequence[_Prompt], new: int, room: int) -> Iterator[Sequence[_Prompt]]:
    """The prompts by length, in batches of at most ``room`` tokens with the ``new`` ones; one alone may have more."""
    rows = sorted(prompts, key=lambda prompt: len(prompt[0]))
    start = 0
    for index, (ids, _) in enumerate(rows):
        if index > start and (len(ids) + new) * (index - start + 1) > room:
            yield rows[start:index]
            start = index
    if rows:
        yield rows[start:]


def on_rank(device: str) -> str:
    """``cuda`` with the rank's number: in a thread of its own it would be the first GPU on every rank."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device


@cache
def _loaded(model: str, device: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Once in a process: an evaluation builds its own condenser."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model).to(device).eval(), AutoTokenizer.from_pretrained(model)
