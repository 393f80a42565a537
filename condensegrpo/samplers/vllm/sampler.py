"""The sampler for throughput: vLLM in the learner's process, with the learner's weights."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Annotated

import torch
from annotated_types import Ge

from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.learner.model_folder import trained_steps
from condensegrpo.learner.settings import DtypeName, LoraSettings
from condensegrpo.samplers.vllm.driver import EngineDriver, in_new_thread, ranks_of_model
from condensegrpo.samplers.vllm.engine import VllmEngine
from condensegrpo.samplers.vllm.request import INSTALL, check_request
from condensegrpo.samplers.vllm.settings import EngineSettings
from condensegrpo.storage.media import MediaFolder

ENGINE = EngineSettings()


class VllmSampler(Sampler):
    """Samples with vLLM: continuous batching, a prefix cache, weights in milliseconds.

    Generation defaults, log-probabilities and event loops: as in ``TransformersSampler``.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: DtypeName = "float32",
        max_model_len: Annotated[int, Ge(2)] | None = None,
        lora: LoraSettings | None = None,
        engine: EngineSettings = ENGINE,
        sleep: bool | None = None,
        media: MediaFolder | None = None,
        progress: Callable[[str], object] = str,
    ) -> None:
        """Load the model.

        Args:
            model_path: a Hugging Face folder or Hub id.
            max_model_len: most tokens of a prompt and its reply; by default the largest of the run's rollouts.
            lora: adapters that updates may bring instead of weights; a run gives its own.
            engine: memory and batches of vLLM's engine.
            sleep: whether memory is freed while the learner works; by default on a GPU, impossible elsewhere.
            media: where the pictures of prompts are; None: prompts show none.
            progress: is told what the start of vLLM is doing, in a thread of its own.
        """
        self.check_options(sleep=sleep)
        self._can_sleep = can_sleep = torch.cuda.is_available() if sleep is None else sleep
        self.version = trained_steps(model_path) or 0  # the optimiser step whose weights are in use
        loaded, thread = in_new_thread(
            lambda: VllmEngine(
                model_path,
                dtype=dtype,
                max_model_len=max_model_len,
                settings=engine,
                can_sleep=can_sleep,
                lora=lora,
                media=media,
                progress=progress,
            )
        )
        self.takes_adapters = loaded.adapters is not None  # vLLM computes them beside the base
        self._room = loaded.max_model_len
        self._batches = loaded.batches
        shared = ranks_of_model() if engine.tensor_parallel_size > 1 else ()
        self._driver = EngineDriver(loaded, thread, *shared)

    @staticmethod
    def check_options(*, sleep: bool | None = None, **_: object) -> None:
        """Check without a model what the signature cannot say."""
        if find_spec("vllm") is None:
            raise ValueError(f"vLLM is not installed. {INSTALL}")
        if sleep and not torch.cuda.is_available():
            raise ValueError("sleep=True: vLLM frees memory on a GPU only, and there is none; remove the option")

    def describe(self) -> str:
        """The sizes of the engine's batches, which vLLM chooses by the device unless they are set."""
        adapters = ", adapters beside the base" if self.takes_adapters else ""
        return f"vLLM: {self._batches}, {self._room} tokens a prompt with its reply{adapters}"

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt, batched with the other requests.

        Cancelling a caller affects no other request: its request is removed from the engine.
        """
        check_request(prompt_ids, params, room=self._room)
        return await self._driver.submit(prompt_ids, params)

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1."""
        check_request(prompt_ids, SamplingParams(max_tokens=len(output_ids)), room=self._room)
        tokens = (*prompt_ids, *output_ids)
        check_request(tokens, SamplingParams(max_tokens=1), room=self._room)  # the token that vLLM samples behind them
        return (await self._driver.submit(tokens, None)).logprobs[-len(output_ids) :]

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """Load the learner's weights by name, or its adapters alone, and drop all cached keys and values."""
        self._driver.load(named_tensors, version)
        self.version = version

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the GPU's memory until the next request or update; weights that are kept wait in main memory."""
        if self._can_sleep:
            # an update of adapters does not bring the base back
            self._driver.sleep(keep_weights=keep_weights or self.takes_adapters)

    def close(self) -> None:
        """Free engine and memory. Later requests fail."""
        self._driver.close()
