"""Text to token ids, with control over which special tokens are control tokens and which are text."""

import itertools
import re
from array import array
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LARGE = 1 << 16  # characters of a text that takes long: it may be tokenised in a thread, see ``Proxy``
LARGE_CACHED = 32  # of them, whose ids are kept
CACHED = 16384  # texts after a control token whose ids are kept
_SETTINGS = Lock()  # a tokenizer keeps those of its last call, whichever thread and encoder it came from


class TextEncoder:
    """Tokenises text whose special tokens are control tokens, save where a marker breaks them up: that is text.

    A tokenizer splits at special tokens first, so a control token and the text up to the next are tokenised apart from
    the rest, once:

        <|im_start|>user⏎go on   <|im_end|>   <|im_start|>assistant⏎
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        special = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special, key=len, reverse=True)
        self._ids = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in longest_first}
        self._forbidden = frozenset(self._ids.values()) - {tokenizer.unk_token_id}
        nothing = "(?!)"  # matches nowhere
        alike = itertools.groupby(longest_first, key=lambda text: (special[text].lstrip, special[text].rstrip))
        self._control = re.compile(
            "|".join(
                rf"{_space(left)}({'|'.join(map(re.escape, texts))}){_space(right)}" for (left, right), texts in alike
            )
            or nothing
        )
        texts = "|".join(map(re.escape, longest_first)) or nothing
        self._text = re.compile(texts)
        self._start = re.compile(rf"(?=(?:{texts}))(.)", re.DOTALL)  # finds overlapping ones too, but slowly
        self._copies = dict[bool, Any]()  # of the tokenizer, for large texts
        self._large = lru_cache(LARGE_CACHED)(self._beside)
        self._between = lru_cache(CACHED)(self._whole)

    def escape(self, text: str, marker: str) -> str:
        """The text with the marker after the first character of every special token's text."""
        return self._start.sub(rf"\1{marker}", text) if self._text.search(text) else text

    def leading_control(self, text: str) -> int | None:
        """The id of the special token that the text starts with, white space aside."""
        match = self._control.match(text.lstrip())
        return self._id(match) if match else None

    def controls(self, text: str) -> list[int]:
        """Where the control tokens of a text begin, the white space that they swallow included."""
        return [match.start() for match in self._control.finditer(text)]

    def encode(self, text: str, marker: str) -> "array[int]":
        """The ids of a text; the marker falls away, and what it broke up gives no control token."""
        ids, known = array("I"), marker not in text
        for start, end in itertools.pairwise(dict.fromkeys((0, *self.controls(text), len(text)))):
            part = text[start:end]
            ids.extend(self._between(part) if known or marker not in part else self._broken(part, marker))
        return ids

    def encode_whole(self, text: str, marker: str) -> "array[int]":
        """What ``encode`` returns, by one call of the tokenizer unless the marker is in the text."""
        return self.encode(text, marker) if marker in text else self._whole(text)

    def _whole(self, text: str) -> "array[int]":
        if len(text) > LARGE:
            return self._large(text, split=False)
        backend = self._tokenizer.backend_tokenizer
        with _SETTINGS:
            if (
                backend.truncation or backend.padding or backend.encode_special_tokens
            ):  # somebody's last call left it so
                return array("I", self._tokenizer.encode(text, add_special_tokens=False))
            return array("I", backend.encode(text, add_special_tokens=False).ids)

    def _beside(self, text: str, *, split: bool) -> "array[int]":
        """The ids of a large text, by a copy of the tokenizer, so that other threads can use it and Python meanwhile.

        ``split``: special tokens are text.
        """
        if split not in self._copies:
            copy = self._copies[split] = deepcopy(self._tokenizer.backend_tokenizer)
            copy.no_truncation()
            copy.no_padding()
            copy.encode_special_tokens = split
        (encoded,) = self._copies[split].encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoded.ids)

    def _id(self, match: re.Match[str]) -> int:
        return self._ids[match[match.lastindex or 0]]

    def _broken(self, part: str, marker: str) -> list[int]:
        """The ids of a text with the marker in it that starts with a control token, or has none."""
        match = self._control.match(part)
        return [self._id(match), *self._plain(part[match.end() :], marker)] if match else self._plain(part, marker)

    def _plain(self, piece: str, marker: str) -> list[int]:
        ids = self._characters(piece.replace(marker, ""))
        if self._forbidden.isdisjoint(ids):
            return ids
        # a word-level vocabulary holds its special tokens as words: only their halves are text to it
        return [token for part in piece.split(marker) for token in self._characters(part)]

    def _characters(self, text: str) -> list[int]:
        if not text:
            return []
        if len(text) > LARGE:
            return list(self._large(text, split=True))
        with _SETTINGS:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Private-use characters that none of the texts contains, always in the same order."""
    known = tuple(texts)
    private = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
    return (character for character in map(chr, private) if not any(character in text for text in known))


def _space(swallowed: bool) -> str:
    return r"\s*" if swallowed else ""
