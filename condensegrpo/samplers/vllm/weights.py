"""Weights for vLLM: checked by name and shape before it loads them; LoRA adapters that it computes itself.

    merged    y = round(W + s·B·A)·x         in bfloat16 the rounding drops nearly all of a small ΔW
    native    y = W·x + s·B·(A·x)            as the learner computes it; only A and B are sent

Adapters reach vLLM as a PEFT folder. vLLM and transformers are imported lazily: servers run in other processes.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from condensegrpo.core.errors import SamplerError
from condensegrpo.learner.lora_targets import adapted_layers
from condensegrpo.learner.model_folder import auto_class
from condensegrpo.learner.settings import ALL_LINEAR, LoraSettings
from condensegrpo.samplers.checks import UpdateCheck
from condensegrpo.samplers.vllm.settings import ADAPTERS
from condensegrpo.vision.processor import family_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be set up for


def native_rank(lora: LoraSettings | None, *, dtype: str, unsupported: Callable[[], str] = str) -> int | None:
    """The rank that vLLM is set up for where it computes adapters itself; None: it gets merged weights.

    Args:
        lora: of the run; None: it trains all weights, or none.
        dtype: of the sampler. In fp32 the merge loses nothing, and costs nothing a token.
        unsupported: returns why vLLM cannot compute adapters of this model; "": it can.
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


def adapter_arguments(lora: LoraSettings, rank: int) -> dict[str, object]:
    """vLLM's arguments for an engine that computes adapters of at most this rank; layers None: all of them."""
    return {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": _layers(lora)}


def _layers(lora: LoraSettings) -> list[str] | None:
    return None if lora.targets == ALL_LINEAR else list(lora.targets)


def free_bytes(folder: Path) -> int:
    """Free bytes where a folder lies or will lie."""
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), Path())
    return shutil.disk_usage(existing).free


@contextmanager
def new_folder(folder: Path, written: str, cure: str) -> Iterator[None]:
    """Create a folder, and remove it if the block, which writes into it, fails."""
    try:
        folder.mkdir(parents=True)
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise SamplerError(
            f"writing {written} into {folder}: {type(error).__name__}: {error}; {free_bytes(folder) / 1e9:.2f} GB are "
            f"free. {cure}"
        ) from error


def write_adapters(folder: Path, named_tensors: "Iterable[tuple[str, Tensor]]", lora: LoraSettings) -> None:
    """Write adapters as a new PEFT folder that vLLM loads."""
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_tensors}
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _layers(lora) or ALL_LINEAR,
    }
    cure = (
        "For vLLM in this process set TMPDIR, for servers sampler.options.server.weights, to a folder that can be "
        "written and has space."
    )
    with new_folder(folder, "adapters for vLLM", cure):
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


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
        self._files = ExitStack()  # removes the folder
        self.arguments = adapter_arguments(lora, rank)
        self.request: Any = None  # vLLM's LoRARequest; None: no adapters were sent yet, and they start at B = 0

    def load(self, engine: Any, named_tensors: "Iterable[tuple[str, Tensor]]") -> None:  # noqa: ANN401  untyped
        """Hand adapters to vLLM in place of the former ones.

        The path is new with every update: vLLM's prefix cache tells keys and values of adapters apart by name and path.
        """
        from vllm.lora.request import LoRARequest

        with ExitStack() as files:
            path = Path(files.enter_context(TemporaryDirectory(prefix="condensegrpo-adapters-")), "adapter")
            write_adapters(path, named_tensors, self.lora)
            engine.add_lora(LoRARequest(ADAPTERS, 1, str(path), load_inplace=True))
            self.close()
            self._files, self.request = files.pop_all(), LoRARequest(ADAPTERS, 1, str(path))

    def close(self) -> None:
        """Remove the folder."""
        self._files.close()


class ExpectedWeights:
    """Names and shapes of a model folder's weights, from its configuration: no weight is loaded.

    vLLM renames and fuses weights (q, k and v are one tensor) and only logs a missing name. So names and shapes are
    compared with those of the model in transformers, which is the learner's.
    """

    def __init__(self, model_path: str) -> None:
        """Read ``config.json``."""
        from transformers import AutoConfig

        try:
            self.config = AutoConfig.from_pretrained(model_path)
            family = family_of(self.config.model_type)
            with torch.device("meta"):
                self._model: PreTrainedModel = auto_class(self.config).from_config(self.config)
        except (OSError, ValueError) as error:
            raise SamplerError.no_model(model_path, error) from error
        # vLLM keeps memory free for all that a prompt may show
        self.unused_media = {"video": 0} if family is not None and family.three_axes else {}

    def check(self, lora: LoraSettings | None = None) -> UpdateCheck:
        """A new check of one update of all weights, or of adapters alone: a missing one vLLM would not notice."""
        if lora is None:
            return UpdateCheck.of(self._model)
        names = {part: name for name, part in self._model.named_modules()}
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in adapted_layers(self._model, lora.targets):
            shapes[f"base_model.model.{names[layer]}.lora_A.weight"] = (lora.rank, layer.in_features)
            shapes[f"base_model.model.{names[layer]}.lora_B.weight"] = (layer.out_features, lora.rank)
        return UpdateCheck(shapes=shapes, groups=tuple(frozenset((name,)) for name in shapes))

    def check_head_size(self) -> None:
        """Check that vLLM has a kernel for the attention on this device: without one it dies in its first step."""
        if torch.cuda.is_available():
            return
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        text = self.config.get_text_config().to_dict()
        width, heads = text.get("hidden_size"), text.get("num_attention_heads")
        size = text.get("head_dim") or (width // heads if width and heads else None)
        known = CPUAttentionBackend.get_supported_head_sizes()
        if size is not None and size not in known:
            raise SamplerError(
                f"starting vLLM on a CPU: the model's attention heads have {size} dimensions, and it has kernels for "
                f"{', '.join(map(str, known))}. A new model has hidden_size/heads of them: change model.new.heads, or "
                f"set sampler.name=transformers."
            )


def repack_heads(model: torch.nn.Module) -> None:
    """Repack a tied LM head from the embedding that it is tied to.

    On a CPU vLLM multiplies by packed copies of its weights. Loading new weights repacks them layer by layer but skips
    a head without its own weight, which would keep the old ones: its logits would be those of two policies.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for part in model.modules():
        if isinstance(part, ParallelLMHead):
            part.quant_method.process_weights_after_loading(part)  # does nothing on a GPU
