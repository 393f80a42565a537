"""The size of a model from its configuration. The model is built on torch's meta device: no weights, no memory."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from condensegrpo.config.schema import ModelSettings
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.logprobs import why_no_trees
from condensegrpo.learner.model_folder import auto_class, configuration, sees
from condensegrpo.learner.new_model import new_config
from condensegrpo.learner.targets import adapted_layers
from condensegrpo.learner.vision_tower import tower

# gated layers with RMS norms, which the plan's activations are those of; of models that see: their decoders
LAYERS_KNOWN = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava_onevision"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes of a decoder of gated layers with RMS norms: Llama, Mistral, Qwen2, Qwen3 and their like."""

    hidden: int  # H
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int  # F
    vocabulary: int  # V
    normed_heads: bool  # queries and keys have norms, as in Qwen3
    tied: bool  # the LM head is the embedding

    @property
    def queries(self) -> int:
        """Q, the width of all queries of a token."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """K, the width of all keys of a token."""
        return self.kv_heads * self.head_size

    @property
    def embedding(self) -> int:
        """Elements of the embedding, V·H."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The sizes of a vision tower with its projector."""

    hidden: int
    layers: int
    ffn: int
    parameters: int
    patches: int  # of a token of a picture
    pixels: int  # numbers of a patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's kind and size."""

    kind: str  # transformers' model_type
    decoder: Decoder
    parameters: int  # elements, a tied one once
    adapters: int | None  # elements of model.lora's A and B; None: all weights train
    adapters_width: int  # ranks of all adapters together
    tower: Tower | None  # None: a model of text
    computes_trees: bool  # else the learner takes plain rows

    @property
    def known(self) -> bool:
        """Whether its layers are those that the plan counts."""
        return self.kind in LAYERS_KNOWN


def architecture(model: ModelSettings) -> Architecture:
    """The policy of a run, from ``config.json`` or the keys of ``model.new``.

    Raises:
        ConfigError: there is no such model, or it is no causal language model that transformers knows.
    """
    config = (
        new_config(model.new, vocab_size=model.new.vocab_size)
        if model.new is not None
        else configuration(str(model.path))
    )
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            policy = auto_class(config).from_config(config)
        heads, lora = text.num_attention_heads, model.lora
        adapted = [] if lora is None else adapted_layers(policy, lora.targets, model.vision)
        rank = 0 if lora is None else lora.rank
        return Architecture(
            kind=config.model_type,
            decoder=Decoder(
                hidden=text.hidden_size,
                layers=text.num_hidden_layers,
                heads=heads,
                kv_heads=getattr(text, "num_key_value_heads", None) or heads,
                head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
                ffn=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
                vocabulary=text.vocab_size,
                normed_heads=any(name.endswith("q_norm.weight") for name, _ in policy.named_parameters()),
                tied=policy.get_output_embeddings().weight is policy.get_input_embeddings().weight,
            ),
            parameters=sum(tensor.numel() for tensor in policy.parameters()),
            adapters=rank * sum(layer.in_features + layer.out_features for layer in adapted) or None,
            adapters_width=rank * len(adapted),
            tower=_tower(config, policy) if sees(config) else None,
            computes_trees=why_no_trees(text.to_dict(), model.attention) is None,
        )
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"reading the size of {model.path or 'model.new'}: {type(error).__name__}: {error}. Wanted the "
            f"configuration of a causal language model that transformers {transformers_version} knows: set model.path "
            f"to one."
        ) from error


def _tower(config: PretrainedConfig, policy: PreTrainedModel) -> Tower:
    """The sizes of a vision tower; families name them differently."""
    vision = config.vision_config
    side = getattr(vision, "spatial_merge_size", None) or getattr(config, "scale_factor", None) or 1
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    return Tower(
        hidden=vision.hidden_size,
        layers=getattr(vision, "depth", None) or vision.num_hidden_layers,
        ffn=vision.intermediate_size,
        parameters=sum(tensor.numel() for _, tensor in tower(policy)),
        patches=side**2,
        pixels=channels * (getattr(vision, "temporal_patch_size", None) or 1) * vision.patch_size**2,
    )
