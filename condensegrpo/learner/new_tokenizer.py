"""Makes a small tokenizer for runs that download nothing. It imports neither torch nor transformers."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

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


class TinyTokenizer:
    """A new tokenizer with its chat template, as a renderer uses tokenizers."""

    name_or_path = ""
    chat_template = CHAT_TEMPLATE

    def __init__(self, backend: Tokenizer) -> None:
        known = (PAD, BEGIN, END, UNKNOWN)
        backend.add_special_tokens([token for token in known if backend.token_to_id(token) is not None])
        self.backend_tokenizer = backend
        self.eos_token_id, self.unk_token_id = backend.token_to_id(END), backend.token_to_id(UNKNOWN)
        self.convert_tokens_to_ids, self.get_vocab = backend.token_to_id, backend.get_vocab
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._template = environment.from_string(self.chat_template)

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """The special tokens by their ids."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __call__(self, text: str, **_: object) -> Mapping[str, Sequence[Any]]:
        """The ids of a text, and where each begins and ends in it."""
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=False)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
        """The text of a prompt."""
        return self._template.render(messages=messages, **variables)


def tiny_tokenizer(corpus: Iterable[str], *, kind: Literal["words", "bpe"], vocab_size: int) -> TinyTokenizer:
    """A tokenizer for the text of ``corpus``, with a chat template.

    ``words``: one token a word or ``<tag>``, in order of first appearance; other words become ``[UNK]``, whitespace is
    lost and ``decode`` puts one space between words. ``vocab_size`` is the most that it may have.

        <|im_start|>user\\nstart 3<|im_end|>   ─▶   <|im_start|> user start 3 <|im_end|>

    ``bpe``: byte-level pairs learned up to ``vocab_size``; every text survives encode and decode; a digit is a token.
    """
    return TinyTokenizer(_words(corpus, vocab_size) if kind == "words" else _bpe(corpus, vocab_size))


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
