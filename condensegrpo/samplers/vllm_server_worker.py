"""What runs inside a vLLM server's workers: loads the learner's weights from a folder, says what model is served.

vLLM mixes ``ServedWeights`` into its worker class (``--worker-extension-cls``) and calls the methods by name, over its
own route ``/collective_rpc``. Imports vLLM and torch late: the sampler reads ``shape_of`` from here without them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHAPE_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def shape_of(config: Any) -> dict[str, str]:  # noqa: ANN401  transformers' configurations are untyped
    """What tells one model from another, read from a transformers configuration: the same on both ends of a wire."""
    known = config.get_text_config().to_dict()
    return {key: str(known.get(key)) for key in SHAPE_KEYS}


class ServedWeights:
    """Methods of every worker of a server. The names are prefixed: they stand among vLLM's own."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Callable[..., None]  # vLLM's own

    def condensegrpo_describe(self) -> dict[str, Any]:
        """What is served, and how."""
        model = self.vllm_config.model_config
        return {
            "shape": shape_of(model.hf_config),
            "logprobs_mode": str(model.logprobs_mode),
            "max_model_len": int(model.max_model_len),
            "world_size": int(self.vllm_config.parallel_config.world_size),
            "nccl": self.vllm_config.weight_transfer_config is not None,
        }

    def condensegrpo_load(self, folder: str) -> None:
        """Take the weights in the safetensors files of a folder, in checkpoint form and all of them.

        Raises:
            FileNotFoundError: this machine sees no such folder, or no safetensors file in it.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"loading weights from {folder}: this server sees no safetensors file there. Learner and servers must "
                f"share the folder: set sampler.options.weights_dir to one that both see."
            )
        self.reload_weights(weights_iterator=_tensors(files))
        _renew_packed_heads(self.model_runner.get_model())


def _tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Every tensor of some safetensors files, one at a time."""
    from safetensors import safe_open

    for path in files:
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  no mapping
                yield name, opened.get_tensor(name)


def _renew_packed_heads(model: Any) -> None:  # noqa: ANN401  a torch.nn.Module; torch is imported late
    """Pack LM heads anew on a CPU, where vLLM multiplies by a packed copy of the weight.

    A head that is tied to the embedding gets no weight of its own while reloading, so nothing else renews its copy and
    logits would go on coming from the old weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for part in model.modules():
        if isinstance(part, VocabParallelEmbedding) and isinstance(part.quant_method, UnquantizedEmbeddingMethod):
            dispatch_cpu_unquantized_gemm(part, remove_weight=False)
