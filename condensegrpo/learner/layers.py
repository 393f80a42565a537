"""Decoder layers of the policy: activation checkpointing and compilation.

**Checkpointing.** Layers keep only their input for backward, which computes the rest again. The plan of a run says how
many layers must do so on a GPU; the others save their second pass. A device keeps until backward, for S tokens (with
sequence parallelism: those of this rank):

    off   in every layer what autograd saves there (``planning/plan.py``, ``layer_bytes``)
    on    in every layer its input, S·H numbers in the precision of the weights; and during backward what autograd saves
          in one layer, since layers are computed again one after another

The embedding, the last norm and the LM head (``head.py``) keep what they did. Backward then contains another forward
pass, about a third more computation. Gradients are equal to the bit: what is random in a layer, such as the dropout of
adapters, is drawn from the same state again. Under ZeRO 3 DeepSpeed gathers the weights of a layer once more for its
second pass.

**Compilation.** Norms, rotary embedding, SwiGLU and residuals are fused, linear layers stay:

    norm, q k v, norms of heads, rotary, attention, output projection, residual, norm, SwiGLU, residual: one graph

Lengths are left open: micro-batches of other lengths compile nothing. The attention of trees is part of the graph, by
``sdpa`` as an operation that the compiler does not look into (``tree_attention.py``), by ``flex`` as torch's own.
``flash``, and ranks that compute rows together, break the graph there. The layers share their code, so that one
compilation serves all.

``learner.compile_layers: auto`` compiles on a GPU, if a trial at the start finds that a layer is faster, and the same
up to rounding. Fused operations round otherwise, and forward passes with and without gradients are compiled apart:
log-probabilities that were measured before an update then differ from those of the update by rounding.

Legend: S tokens, H hidden size.
"""

import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from condensegrpo import __version__
from condensegrpo.algorithms.objective import PerToken, supervised
from condensegrpo.algorithms.packing import lay_out
from condensegrpo.algorithms.segments import reply_row
from condensegrpo.core.errors import ConfigError, DataError, RunError
from condensegrpo.learner.devices import empty_cache, synchronize
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.micro_batches import DeviceBatch
from condensegrpo.learner.model_folder import auto_class, composite
from condensegrpo.learner.ranks import gather, world_size
from condensegrpo.learner.settings import Checkpointing
from condensegrpo.storage.files import make_folder, read_object, user_cache, write_atomically


def checkpointed_layers(setting: Checkpointing, layers: int, *, gpu: bool) -> int:
    """How many of the layers are checkpointed; ``auto``: all on a GPU, unless a plan knows its memory."""
    if setting == "auto" or isinstance(setting, bool):
        return layers if setting is True or (gpu and setting == "auto") else 0
    return min(setting, layers)


def checkpoint_layers(policy: PreTrainedModel, count: int | None = None) -> None:
    """Let decoder layers of the policy keep only their input for backward: the first ``count``; None: all.

    The last layers keep all: backward frees them before it computes a layer again. A vision tower that trains keeps
    only the input of each of its layers.

    transformers' own switch does nothing in evaluation mode, in which the policy stays (without dropout it agrees with
    the sampler), and training mode would switch on the dropout that some models apply in the layer itself. Hence the
    layer's forward is wrapped here. Without gradients, as in measuring log-probabilities, nothing changes.
    """
    layers = _layers(policy.get_decoder())
    if not layers:
        raise ConfigError(
            f"checkpointing the activations of {type(policy).__name__}: it has no layer that transformers supports "
            f"this for. Set learner.checkpoint_activations=off, or use a model such as Qwen3 or Llama."
        )
    of_tower = [layer for layer in _layers(policy) if layer not in set(layers)] if composite(policy.config) else []
    trained = [layer for layer in of_tower if any(tensor.requires_grad for tensor in layer.parameters())]
    for layer in (*layers[:count], *trained):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _layers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


ROW, ROWS, ROUNDS = 1024, 8, 5  # tokens and rows of the trial's micro-batch; how often it is timed
TRIED = 4  # layers of the trial's model: their computation overlaps with launching it, as in a step
GAIN = 1.05  # times as fast as uncompiled, at least, for layers to be compiled
SMALL_VOCABULARY = 64  # the LM head is not tried
KEPT_DAYS = 30  # that a trial is kept: a driver, of which its file knows nothing, may have changed


class CompileTrial(NamedTuple):
    """Forward and backward of some layers, compiled and not."""

    seconds: float  # of a layer, uncompiled
    compiled_seconds: float | None  # of a layer; None: it did not run
    difference: float | None  # relative error ‖found − expected‖ / ‖expected‖ of the gradients
    fault: str | None  # why layers are not compiled; None: it pays

    def describe(self) -> str:
        """For the log."""
        if self.fault is not None:
            return f"decoder layers are not compiled: {self.fault} (learner.compile_layers)"
        return (
            f"decoder layers are compiled: {1e3 * (self.compiled_seconds or 0):.2f} ms a layer and {ROW * ROWS:,} "
            f"tokens, {1e3 * self.seconds:.2f} ms uncompiled (learner.compile_layers)"
        )


def compile_layers(policy: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile the forward pass of every decoder layer. Call it before ``checkpoint_layers``."""
    layers = _layers(policy.get_decoder())
    if not layers:
        raise ConfigError(
            f"compiling the layers of {type(policy).__name__}: transformers marks none of its parts as decoder layers. "
            f"Set learner.compile_layers=off, or use a model such as Qwen3 or Llama."
        )
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def trial_file(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, kernel: str) -> Path:
    """Where the trial of a model on such a device is kept, for the versions that made it."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    versions = [__version__, torch.__version__, transformers.__version__]
    shape = json.loads(  # without the folder that it was read from: another one trains alike
        config.to_json_string(use_diff=False),
        object_hook=lambda section: {key: value for key, value in section.items() if key != "_name_or_path"},
    )
    tried = json.dumps([where, *versions, str(dtype), kernel, shape]).encode()
    return user_cache() / "compile_trials" / f"{sha256(tried).hexdigest()[:32]}.json"


def agreed_trial(file: Path, attempt: Callable[[], CompileTrial]) -> CompileTrial:
    """The trial that every rank has kept for at most ``KEPT_DAYS``, or one that all make now; every rank must call it.

    A rank on which layers are not compiled decides for all. A trial that did not run is not kept.
    """
    known = None
    with suppress(DataError, TypeError, OSError):  # TypeError: of a version with other keys
        if time.time() - file.stat().st_mtime < KEPT_DAYS * 24 * 3600:
            known = CompileTrial(**(read_object(file) or {}))
    trials = [found for found in gather(known) if found]
    if len(trials) < world_size():
        trial = attempt()
        if trial.compiled_seconds is not None:
            with suppress(RunError):  # the cache cannot be written
                make_folder(file.parent)
                write_atomically(file, json.dumps(trial._asdict()))
        trials = gather(trial)
    return next((trial for trial in trials if trial.fault is not None), trials[0])


def try_compiling(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, kernel: str, backend: str = "inductor"
) -> CompileTrial:
    """Compare compiled layers of a model with uncompiled ones, on the device that will train.

    Args:
        config: of the model.
        kernel: ``model.attention``.
    """
    try:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        count = affordable_layers(config, dtype, free=free)
        plain, compiled = (_few_layers(config, dtype, device, kernel, count) for _ in range(2))
        compiled.load_state_dict(plain.state_dict())
        compile_layers(compiled.policy, backend=backend)
        row = reply_row(tuple(index % SMALL_VOCABULARY for index in range(ROW - 1)), (0,), weight=1.0)
        batch = plain.place(lay_out([(row,)] * ROWS), device)
        steps = [partial(_step, module, batch) for module in (plain, compiled)]
        for step in steps:
            step()
        expected, gradient = map(_gradient, (plain, compiled))
        difference = float((gradient - expected).norm() / expected.norm())
        layers = len(_layers(plain.policy.get_decoder()))
        seconds, fused = (each / layers for each in _timed(steps))
    except Exception as error:  # the boundary to the compiler, which has exceptions of all kinds
        first_line = next(iter(str(error).splitlines()), "")
        return CompileTrial(0.0, None, None, f"a trial failed: {type(error).__name__}: {first_line}")
    finally:
        gc.collect()
        empty_cache()
    fault = None
    if difference > max(1e-3, 4 * torch.finfo(dtype).eps):
        fault = f"gradients of a trial differ by {difference:.2g} of their norm"
    elif seconds < GAIN * fused:
        fault = f"a layer takes {1e3 * fused:.2f} ms compiled and {1e3 * seconds:.2f} ms as it is"
    return CompileTrial(seconds, fused, difference, fault)


def affordable_layers(config: PretrainedConfig, dtype: torch.dtype, *, free: int | None) -> int:
    """The layers of a trial: both models with their gradients take at most half of ``free`` bytes, or have one layer.

    The other half is for what autograd saves. None: as many as a trial has at most.
    """
    if free is None:
        return TRIED
    meta = torch.device("meta")
    with meta:
        layers = _layers(_few_layers(config, dtype, meta, "auto", TRIED).policy.get_decoder())
    largest = max(sum(weight.nbytes for weight in layer.parameters()) for layer in layers)
    return max(1, min(TRIED, free // 2 // (4 * largest)))


def _few_layers(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, kernel: str, count: int
) -> TrainedLogprobs:
    few = copy.deepcopy(config)
    text = few.get_text_config()
    text.num_hidden_layers, text.vocab_size = min(count, text.num_hidden_layers), SMALL_VOCABULARY
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    if text.to_dict().get("layer_types"):
        text.layer_types = text.layer_types[:count]
    if hasattr(few, "vision_config"):
        few.vision_config.depth = few.vision_config.num_hidden_layers = 1  # of families with either name
    module = TrainedLogprobs(auto_class(few).from_config(few, dtype=dtype).eval().to(device))
    module.kernel = kernel
    return module


def _step(module: TrainedLogprobs, batch: DeviceBatch) -> None:
    """Forward and backward of rows whose last token is trained."""
    module.zero_grad()
    module(batch, 1.0, objective=PerToken(supervised)).loss.backward()


def _gradient(module: TrainedLogprobs) -> Tensor:
    """The gradient of the weights of all layers, one after another, in fp32."""
    weights = [weight for layer in _layers(module.policy.get_decoder()) for weight in layer.parameters()]
    return torch.cat([weight.grad.flatten().float() for weight in weights if weight.grad is not None])


def _timed(steps: Sequence[Callable[[], object]]) -> list[float]:
    """The median seconds of each, taken in turns."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, seconds in zip(steps, taken, strict=True):
            began = time.perf_counter()
            step()
            synchronize()
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in taken]
