"""What makes a new model see: a SmolVLM whose text model is that of ``new_model``, and a tokenizer with its tokens."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from condensegrpo.learner.settings import NewPictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen3Config

IMAGE = "<image>"  # the template writes it for a picture; its positions take the embeddings
SPECIAL = ("<fake_token_around_image>", "<global-img>", IMAGE)  # see families.py; the last ids of the vocabulary

WHITE = [1.0, 1.0, 1.0]  # is 0 for the model, so that what is drawn on light paper stands out of it
PATCH_STD, POSITION_STD = 2.0, 1.5  # of the initial embeddings: of a patch by its weights, and of its position

SHOWN = """\
{%- macro shown(content) -%}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}{{- '<image>' if part['type'] == 'image' else part['text'] }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
CONTENT = "(message['content'] or '') }}"  # in the template of a model of text


def seeing_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A new tokenizer with the tokens and the chat template of a model that sees."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = SHOWN + str(tokenizer.chat_template).replace(
        f"'\\n' + {CONTENT}", "'\\n' + shown(message['content'] or '') }}"
    )
    return tokenizer


def seeing_config(text: "Qwen3Config", pictures: NewPictures) -> PretrainedConfig:
    """The configuration of a model that sees, around that of its text model."""
    from transformers import SmolVLMConfig  # here: it takes two seconds that a dry run need not wait for

    return SmolVLMConfig(
        text_config=text.to_dict(),
        vision_config={
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": pictures.layers,
            "num_attention_heads": text.num_attention_heads,
            "image_size": pictures.size,
            "patch_size": pictures.patch,
            "initializer_range": pictures.initializer_range,
        },
        scale_factor=1,
        image_token_id=text.vocab_size - 1,
        pad_token_id=text.pad_token_id,
        tie_word_embeddings=text.tie_word_embeddings,
        dtype=text.dtype,
    )


def initialise_patches(model: "PreTrainedModel") -> None:
    """Draw the initial embeddings of patches, and those of their positions, which are of the same order.

    A position begins as the sum of a vector of its row and one of its column, so that both can be read from it.
    """
    embeddings = model.model.vision_model.embeddings
    side = embeddings.num_patches_per_side
    with torch.no_grad():
        embeddings.patch_embedding.weight.normal_(0, PATCH_STD)
        row, column = torch.randn(2, side, embeddings.embed_dim) * (POSITION_STD / 2**0.5)
        embeddings.position_embedding.weight.copy_((row[:, None] + column).flatten(0, 1))


def save_image_processor(folder: Path, *, size: int, patch: int) -> None:
    """Write what scales pictures to the square of ``size`` pixels a side that the model sees.

    A patch of ``patch`` × ``patch`` black pixels has a norm of √3: a step of Adam, which moves each weight alike, would
    move the embedding of a patch with a norm of its number of pixels much farther than anything else.
    """
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    edge = {"longest_edge": size}
    SmolVLMImageProcessorPil(
        size=edge, max_image_size=edge, do_image_splitting=False, image_mean=WHITE, image_std=[float(patch)] * 3
    ).save_pretrained(folder)
