"""Weights of a model by name and shape, checked before vLLM loads them, and copies that vLLM does not update."""

import torch
from transformers import AutoConfig, PreTrainedModel

from condensegrpo.core.errors import SamplerError
from condensegrpo.learner.model_folder import auto_class
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.update_check import UpdateCheck
from condensegrpo.samplers.vllm.weights import adapter_check
from condensegrpo.vision.families import family_of


class ExpectedWeights:
    """Names and shapes of a model folder's weights, from its configuration: no weight is loaded.

    vLLM renames and fuses weights (q, k and v are one tensor) and only logs a missing name. So names and shapes are
    compared with those of the model in transformers, which is the learner's.
    """

    def __init__(self, model_path: str) -> None:
        """Read ``config.json``.

        Raises:
            SamplerError: the model cannot be read.
        """
        try:
            config = AutoConfig.from_pretrained(model_path)
            family = family_of(config.model_type)
            with torch.device("meta"):
                model: PreTrainedModel = auto_class(config).from_config(config)
        except (OSError, ValueError) as error:
            raise SamplerError.no_model(model_path, error) from error
        self._model = model  # on the meta device
        self.architectures: tuple[str, ...] = tuple(config.architectures or ())
        # vLLM keeps memory free for all that a prompt may show
        self.unused_media = {"video": 0} if family is not None and family.three_axes else {}

    def check(self, lora: LoraSettings | None = None) -> UpdateCheck:
        """A new check of one update of all weights, or of adapters alone."""
        return UpdateCheck.of(self._model) if lora is None else adapter_check(self._model, lora)


def check_head_size(model_path: str) -> None:
    """Check that vLLM has a kernel for the model's attention on this device: without one it dies in its first step.

    Raises:
        SamplerError: it has none.
    """
    if torch.cuda.is_available():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = AutoConfig.from_pretrained(model_path).get_text_config().to_dict()
    width, heads = text.get("hidden_size"), text.get("num_attention_heads")
    size = text.get("head_dim") or (width // heads if width and heads else None)
    known = CPUAttentionBackend.get_supported_head_sizes()
    if size is not None and size not in known:
        raise SamplerError(
            f"starting vLLM on a CPU: the model's attention heads have {size} dimensions, and it has kernels for "
            f"{', '.join(map(str, known))}. A new model has hidden_size/heads of them: change model.new.heads, or set "
            f"sampler.name=transformers."
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
