"""A local Hugging Face model that writes summaries, greedily and one at a time."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.protocols import Written
from condensegrpo.core.trajectory import Finish

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LocalModel:
    """Answers one user message with the model's chat template, in a thread of its own."""

    def __init__(self, model: str, *, device: str, seconds: float) -> None:
        """The folder or Hub id of a model; loaded at the first summary."""
        self._model = model
        self._device = device
        self._seconds = seconds
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="summary_model")

    def check(self) -> None:
        """Check that the model is there. Loads no weights.

        Raises:
            ValueError: it is not, or it has no chat template.
        """
        from transformers import AutoConfig, AutoTokenizer

        try:
            AutoConfig.from_pretrained(self._model)
            tokenizer = AutoTokenizer.from_pretrained(self._model)
        except (OSError, ValueError) as error:
            raise ValueError(f"loading {self._model}, which is to write the summaries: {error}") from error
        if tokenizer.chat_template is None:
            raise ValueError(f"loading {self._model}, which is to write the summaries: it has no chat template")

    async def write(self, text: str, max_tokens: int) -> Written:
        """The model's reply to a text.

        Raises:
            SummaryRefused: the model cannot be loaded, fails, has no room for the text, or does not finish in time.
        """
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._worker, self._written, text, max_tokens)
        except (OSError, ValueError, RuntimeError, TemplateError) as error:  # out of memory is a RuntimeError
            raise SummaryRefused(f"writing with {self._model}: {type(error).__name__}: {error}") from error

    def _written(self, text: str, max_tokens: int) -> Written:
        import torch

        model, tokenizer = _loaded(self._model, self._device)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._device)
        length = prompt["input_ids"].shape[1]
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and length + max_tokens > most:
            raise SummaryRefused(
                f"{length} tokens and {max_tokens} of a summary, where {self._model} has room for {most}"
            )
        started = time.monotonic()
        with torch.inference_mode():
            output = model.generate(**prompt, do_sample=False, max_new_tokens=max_tokens, max_time=self._seconds)
        reply_ids = output[0, length:].tolist()
        if reply_ids and reply_ids[-1] in _ends(model):
            return Written(text=tokenizer.decode(reply_ids[:-1], skip_special_tokens=False), finish=Finish.STOP)
        if time.monotonic() - started >= self._seconds:
            raise SummaryRefused(f"{self._model} did not finish within {self._seconds:g} seconds")
        return Written(text=tokenizer.decode(reply_ids, skip_special_tokens=False), finish=Finish.LENGTH)


@cache
def _loaded(model: str, device: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Once in a process: an evaluation builds its own condenser."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model).to(device).eval(), AutoTokenizer.from_pretrained(model)


def _ends(model: "PreTrainedModel") -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())
