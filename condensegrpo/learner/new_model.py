"""Makes a small tokenizer and a small model, which may see, for runs that download nothing."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from condensegrpo.learner.model_folder import auto_class, sees
from condensegrpo.learner.settings import NewModel, NewPictures

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config

IMAGE = "<image>"  # the template writes it for a picture; its positions take the embeddings
SPECIAL = (
    "<fake_token_around_image>",
    "<global-img>",
    IMAGE,
)  # see processor.py; the last ids of the vocabulary

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


def seeing_config(text: "Qwen3Config", pictures: NewPictures) -> "PretrainedConfig":
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


BEGIN, END, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|pad|>", "[UNK]"
ROLES = ("system", "user", "assistant", "tool")

_TAG = r"</?[A-Za-z_]+>"

# ChatML without a line break after <|im_end|>: a prompt that goes on after a sampled reply needs no separator. Content
# is written as it is, tool-call markup included; structured calls are written out only where the content lacks them.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nA call: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
        {%- if message['tool_calls'] and '<tool_call>' not in (message['content'] or '') %}
            {%- for call in message['tool_calls'] %}
                {%- set function = call['function'] or call %}
                {{- '<tool_call>{"name": "' + function['name'] + '", "arguments": ' }}
                {%- set arguments = function['arguments'] %}
                {{- arguments if arguments is string else arguments | tojson }}
                {{- '}</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def new_tokenizer(corpus: Iterable[str], *, kind: Literal["words", "bpe"], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer for the text of ``corpus``, with a chat template.

    ``words``: one token a word or ``<tag>``, in order of first appearance; other words become ``[UNK]``, whitespace is
    lost and ``decode`` puts one space between words. ``vocab_size`` is the most that it may have.

        <|im_start|>user\\nstart 3<|im_end|>   ─▶   <|im_start|> user start 3 <|im_end|>

    ``bpe``: byte-level pairs learned up to ``vocab_size``; every text survives encode and decode; a digit is a token.
    """
    tokenizer = _words(corpus, vocab_size) if kind == "words" else _bpe(corpus, vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN if kind == "words" else None,
        additional_special_tokens=[BEGIN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, new: NewModel, *, seed: int) -> "PreTrainedModel":
    """A model of this size in fp32 with tied embeddings and random weights that depend on ``seed`` and nothing else.

    Its vocabulary is the tokenizer's. The random state of torch is left as it was found.
    """
    config = new_config(new, vocab_size=len(tokenizer))
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.eos_token_id, part.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = auto_class(config).from_config(config).to(torch.float32)
        if new.pictures is not None:
            initialise_patches(model)
        return model


def new_config(new: NewModel, *, vocab_size: int) -> "PretrainedConfig":
    """The configuration of a new model, without the ids of its tokenizer's special tokens."""
    from transformers import Qwen3Config  # here: it takes two seconds that a dry run need not wait for

    text = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=new.hidden_size,
        intermediate_size=new.ffn_size,
        num_hidden_layers=new.layers,
        num_attention_heads=new.heads,
        num_key_value_heads=new.heads,
        head_dim=new.hidden_size // new.heads,
        max_position_embeddings=new.max_positions,
        initializer_range=new.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.float32,
    )
    return text if new.pictures is None else seeing_config(text, new.pictures)


def save_new(folder: Path, tokenizer: PreTrainedTokenizerFast, model: "PreTrainedModel") -> None:
    """Write a folder that the classes of ``transformers`` load, with the image processor of a model that sees."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    if sees(model.config):
        vision = model.config.vision_config
        save_image_processor(folder, size=vision.image_size, patch=vision.patch_size)


def _words(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    words = dict.fromkeys((PAD, BEGIN, END, UNKNOWN, *ROLES))
    words.update(dict.fromkeys(word for text in corpus for word in re.sub(f"({_TAG})", r" \1 ", text).split()))
    if len(words) > vocab_size:
        raise ValueError(
            f"making a tokenizer of one token a word: the text has {len(words)} different words (special tokens and "
            f"roles included) and vocab_size is {vocab_size}; raise vocab_size, or choose the kind 'bpe'"
        )
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_TAG), "isolated"), pre_tokenizers.WhitespaceSplit()]
    )
    return tokenizer


def _bpe(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    special = [PAD, BEGIN, END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        raise ValueError(
            f"making a byte-level tokenizer: vocab_size is {vocab_size} and the {len(alphabet)} bytes and "
            f"{len(special)} special tokens alone need {len(alphabet) + len(special)}; raise vocab_size"
        )
    tokenizer = Tokenizer(models.BPE())
    pieces = rf"{_TAG}|\p{{N}}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_TAG), "isolated"),
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
