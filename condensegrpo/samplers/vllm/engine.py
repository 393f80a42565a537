"""vLLM's engine in this process, reduced to the calls that the sampler needs. No threads and no event loop.

vLLM is imported when an engine is created: the import takes seconds, and vLLM may be missing.
"""

import atexit
import gc
import logging
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though untyped

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.process import rare_collections
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.core.wording import plural
from condensegrpo.learner.devices import use_new_stream
from condensegrpo.learner.ranks import leave, machines
from condensegrpo.learner.settings import TIMEOUT_MINUTES, LoraSettings
from condensegrpo.samplers.vllm.request import FINISH, mismatch, picture_prompts, sampling_parameters
from condensegrpo.samplers.vllm.settings import NO_COMPILER, EngineSettings, engine_arguments
from condensegrpo.samplers.vllm.weights import (
    ExpectedWeights,
    NativeAdapters,
    native_rank,
    repack_heads,
    unsupported_by,
)
from condensegrpo.storage.media import MediaFolder

GIB = 1 << 30
MAX_RUNNING = 256  # requests in one step on a CPU
SleepingPart = Literal["weights", "kv_cache"]  # of what sleeps, by vLLM's names
PARTS: tuple[SleepingPart, ...] = ("weights", "kv_cache")
SETTINGS = {  # environment variables, unless the user set them
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",  # no telemetry
}
# vLLM takes the memory for keys and values that an earlier start found: to find it, it captures graphs once more
PLAN = "VLLM_ENABLE_STARTUP_PLAN"
PHASES = {  # parts of vLLM's messages in the order of a start, and what begins after each
    "Initializing a V1 LLM engine": "starting the engine",
    "Loading model from scratch": "loading the weights",
    "Starting to load model": "loading the weights",  # of its older runner
    "Model loading took": "a first pass",
    "Starting torch.compile": "compiling",
    "Initial profiling/warmup run took": "measuring its memory",
    "KV cache size": "warming up and capturing CUDA graphs",
    "Graph capturing finished": "the last warm-ups",
}
COMPILER = (  # variables of torch's compiler that vLLM or its start sets for the whole process
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", NO_COMPILER),
    *("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"),
)
READ_PROMPT = {  # vLLM's parameters for the log-probabilities of the given tokens alone
    "max_tokens": 1,
    "temperature": 0.0,
    "prompt_logprobs": 0,
    "ignore_eos": True,
    "detokenize": False,
}
_NOISE = (  # deprecations in torch that vLLM triggers on import and on its first model
    (DeprecationWarning, r"`torch\.jit\.script_method` is deprecated"),
    (DeprecationWarning, r"`torch\.jit\.script` is deprecated"),
    (FutureWarning, r"`torch\.distributed\.\w+` is deprecated"),
)


class VllmEngine:
    """A model in vLLM: requests are added by id, and each step may complete some of them.

    All calls come from the thread that creates it, whose stream is then its own. ``close`` leaves torch's process group
    to its creator.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        max_model_len: int | None,
        settings: EngineSettings,
        can_sleep: bool,
        lora: LoraSettings | None,
        media: MediaFolder | None = None,
        progress: Callable[[str], object] = str,
    ) -> None:
        """Load the model. See ``VllmSampler`` for the arguments."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the learner's tensors are passed without pickling
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        # ranks that share a model capture together, and one whose device has less free memory now takes no plan
        os.environ.setdefault(PLAN, "1" if settings.tensor_parallel_size == 1 else "0")
        self.asleep: set[SleepingPart] = set()
        self._expected = ExpectedWeights(model_path)
        self._pictures = picture_prompts(model_path, media)
        self._rendered: dict[str, Sequence[int]] = {}  # prompts with pictures under way, by name
        with _undisturbed(), rare_collections():
            if not torch.cuda.is_available() and settings.enforce_eager is not False:
                os.environ.setdefault(NO_COMPILER, "1")  # for the functions that vLLM compiles as they are imported
            _join_alone()
            if settings.tensor_parallel_size > 1:
                check_sharing(machines(), settings.tensor_parallel_size)
            _remove_shared_memory(settings.tensor_parallel_size)
            progress("importing vLLM")
            import vllm
            from vllm.sampling_params import RequestOutputKind

            self._vllm: Any = vllm  # untyped
            self._vllm.SamplingParams  # noqa: B018  vllm imports lazily: not in the first request
            self._final = RequestOutputKind.FINAL_ONLY
            use_new_stream()  # after the import: vLLM follows later changes of a thread's stream alone
            self._expected.check_head_size()
            # vLLM calls ``vars`` on the objects of all modules; llvmlite's library, which numba loads, has no __dict__
            if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
                ffi.lib._fntab["__dict__"] = {}  # the library returns a function for any attribute name
            unsupported = partial(unsupported_by, self._expected.config.architectures or ())
            rank = native_rank(lora, dtype=dtype, unsupported=unsupported)
            self.adapters = None if lora is None or rank is None else NativeAdapters(lora, rank)  # None: merged weights
            try:
                with _phases(progress):
                    self._engine: Any = _create(
                        settings,
                        model=model_path,
                        dtype=dtype,
                        max_model_len=max_model_len,
                        enable_sleep_mode=can_sleep,
                        limit_mm_per_prompt=self._expected.unused_media,
                        **(self.adapters.arguments if self.adapters else {}),
                    )
            except Exception as error:  # the boundary to vLLM: a model it has no code for, too little memory, …
                raise SamplerError(
                    f"starting vLLM with the model {model_path}: {type(error).__name__}: {error} For memory set "
                    f"sampler.options.engine.kv_cache_gib or gpu_memory_utilization, or lower "
                    f"sampler.options.max_model_len; a model that vLLM does not support runs with "
                    f"sampler.name=transformers."
                ) from error
        self.max_model_len: int = self._engine.model_config.max_model_len  # tokens of a prompt and its reply
        sizes = self._engine.vllm_config.scheduler_config
        self.batches = f"up to {sizes.max_num_seqs} requests and {sizes.max_num_batched_tokens} tokens in a step"

    def add(self, name: str, prompt_ids: Sequence[int], params: SamplingParams | None) -> None:
        """Add a request; without ``params`` for the log-probabilities of the prompt itself, at temperature 1.

        Errors of vLLM are not caught: they concern this request alone. Log-probabilities of a prompt, all but those of
        its first token, are computed without the prefix cache, and vLLM samples one token behind them.
        """
        prompt: dict[str, object] = {"prompt_token_ids": list(prompt_ids)}
        if params is not None and params.media:
            if self._pictures is None:
                raise SamplerError("sampling a reply to a prompt with pictures: the model is not shown any")
            prompt = self._pictures.prompt(prompt_ids, params.media)
            self._rendered[name] = prompt_ids
        self._engine.add_request(
            name,
            prompt,
            self._vllm.SamplingParams(
                flat_logprobs=True,
                output_kind=self._final,
                **(READ_PROMPT if params is None else sampling_parameters(params)),
            ),
            lora_request=self.adapters and self.adapters.request,
        )

    def abort(self, names: Sequence[str]) -> None:
        """Remove requests; those that are done are ignored."""
        if names:
            self._engine.abort_request(list(names))
        for name in names:
            self._rendered.pop(name, None)

    def step(self) -> dict[str, Generation | SamplerError]:
        """Sample the next token of every running request; returns the requests that it completes.

        On a CPU vLLM draws from torch's generator although every request has its own. Its state is restored, since the
        learner's dropout draws from it too.
        """
        state = torch.get_rng_state()
        try:
            outputs = self._engine.step()
        finally:
            torch.set_rng_state(state)
        return {output.request_id: self._checked(output) for output in outputs if output.finished}

    def _checked(self, output: Any) -> Generation | SamplerError:  # noqa: ANN401  vLLM's classes are untyped
        rendered = self._rendered.pop(output.request_id, None)
        fault = None if rendered is None else mismatch(rendered, output.prompt_token_ids)
        if fault is not None:
            return fault
        if output.prompt_logprobs is not None:
            return _generation(output.prompt_token_ids[1:], output.prompt_logprobs.logprobs, FinishReason.STOP)
        reply = output.outputs[0]
        return _generation(
            reply.token_ids, reply.logprobs.logprobs, FINISH.get(reply.finish_reason, FinishReason.ABORT)
        )

    def load(self, named_tensors: NamedTensors) -> None:
        """Load weights under their Hugging Face names, or the adapters alone, and drop every cached key and value."""
        check = self._expected.check(self.adapters.lora if self.adapters else None)
        with _quiet():
            if self.adapters:
                self.adapters.load(self._engine, check.passed(named_tensors))
            else:
                tensors = (
                    (name, tensor.detach().clone()) for name, tensor in named_tensors if check.takes(name, tensor)
                )
                self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
                self._engine.apply_model(repack_heads)
        if not self._engine.reset_prefix_cache():
            raise SamplerError(
                "updating the sampler's weights: vLLM still holds keys and values of requests under way, computed "
                "with the old weights. Await the requests first."
            )
        if self._pictures is not None:
            self._engine.reset_encoder_cache()  # of features by the old weights
        check.complete()

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the GPU: drop keys and values, and move the weights to main memory or drop them too."""
        self._engine.sleep(level=1 if keep_weights else 2)
        self.asleep = set(PARTS)

    def wake(self, parts: Sequence[SleepingPart] = PARTS) -> None:
        """Take memory of the GPU for parts that sleep; scheduling goes on when both have it."""
        for part in parts:
            if part in self.asleep:
                self._engine.wake_up([part])
                self.asleep.remove(part)

    def close(self) -> None:
        """Free the engine: another one that sleeps can start in this process. Warns if vLLM keeps memory."""
        from vllm.device_allocator.cumem import CuMemAllocator
        from vllm.distributed.parallel_state import destroy_model_parallel

        with suppress(RuntimeError):  # out of memory: the run ends
            self.wake()  # CUDA cannot free what is not mapped, and vLLM's allocator fails from then on
        self._engine.apply_model(_unpin)
        # not engine_core.shutdown(): it would destroy torch's process group, which is the learner's
        self._engine.engine_core._finalizer.detach()
        self._engine.model_executor.shutdown()
        destroy_model_parallel()
        if self.adapters:
            self.adapters.close()
        _remove_shared_memory(self._engine.vllm_config.parallel_config.tensor_parallel_size)
        del self._engine
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        kept = CuMemAllocator.instance.get_current_usage() if CuMemAllocator.instance else 0  # bytes
        if kept:
            text = f"closing vLLM: {kept / GIB:.1f} GiB stay in use; no engine that sleeps can follow in this process"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _create(settings: EngineSettings, **options: object) -> Any:  # noqa: ANN401  vLLM's classes are untyped
    import vllm

    on_gpu = torch.cuda.is_available()
    running = min(MAX_RUNNING, settings.max_num_batched_tokens or MAX_RUNNING)
    arguments = vllm.EngineArgs(
        **options,
        **engine_arguments(settings, gpu=on_gpu),
        max_num_seqs=settings.max_num_seqs or (None if on_gpu else running),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        # ranks are workers already: each has an engine, or a share of one, on its own device
        distributed_executor_backend="external_launcher" if distributed.get_world_size() > 1 else None,
        additional_config={  # the plan of an earlier start would be taken for that of other settings
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enforce_eager": settings.enforce_eager,
        },
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,
    )
    return vllm.LLMEngine.from_engine_args(arguments, usage_context(on_gpu=on_gpu))


def _unpin(model: torch.nn.Module) -> None:
    """Remove what keeps a model, with its memory, to the end of the process.

    Dynamo's hooks keep a compiled one: vLLM's own clean-up comes when its shutdown has dropped the model, and forgets
    the first of the two hooks of a class that inherits from a compiled one, such as Qwen3's decoder. And vLLM's records
    of layers, which are to go with them, refer to them once their weights were reloaded.
    """
    from torch._dynamo.convert_frame import _bytecode_hooks
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    modules = set(model.modules())
    for number, hook in list(_bytecode_hooks.items()):
        if getattr(hook, "__self__", None) in modules:
            del _bytecode_hooks[number]
    for module in modules:
        LAYERWISE_INFO.pop(module, None)


def usage_context(*, on_gpu: bool) -> Any:  # noqa: ANN401  vLLM's classes are untyped
    """The usage context for vLLM: for some of them only, it sizes batches by the kind and memory of the device."""
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.LLM_CLASS if on_gpu else UsageContext.ENGINE_CONTEXT


def _generation(token_ids: Sequence[int], logprobs: Sequence[float], finish: FinishReason) -> Generation | SamplerError:
    if not all(map(math.isfinite, logprobs)):
        return SamplerError.not_numbers(f"{len(logprobs)} tokens")
    return Generation(token_ids=tuple(token_ids), logprobs=tuple(logprobs), finish=finish)


def _join_alone() -> None:
    """Create a process group of one if there is none: vLLM would create its own and destroy it on closing."""
    if distributed.is_initialized():
        return
    if "RANK" in os.environ:
        distributed.init_process_group(timeout=timedelta(minutes=TIMEOUT_MINUTES))
    else:
        distributed.init_process_group(store=HashStore(), rank=0, world_size=1)
        atexit.register(leave)


def check_sharing(machines: Sequence[str], sharing: int) -> None:
    """Check that the ranks divide into groups that share a copy of the model, each on one machine.

    Args:
        machines: of the ranks, in their order.
    """
    groups = [machines[first : first + sharing] for first in range(0, len(machines), sharing)]
    if any(len(group) < sharing or len(set(group)) > 1 for group in groups):
        raise SamplerError(
            f"starting vLLM with sampler.options.engine.tensor_parallel_size={sharing}: found "
            f"{plural(len(machines), 'rank')} on {plural(len(set(machines)), 'machine')}, wanted groups of {sharing} "
            f"neighbouring ranks, each on one machine. Start a multiple of {sharing} on every machine (torchrun "
            f"--nproc_per_node; srun --ntasks-per-node --distribution=block), or use sampler.name=vllm_server, whose "
            f"servers take several GPUs each."
        )


def _remove_shared_memory(sharing: int) -> None:
    """Remove the file over which ranks on a CPU share a model: its name is fixed, and vLLM refuses one that exists."""
    index = distributed.get_rank() % sharing
    first = distributed.get_rank() - index
    group = "-".join(map(str, range(first, first + sharing)))
    for path in Path("/dev/shm").glob(f"-tp:*-[[]{group}]-cpushm_{index}"):
        path.unlink(missing_ok=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore what vLLM changes when it starts: random states, torch's threads, where and how torch compiles."""
    from torch._inductor import config as inductor  # before vLLM, by whose variables it would be set up

    states = random.getstate(), np.random.get_state()
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    variables, compilers = {name: os.environ.get(name) for name in COMPILER}, inductor.compile_threads
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with _quiet(), torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_num_threads = setter  # on a CPU vLLM replaces it by a function that only warns
            torch.set_num_threads(threads)
            inductor.compile_threads = compilers
            for name, value in variables.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


@contextmanager
def _phases(report: Callable[[str], object]) -> Iterator[None]:
    """Report the phases of a start; messages that vLLM would not show are not shown."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    def begins(record: logging.LogRecord) -> None:
        for phase in [phase for part, phase in PHASES.items() if part in str(record.msg)]:
            report(f"vLLM: {phase}")

    configure_logging_if_needed(LoggingConfig())  # which the engine does otherwise, and removes the handler
    logger, handler = logging.getLogger("vllm"), logging.Handler()
    handler.emit = begins  # type: ignore[method-assign]  # a class would only hold this function
    level, shown = logger.level, [(each, each.level) for each in logger.handlers]
    for each, own in shown:
        each.setLevel(max(own, level))
    logger.setLevel(min(level, logging.INFO))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        for each, own in shown:
            each.setLevel(own)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        for category, message in _NOISE:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield
