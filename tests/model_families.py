"""Tokenizers with the control tokens of model families, and the chat templates of real ones that TRL ships."""

import json
from base64 import b64encode
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from condensegrpo.core.messages import Message
from condensegrpo.episodes.render import Renderer

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
    "mistral": (
        *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
        *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]"),
        "[/THINK]",
    ),
}
ENDS = {
    "qwen": "<|im_end|>",
    "glm": "<|endoftext|>",
    "llama": "<|eot_id|>",
    "gemma": "<turn|>",
    "gpt-oss": "<|return|>",
    "lfm": "<|im_end|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "mistral": "</s>",
}
ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


SYSTEM, QUESTION = Message(role="system", content="be brief"), Message(role="user", content="what is it?")


@cache
def family_tokenizer(tokens: str, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the control tokens of a family and a chat template of TRL, by name."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())  # it is in another order in every process
    core = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[tokens]])
    core.add_tokens([AddedToken(token, normalized=False) for token in ADDED if tokens != "gpt-oss"])
    first = next((token for token in SPECIAL[tokens] if "begin" in token or "bos" in token or "startof" in token), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=first, eos_token=ENDS[tokens], chat_template=chat_template(template)
    )


def tekken_folder(folder: Path) -> int:
    """A folder whose tokenizer is a ``tekken.json`` of bytes, as Mistral publishes; the number of its tokens."""
    folder.mkdir(parents=True)
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL["mistral"])]
    file = {
        "config": {
            "pattern": r"[^\s]+|\s+",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(special),
            "default_num_special_tokens": len(special),
            "version": "v13",
        },
        "vocab": [
            {"rank": byte, "token_bytes": b64encode(bytes([byte])).decode(), "token_str": None} for byte in range(256)
        ],
        "special_tokens": special,
        "version": 1,
        "type": "tekken",
    }
    (folder / "tekken.json").write_text(json.dumps(file), encoding="utf-8")
    return 256 + len(special)


def written(made: Renderer, reply: Message) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt, and a reply as the chat template writes it, up to the token that ends it."""
    entry = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        entry |= {"reasoning_content": reply.reasoning, "thinking": reply.reasoning}
    if reply.tool_calls:
        functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in reply.tool_calls]
        entry["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    said = [{"role": message.role, "content": message.text} for message in (SYSTEM, QUESTION)]
    apply = made._tokenizer.apply_chat_template
    tools = made._template.tools
    prompt = apply(said, tools=tools, add_generation_prompt=True, return_dict=False)
    whole = apply([*said, entry], tools=tools, return_dict=False)
    same = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    end = next((at + 1 for at, token in enumerate(whole) if at >= same and token in made.stop_ids), len(whole))
    return tuple(prompt[:same]), tuple(whole[same:end])


@cache
def chat_template(name: str) -> str:
    """A chat template that TRL ships; the test is skipped where there is none."""
    spec = find_spec("trl") or PathFinder.find_spec("trl", [str(OTHERS)])
    if spec is None or spec.origin is None:
        pytest.skip("reads chat templates of TRL: pip install trl==1.16.0, or make others")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
