"""Tokenizers with the control tokens of model families, and the chat templates of real ones that TRL ships."""

from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OTHERS = Path(__file__).parent.parent / ".venv" / "others" / "trl"  # of `make others`
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
SPECIAL = {
    "qwen": (*CHATML, "<|video_pad|>"),
    "glm": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "llama": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eom_id|>",
    ),
    "gemma": (
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>"),
        *("<|image>", "<image|>", "<|image|>"),
    ),
    "gpt-oss": (
        *("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        "<|endoftext|>",
    ),
    "lfm": (
        "<|startoftext|>",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
    ),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
}
ENDS = {
    "qwen": "<|im_end|>",
    "glm": "<|endoftext|>",
    "llama": "<|eot_id|>",
    "gemma": "<turn|>",
    "gpt-oss": "<|return|>",
    "lfm": "<|im_end|>",
    "deepseek": "<｜end▁of▁sentence｜>",
}
ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


@cache
def family_tokenizer(tokens: str, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the control tokens of a family and a chat template of TRL, by name."""
    core = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[tokens]])
    core.add_tokens([AddedToken(token, normalized=False) for token in ADDED if tokens != "gpt-oss"])
    first = next((token for token in SPECIAL[tokens] if "begin" in token or "bos" in token or "startof" in token), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=first, eos_token=ENDS[tokens], chat_template=chat_template(template)
    )


@cache
def chat_template(name: str) -> str:
    """A chat template that TRL ships; the test is skipped where there is none."""
    spec = find_spec("trl") or PathFinder.find_spec("trl", [str(OTHERS)])
    if spec is None or spec.origin is None:
        pytest.skip("reads chat templates of TRL: pip install trl==1.16.0, or make others")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
