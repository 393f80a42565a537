"""A local Hugging Face model that writes summaries, greedily and one at a time."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.protocols import Written
from condensegrpo.core.trajectory import Finish

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(eq=False, kw_only=True)
class LocalModel:
    """Answers one user message with the model's chat template, in a thread of its own."""

    model: str  # folder or Hub id; loaded at the first summary
    device: str
    seconds: float  # time limit of one summary

    def __post_init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="summary_model")

    def check(self) -> None:
        """Check that the model is there. Loads no weights.

        Raises:
            ValueError: it is not, it has no chat template, or its tokenizer has more ids than the model.
        """
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

    async def write(self, text: str, max_tokens: int) -> Written:
        """The model's reply to a text.

        Raises:
            SummaryRefused: the model cannot be loaded, fails, has no room for the text, or does not finish in time.
        """
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._worker, self._written, text, max_tokens)
        except (OSError, ValueError, RuntimeError, TemplateError) as error:  # out of memory is a RuntimeError
            raise SummaryRefused(f"writing with {self.model}: {type(error).__name__}: {error}") from error

    def _written(self, text: str, max_tokens: int) -> Written:
        import torch

        device = on_rank(self.device)
        model, tokenizer = _loaded(self.model, device)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(device)
        length = prompt["input_ids"].shape[1]
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and length + max_tokens > most:
            raise SummaryRefused(
                f"{length} tokens and {max_tokens} of a summary, where {self.model} has room for {most}"
            )
        started = time.monotonic()
        with torch.inference_mode():
            output = model.generate(**prompt, do_sample=False, max_new_tokens=max_tokens, max_time=self.seconds)
        reply_ids, ends = output[0, length:].tolist(), model.generation_config.eos_token_id
        if reply_ids and reply_ids[-1] in (ends if isinstance(ends, list) else [ends]):
            return Written(text=tokenizer.decode(reply_ids[:-1], skip_special_tokens=False), finish=Finish.STOP)
        if time.monotonic() - started >= self.seconds:
            raise SummaryRefused(f"{self.model} did not finish within {self.seconds:g} seconds")
        return Written(text=tokenizer.decode(reply_ids, skip_special_tokens=False), finish=Finish.LENGTH)


def on_rank(device: str) -> str:
    """``cuda`` with the rank's number: in a thread of its own it would be the first GPU on every rank."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device


@cache
def _loaded(model: str, device: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Once in a process: an evaluation builds its own condenser."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model).to(device).eval(), AutoTokenizer.from_pretrained(model)
