"""The size of a model from its configuration. The model is built on torch's meta device: no weights, no memory."""

from dataclasses import dataclass
from typing import NamedTuple

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
from condensegrpo.planning.formulas import Decoder, Tower

# gated layers with RMS norms, as in ``formulas.layer_bytes``; of models that see: their decoders
LAYERS_KNOWN = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_5_vl",
    "qwen3_vl",
    "smolvlm",
    "idefics3",
    "llava_onevision",
)


class Adapters(NamedTuple):
    """The adapters of ``model.lora``."""

    parameters: int  # elements of all A and B
    width: int  # their ranks together
    layers: int  # how many linear layers have one


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's kind and size."""

    kind: str  # transformers' model_type
    decoder: Decoder
    parameters: int  # elements, a tied one once
    adapters: Adapters | None  # beside these
    tower: Tower | None  # None: a model of text
    plain: str | None  # why the learner lays rows side by side or in a line; None: it computes along tree paths

    @property
    def known(self) -> bool:
        """Whether its layers are those that the formulas for activations are made of."""
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
            empty = auto_class(config).from_config(config)
        heads, adapters = text.num_attention_heads, None
        if model.lora is not None:
            adapted, rank = adapted_layers(empty, model.lora.targets, model.vision), model.lora.rank
            elements = rank * sum(layer.in_features + layer.out_features for layer in adapted)
            adapters = Adapters(parameters=elements, width=rank * len(adapted), layers=len(adapted))
        return Architecture(
            kind=config.model_type,
            decoder=Decoder(
                hidden=text.hidden_size,
                layers=text.num_hidden_layers,
                heads=heads,
                kv_heads=_number(text, "num_key_value_heads") or heads,
                head_size=_number(text, "head_dim") or text.hidden_size // heads,
                ffn=_number(text, "intermediate_size") or 4 * text.hidden_size,
                vocabulary=text.vocab_size,
                normed_heads=any(name.endswith("q_norm.weight") for name, _ in empty.named_parameters()),
                tied=empty.get_output_embeddings().weight is empty.get_input_embeddings().weight,
            ),
            parameters=sum(tensor.numel() for tensor in empty.parameters()),
            adapters=adapters,
            tower=_tower(config, empty) if sees(config) else None,
            plain=why_no_trees(text.to_dict(), model.attention),
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
    side = _number(vision, "spatial_merge_size") or _number(config, "scale_factor") or 1
    channels = _number(vision, "num_channels") or _number(vision, "in_channels") or 3
    return Tower(
        hidden=vision.hidden_size,
        layers=_number(vision, "depth") or vision.num_hidden_layers,
        heads=_number(vision, "num_heads") or vision.num_attention_heads,
        ffn=vision.intermediate_size,
        parameters=sum(tensor.numel() for _, tensor in tower(policy)),
        patches=side**2,
        pixels=channels * (_number(vision, "temporal_patch_size") or 1) * vision.patch_size**2,
    )


def _number(text: PretrainedConfig, name: str) -> int | None:
    """A size that not every configuration has; some have it without a value."""
    size: int | None = getattr(text, name, None)
    return size
