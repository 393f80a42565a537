"""LoRA adapters that vLLM computes itself, beside the base weights, instead of getting both merged into one weight.

    merged    y = round(W + s·B·A)·x         in bfloat16 the rounding drops nearly all of a small ΔW
    native    y = W·x + s·B·(A·x)            as the learner computes it; only A and B are sent

Adapters reach vLLM as a PEFT folder. vLLM and torch are imported lazily: servers run in other processes.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from condensegrpo.core.errors import SamplerError
from condensegrpo.learner.settings import ALL_LINEAR, LoraSettings
from condensegrpo.learner.targets import adapted_layers
from condensegrpo.samplers.update_check import UpdateCheck

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NAME = "adapters"  # of the adapters in vLLM
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be set up for


def native_rank(lora: LoraSettings | None, *, dtype: str, unsupported: Callable[[], str] = str) -> int | None:
    """The rank that vLLM is set up for where it computes adapters itself; None: it gets merged weights.

    Args:
        lora: of the run; None: it trains all weights, or none.
        dtype: of the sampler. In fp32 the merge loses nothing, and costs nothing a token.
        unsupported: returns why vLLM cannot compute adapters of this model; "": it can.

    Raises:
        SamplerError: native adapters were requested, and vLLM cannot compute them.
    """
    if lora is None or lora.sampler == "merged" or (lora.sampler == "auto" and dtype != "bfloat16"):
        return None
    large = f"its largest rank is {RANKS[-1]}, and model.lora.rank is {lora.rank}" if lora.rank > RANKS[-1] else ""
    fault = large or unsupported()
    if not fault:
        return next(rank for rank in RANKS if rank >= lora.rank)
    if lora.sampler == "auto":
        return None
    raise SamplerError(
        f"setting up model.lora.sampler=native: vLLM cannot compute these adapters: {fault}. Set "
        f"model.lora.sampler=merged."
    )


def targets_of(lora: LoraSettings) -> list[str] | None:
    """The layers that vLLM prepares for adapters; None: all of them."""
    return None if lora.targets == ALL_LINEAR else list(lora.targets)


def adapter_check(model: "PreTrainedModel", lora: LoraSettings) -> UpdateCheck:
    """The check of an update of the adapters of a model: a name that is missing, vLLM would not notice."""
    names = {part: name for name, part in model.named_modules()}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in adapted_layers(model, lora.targets):
        shapes[f"base_model.model.{names[layer]}.lora_A.weight"] = (lora.rank, layer.in_features)
        shapes[f"base_model.model.{names[layer]}.lora_B.weight"] = (layer.out_features, lora.rank)
    return UpdateCheck(shapes=shapes, groups=tuple(frozenset((name,)) for name in shapes))


def write_adapters(folder: Path, named_tensors: "Iterable[tuple[str, Tensor]]", lora: LoraSettings) -> None:
    """Write adapters as a new PEFT folder that vLLM loads.

    Raises:
        SamplerError: the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_tensors}
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets_of(lora) or ALL_LINEAR,
    }
    try:
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SamplerError(
            f"writing adapters for vLLM into {folder}: {type(error).__name__}: {error}. For vLLM in this process set "
            f"TMPDIR, for servers sampler.options.server.weights, to a folder that can be written and has space."
        ) from error


def unsupported_by(architectures: Iterable[str]) -> str:
    """Why vLLM cannot compute adapters of models of these classes; "": it can. Imports vLLM."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    for name in architectures:
        known = ModelRegistry.models.get(name)
        if known is not None:
            return "" if supports_lora(known.load_model_cls()) else f"{name} has no LoRA in it"
    return f"it has no code of its own for {', '.join(architectures) or 'the model'}"


class NativeAdapters:
    """The adapters of an engine in this process: their PEFT folder, and what a request says to sample with them."""

    def __init__(self, lora: LoraSettings, rank: int) -> None:
        self.lora = lora
        self._folder: str | None = None
        self.options = {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": targets_of(lora)}
        self.request: Any = None  # vLLM's LoRARequest; None: no adapters were sent yet, and they start at B = 0

    def load(self, engine: Any, named_tensors: "Iterable[tuple[str, Tensor]]") -> None:  # noqa: ANN401  untyped
        """Hand adapters to vLLM in place of the former ones.

        The path is new with every update: vLLM's prefix cache tells keys and values of adapters apart by name and path.
        """
        from vllm.lora.request import LoRARequest

        folder = tempfile.mkdtemp(prefix="condensegrpo-adapters-")
        try:
            path = Path(folder) / "adapter"
            write_adapters(path, named_tensors, self.lora)
            engine.add_lora(LoRARequest(NAME, 1, str(path), load_inplace=True))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.close()
        self._folder, self.request = folder, LoRARequest(NAME, 1, str(path))

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
