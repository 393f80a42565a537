"""Models that write the texts of the condenser ``summary_model``, greedily: at an endpoint, or in this process."""

import asyncio
import os
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from condensegrpo.core.condenser import TextWriter, WrittenSummary
from condensegrpo.core.errors import CondenseError, ConfigError, SamplerError, SummaryRefused
from condensegrpo.core.trajectory import FinishReason, SamplingParams
from condensegrpo.learner.model_folder import check_vocabulary, configuration, end_ids, load_tokenizer
from condensegrpo.learner.settings import DtypeName
from condensegrpo.samplers.openai import ChatModel
from condensegrpo.samplers.vllm.settings import RequestSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from condensegrpo.samplers.transformers import TransformersSampler


def open_writer(
    model: str,
    url: str | None,
    *,
    key_variable: str | None,
    seconds: float,
    concurrency: int,
    max_tokens: int,
    device: str,
) -> TextWriter:
    """A writer; loads and requests nothing.

    Args:
        url: of an endpoint, where ``key_variable`` and ``concurrency`` apply; None: a local model on ``device``.
        seconds: time limit of a text.
        max_tokens: of a text.
    """
    if url is None:
        return LocalWriter(model, device=device, seconds=seconds, max_tokens=max_tokens)
    requests = RequestSettings(seconds=seconds, retries=0)
    chat = ChatModel(url, model, key_variable=key_variable, concurrency=concurrency, requests=requests)
    return ChatWriter(chat, max_tokens)


class ChatWriter:
    """A model at an OpenAI-compatible endpoint."""

    def __init__(self, chat: ChatModel, max_tokens: int) -> None:
        self._chat, self._max_tokens = chat, max_tokens

    def check(self) -> None:
        """Check nothing: an endpoint may start later than the run."""

    async def write(self, text: str) -> WrittenSummary:
        """The model's reply to a text."""
        body: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
        try:
            reply, finish = await self._chat.text(body, max_tokens=self._max_tokens, temperature=0.0)
        except SamplerError as error:
            if "temperature" not in str(error) or self._chat.fields is not None:
                raise
            self._chat.fields = {"temperature": None}  # a model that takes none writes at its own
            return await self.write(text)
        if not reply and finish is FinishReason.LENGTH:
            raise SummaryRefused(
                f"{self._chat.model} used all {self._max_tokens} tokens of a summary without a text, as for thoughts: "
                f"raise max_tokens or turn its thinking off"
            )
        return WrittenSummary(text=reply, finish=finish)


class LocalWriter:
    """A local model, sampled by ``transformers``. A text is the same whatever else is written."""

    def __init__(self, model: str, *, device: str, seconds: float, max_tokens: int) -> None:
        self._model, self._device, self._seconds, self._max_tokens = model, on_rank(device), seconds, max_tokens

    def check(self) -> None:
        """Check that the model is there. Loads no weights."""
        try:
            check_vocabulary(self._model)
        except ConfigError as error:
            raise ValueError(f"loading {self._model}, which is to write the summaries: {error}") from error

    async def write(self, text: str) -> WrittenSummary:
        """The model's reply to a text."""
        try:
            async with asyncio.timeout(self._seconds):
                sampler, tokenizer, ends = await asyncio.to_thread(_loaded, self._model, self._device)
                ids = tokenizer.apply_chat_template(
                    [{"role": "user", "content": _as_text(text, tokenizer)}],
                    add_generation_prompt=True,
                    return_dict=True,
                )["input_ids"]
                params = SamplingParams(max_tokens=self._max_tokens, temperature=0.0, stop_ids=ends)
                reply = await sampler.sample(ids, params)
        except TimeoutError as error:
            raise SummaryRefused(f"{self._model} did not finish within {self._seconds:g} seconds") from error
        except (CondenseError, OSError, ValueError, RuntimeError, TemplateError) as error:
            raise SummaryRefused(f"writing with {self._model}: {error}") from error
        written = [token for token in reply.token_ids if token not in ends]
        return WrittenSummary(text=str(tokenizer.decode(written, skip_special_tokens=False)), finish=reply.finish)


def on_rank(device: str) -> str:
    """``cuda`` with the rank's number: in a thread of its own it would be the first GPU on every rank."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device


_LOADING = Lock()


def _loaded(model: str, device: str) -> "tuple[TransformersSampler, PreTrainedTokenizerBase, tuple[int, ...]]":
    with _LOADING:
        return _opened(model, device)


@cache
def _opened(model: str, device: str) -> "tuple[TransformersSampler, PreTrainedTokenizerBase, tuple[int, ...]]":
    """A sampler, its tokenizer and the ids that end a text, once in a process: an evaluation has its own condenser.

    Replies have the same bits in any batch in fp32 on a CPU alone; elsewhere one text is written at a time.
    """
    import torch

    from condensegrpo.samplers.transformers import MAX_BATCH, TransformersSampler

    tokenizer = load_tokenizer(model)
    halved = configuration(model).dtype == torch.bfloat16
    most = 1 if halved or device != "cpu" else MAX_BATCH
    dtype: DtypeName = "bfloat16" if halved else "float32"
    sampler = TransformersSampler(model, dtype=dtype, device=device, max_batch=most)
    return sampler, tokenizer, end_ids(model) or (int(tokenizer.eos_token_id),)


def _as_text(text: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text with a zero-width space in every control token's text, so that results of tools end no message."""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            text = text.replace(token.content, f"{token.content[:1]}\u200b{token.content[1:]}")
    return text
