"""Tiny random models that see, one of each family, and pictures for them: `from vision_models import …`."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    LlavaOnevisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from condensegrpo.core.messages import MediaPart
from condensegrpo.learner.new_model import new_tokenizer
from condensegrpo.vision.processor import PictureProcessor

FamilyName = Literal["qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava_onevision"]
FAMILIES: tuple[FamilyName, ...] = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava_onevision")
CORPUS = ("look at this picture and say what is there : a red blue green square click 1 2 3 4 5 6 7 8 9 0 ok no",)

# both kinds of content, text and parts, as Qwen's templates
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part['text'] }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# parts alone, and a role that depends on the first of them, as SmolVLM's template
PARTS = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}\
{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

# the pictures of a message before its text, as LLaVA-OneVision's template, which has a space after the role of a
# message and a line break after that of the generation prompt: with it, every prompt is rendered and declared
PICTURES_FIRST = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}\
{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    template: str
    special: tuple[str, ...]  # tokens beside those of new_tokenizer
    image_token: str
    end: str  # of a reply


_QWEN = _Recipe(
    template=CHATML,
    special=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    image_token="<|image_pad|>",
    end="<|im_end|>",
)
_TILES = _Recipe(
    template=PARTS,
    special=(
        *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
    image_token="<image>",
    end="<end_of_utterance>",
)
_SQUARE = _Recipe(template=PICTURES_FIRST, special=("<image>", "<video>"), image_token="<image>", end="<|im_end|>")
_RECIPES = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _TILES,
    "idefics3": _TILES,
    "llava_onevision": _SQUARE,
}


# what is beside the image processor in processor_config.json
_PROCESSORS = {
    "qwen2_5_vl": {"processor_class": "Qwen2_5_VLProcessor"},
    "qwen3_vl": {"processor_class": "Qwen3VLProcessor"},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "llava_onevision": {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
    },
}


def picture(width: int = 56, height: int = 56, *, color: tuple[int, int, int] = (200, 30, 30)) -> MediaPart:
    """A PNG whose pixels differ, so that no two patches are equal."""
    drawn = Image.new("RGB", (width, height))
    red, green, blue = color
    drawn.putdata([((red + 3 * x) % 256, (green + 5 * y) % 256, blue) for y in range(height) for x in range(width)])
    return MediaPart.of(_encoded(drawn), "image/png")


def vision_tokenizer(
    family: FamilyName, *, corpus: Sequence[str] = CORPUS, kind: Literal["words", "bpe"] = "bpe"
) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens and a chat template of a family."""
    recipe = _RECIPES[family]
    tokenizer = new_tokenizer(corpus, kind=kind, vocab_size=320 if kind == "bpe" else 4096)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *recipe.special]})
    tokenizer.eos_token = recipe.end
    tokenizer.chat_template = recipe.template
    return tokenizer


def image_processor(family: FamilyName) -> Any:
    """Patches of 4 × 4 pixels (Qwen), tiles of 16 × 16 pixels, or a square of 16 × 16 pixels."""
    match family:
        case "qwen2_5_vl" | "qwen3_vl":
            return Qwen2VLImageProcessorPil(
                patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
            )
        case "smolvlm":
            return SmolVLMImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 16})
        case "idefics3":
            return Idefics3ImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 16})
        case "llava_onevision":
            return LlavaOnevisionImageProcessorPil(
                size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]]
            )


def vision_config(family: FamilyName, tokenizer: PreTrainedTokenizerFast, *, head_size: int = 8) -> PretrainedConfig:
    """The configuration of a model of some ten thousand parameters.

    Args:
        head_size: of each of its four attention heads; vLLM has kernels for 32 and more.
    """
    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 4 * head_size,
        "intermediate_size": 48,
        "num_hidden_layers": 3 if family == "qwen3_vl" else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    ids = {"image_token_id": token(_RECIPES[family].image_token)}
    if family in ("qwen2_5_vl", "qwen3_vl"):
        rope = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head_size // 8, head_size // 8, head_size // 4],
        }
        ids |= {
            "video_token_id": token("<|video_pad|>"),
            "vision_start_token_id": token("<|vision_start|>"),
            "vision_end_token_id": token("<|vision_end|>"),
        }
        text |= {"rope_parameters": rope}
        tower = {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 4 * head_size,
            "patch_size": 4,
            "initializer_range": 0.2,
        }
        if family == "qwen2_5_vl":
            tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
            return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        rope["mrope_interleaved"] = True
        return Qwen3VLConfig(
            text_config=text | {"head_dim": head_size}, vision_config=tower, tie_word_embeddings=False, **ids
        )
    tower = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "initializer_range": 0.2,
    }
    if family == "llava_onevision":
        return LlavaOnevisionConfig(
            text_config=text | {"model_type": "qwen2"},
            vision_config=tower | {"model_type": "siglip_vision_model", "vision_use_head": False},
            image_token_index=ids["image_token_id"],
            video_token_index=token("<video>"),
            image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
            tie_word_embeddings=False,
        )
    kind = SmolVLMConfig if family == "smolvlm" else Idefics3Config
    return kind(
        text_config=text | {"model_type": "llama"},
        vision_config=tower,
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        **ids,
    )


def vision_model(
    family: FamilyName,
    folder: Path,
    *,
    corpus: Sequence[str] = CORPUS,
    kind: Literal["words", "bpe"] = "bpe",
    seed: int = 0,
    head_size: int = 8,
) -> PreTrainedModel:
    """A random model in fp32, saved to a folder with its tokenizer, chat template and image processor."""
    tokenizer = vision_tokenizer(family, corpus=corpus, kind=kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(
            vision_config(family, tokenizer, head_size=head_size), dtype=torch.float32
        ).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor(family).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(_PROCESSORS[family]))
    return model


def family_processor(family: FamilyName) -> Any:
    """The family's own processor of transformers, without its part for videos, which needs torchvision.

    That of SmolVLM needs num2words for videos and is Idefics3's for pictures.
    """
    kinds = {
        "qwen2_5_vl": (Qwen2_5_VLProcessor, {"video_processor": None}),
        "qwen3_vl": (Qwen3VLProcessor, {"video_processor": None}),
        "smolvlm": (Idefics3Processor, {"image_seq_len": 4}),
        "idefics3": (Idefics3Processor, {"image_seq_len": 4}),
        "llava_onevision": (
            LlavaOnevisionProcessor,
            {"video_processor": None, "num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        ),
    }
    kind, options = kinds[family]

    class WithoutVideos(kind):  # type: ignore[misc,valid-type]  # a class found at run time
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
            return type(argument)

    tokenizer = vision_tokenizer(family)
    return WithoutVideos(image_processor(family), tokenizer, chat_template=tokenizer.chat_template, **options)


def _encoded(drawn: Image.Image) -> bytes:
    file = io.BytesIO()
    drawn.save(file, "PNG")
    return file.getvalue()


def plain_inputs(processor: PictureProcessor, ids: Sequence[int], media: Sequence[str]) -> dict[str, torch.Tensor]:
    """The arguments of the plain model of transformers for one row and its pictures."""
    row = torch.tensor([list(ids)])
    given = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if not media:
        return given
    if processor.family.three_axes:
        given["mm_token_type_ids"] = (row == processor.placeholder_id).int()
    pixels = [processor.pixels(picture) for picture in media]
    tiles = "pixel_attention_mask" in pixels[0]
    for name in pixels[0]:
        given[name] = torch.cat([each[name] for each in pixels], dim=1 if tiles else 0)
    if "batch_num_images" in given:
        given["batch_num_images"] = torch.tensor([max(len(media), 2)])  # never alone, see vision/processor.py
    return given
