"""Methods inside a vLLM server's workers: load the learner's weights from a folder, report the model.

vLLM adds ``ServedWeights`` to its worker class (``--worker-extension-cls``) and calls the methods by name, over its
route ``/collective_rpc``. vLLM and torch are imported lazily: the sampler uses ``shape_of`` without them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

SHAPE_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def shape_of(config: "PretrainedConfig") -> dict[str, str]:
    """The settings that identify a model, from a transformers configuration; learner and server compare them."""
    known = config.get_text_config().to_dict()
    return {key: str(known.get(key)) for key in SHAPE_KEYS}


class ServedWeights:
    """Methods of every worker of a server. Their names are prefixed to differ from vLLM's own."""

    vllm_config: Any  # vLLM's, untyped
    model_runner: Any  # likewise
    reload_weights: Callable[..., None]  # vLLM's own

    def condensegrpo_describe(self) -> dict[str, object]:
        """The model and the settings of the server."""
        model = self.vllm_config.model_config
        return {
            "shape": shape_of(model.hf_config),
            "logprobs_mode": str(model.logprobs_mode),
            "max_model_len": int(model.max_model_len),
            "world_size": int(self.vllm_config.parallel_config.world_size),
            "lora_rank": getattr(self.vllm_config.lora_config, "max_lora_rank", 0),
            "nccl": self.vllm_config.weight_transfer_config is not None,
            "head_size": int(model.get_head_size()),
            "head_sizes": _head_sizes(),
        }

    def condensegrpo_load(self, folder: str) -> None:
        """Load all weights of a checkpoint from the safetensors files of a folder.

        Raises:
            FileNotFoundError: this machine cannot read the folder, or it holds no safetensors file.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"loading weights from {folder}: this server sees no safetensors file there. Learner and servers must "
                f"share the folder: set sampler.options.server.weights to one that both see."
            )
        from condensegrpo.samplers.vllm.weights import repack_heads

        self.reload_weights(weights_iterator=_tensors(files))
        repack_heads(self.model_runner.get_model())


def _tensors(files: list[Path]) -> Iterator[tuple[str, "Tensor"]]:
    """Every tensor of some safetensors files, one at a time."""
    from safetensors import safe_open

    for path in files:
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a mapping
                yield name, opened.get_tensor(name)


def _head_sizes() -> list[int] | None:
    """The head sizes that vLLM has kernels for; None: not known. Others crash it in its first step."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    return sizes
