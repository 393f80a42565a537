"""Text to token ids, with control over which special tokens are control tokens and which are text."""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextEncoder:
    """Tokenises text whose special tokens are control tokens, save where a marker breaks them up: that is text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        special = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special, key=len, reverse=True)
        self._ids = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in longest_first}
        self._forbidden = frozenset(self._ids.values()) - {tokenizer.unk_token_id}
        nothing = "(?!)"  # matches nowhere
        self._control = re.compile(
            "|".join(
                rf"{_space(special[text].lstrip)}({re.escape(text)}){_space(special[text].rstrip)}"
                for text in longest_first
            )
            or nothing
        )
        texts = "|".join(map(re.escape, longest_first)) or nothing
        self._text = re.compile(texts)
        self._start = re.compile(rf"(?=(?:{texts}))(.)", re.DOTALL)  # finds overlapping ones too, but slowly

    def escape(self, text: str, marker: str) -> str:
        """The text with the marker after the first character of every special token's text."""
        return self._start.sub(rf"\1{marker}", text) if self._text.search(text) else text

    def leading_control(self, text: str) -> int | None:
        """The id of the special token that the text starts with, white space aside."""
        match = self._control.match(text.lstrip())
        return self._id(match) if match else None

    def encode(self, text: str, marker: str) -> tuple[int, ...]:
        """The ids of a text; the marker falls away, and what it broke up gives no control token."""
        if marker not in text:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        position = 0
        for match in self._control.finditer(text):
            ids.extend(self._plain(text[position : match.start()], marker))
            ids.append(self._id(match))
            position = match.end()
        return (*ids, *self._plain(text[position:], marker))

    def _id(self, match: re.Match[str]) -> int:
        return self._ids[match[match.lastindex or 0]]

    def _plain(self, piece: str, marker: str) -> list[int]:
        ids = self._characters(piece.replace(marker, ""))
        if self._forbidden.isdisjoint(ids):
            return ids
        # a word-level vocabulary holds its special tokens as words: only their halves are text to it
        return [token for part in piece.split(marker) for token in self._characters(part)]

    def _characters(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)) if text else []


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Private-use characters that none of the texts contains, always in the same order."""
    known = tuple(texts)
    private = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
    return (character for character in map(chr, private) if not any(character in text for text in known))


def _space(swallowed: bool) -> str:
    return r"\s*" if swallowed else ""
