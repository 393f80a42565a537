"""Text to token ids, with control over which special tokens are control tokens and which are text."""

import itertools
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LARGE = 1 << 16  # characters of a text that takes long: it may be tokenised in a thread, see ``Proxy``
LARGE_CACHED = 32  # of them, whose ids are kept
CACHED = 16384  # texts whose ids are kept
NO_IDS: Mapping[int, Sequence[int]] = {}
_NOTHING = "(?!)"  # matches nowhere
# Unicode reserves these for the inside of programs. A break splits the text of a special token, a number between two
# places stands for ids, and a digit after the last for one of the three where a text holds it.
_RESERVED = _BREAK, _PLACE, _LITERAL = "\ufdd0\ufdd1\ufdd2"
_BORDER = re.compile(f"{_BREAK}|{_PLACE}([0-9]+){_PLACE}")
_WRITTEN = re.compile(f"{_LITERAL}([0-2])")


class TextEncoder:
    """Tokenises text whose special tokens are control tokens, save where ``escape`` broke them up: that is text.

    A tokenizer splits at special tokens first, so a control token and the text up to the next are tokenised apart from
    the rest, once:

        <|im_start|>user⏎go on   <|im_end|>   <|im_start|>assistant⏎
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        special = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special, key=len, reverse=True)
        self._ids = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in longest_first}
        alike = itertools.groupby(longest_first, key=lambda text: (special[text].lstrip, special[text].rstrip))
        self._control = re.compile(
            "|".join(
                rf"{_space(left)}({'|'.join(map(re.escape, texts))}){_space(right)}" for (left, right), texts in alike
            )
            or _NOTHING
        )
        texts = "|".join(map(re.escape, longest_first)) or _NOTHING
        self._firsts = {*_RESERVED, *(text[0] for text in longest_first if text)}
        self._text = re.compile(f"{texts}|[{''.join(_RESERVED)}]")
        # finds overlapping ones too, but slowly
        self._start = re.compile(rf"(?=(?:{texts}))(.)|[{''.join(_RESERVED)}]", re.DOTALL)
        self._anchor = next((text for text in longest_first if not special[text].rstrip), "")
        self._texts = {token: text for text, token in self._ids.items()}
        self._controls = {token for text, token in self._ids.items() if "think" not in text.lower()}
        tokens = sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
        self.vocabulary = zlib.crc32("\n".join(token for token, _ in tokens).encode("utf-8", "surrogatepass"))
        self._copy: Any = None  # of the tokenizer, for large texts
        self._small, self._large = lru_cache(CACHED)(self._encoded), lru_cache(LARGE_CACHED)(self._beside)

    def escape(self, text: str) -> str:
        """The text with a break after the first character of every special token's text."""
        if not any(first in text for first in self._firsts) or not self._text.search(text):
            return text
        return self._start.sub(
            lambda found: f"{found[0]}{_BREAK}" if found[1] else f"{_LITERAL}{_RESERVED.index(found[0])}", text
        )

    def controls(self, text: str, start: int = 0) -> Iterator[tuple[int, int, int]]:
        """The special tokens of a text from ``start`` on: the id of each, and where it begins and ends."""
        found = self._control.finditer(text, start)
        return ((self._ids[each[each.lastindex or 0]], *each.span()) for each in found)

    def after_controls(self, text: str) -> str:
        """The text after the last special token that is no tag of a thought."""
        return text[max((end for token, _, end in self.controls(text) if token in self._controls), default=0) :]

    def after_last_control(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids after the last special token that is no tag of a thought."""
        last = next((index for index in reversed(range(len(ids))) if ids[index] in self._controls), -1)
        return tuple(ids[last + 1 :])

    def encode(self, text: str, known: Mapping[int, Sequence[int]] = NO_IDS) -> "array[int]":
        """The ids of a text in which ``escape`` broke up what gives no control token; ``known``: ids by ``place``."""
        ids = array("I")
        starts = (match.start() for match in self._control.finditer(text))
        plain = not any(character in text for character in _RESERVED)
        for start, end in itertools.pairwise(dict.fromkeys((0, *starts, len(text)))):
            if plain:
                ids.extend(self.ids(text[start:end]))
                continue
            first, *rest = _BORDER.split(text[start:end])
            ids.extend(self.ids(_unescaped(first)))
            for number, following in zip(rest[::2], rest[1::2], strict=True):
                ids.extend(known[int(number)] if number else ())
                ids.extend(self.after_control(_unescaped(following)))
        return ids

    def after_control(self, text: str) -> "array[int]":
        """The ids of a text as they follow a control token: without the space that some tokenizers put first."""
        return self.ids(self._anchor + text)[bool(self._anchor) :] if text else array("I")

    def following(self, text: str) -> "array[int]":
        """The ids of an escaped text as they follow a control token."""
        return self.encode(f"{self._anchor}{text}")[bool(self._anchor) :]

    def plain(self, text: str) -> "array[int]":
        """The ids of a text without control tokens, as they follow one."""
        return self.following(self.escape(text))

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of ids that were sampled, escaped where it is not a control token."""
        decode, texts = self._tokenizer.backend_tokenizer.decode, self._texts
        runs = itertools.groupby(ids, key=texts.get)
        return "".join(
            text * len(list(run)) if text else self.escape(decode(list(run), skip_special_tokens=False))
            for text, run in runs
        )

    def ids(self, text: str) -> "array[int]":
        """The ids of a text, whose special tokens are control tokens; remembered."""
        return self._large(text) if len(text) > LARGE else self._small(text)

    def _beside(self, text: str) -> "array[int]":
        """The ids of a large text, by a copy of the tokenizer: other threads can use it and Python meanwhile."""
        if self._copy is None:
            copy = self._copy = deepcopy(self._tokenizer.backend_tokenizer)
            copy.no_truncation()
            copy.no_padding()
            copy.encode_special_tokens = False
        (encoded,) = self._copy.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoded.ids)

    def _encoded(self, text: str) -> "array[int]":
        backend = self._tokenizer.backend_tokenizer
        if backend.truncation or backend.padding or backend.encode_special_tokens:  # somebody's last call left it so
            return array("I", self._tokenizer.encode(text, add_special_tokens=False))
        return array("I", backend.encode(text, add_special_tokens=False).ids)


def place(number: int) -> str:
    """What stands for ids in a text for ``encode``; no escaped text contains it."""
    return f"{_PLACE}{number}{_PLACE}"


def pieces(text: str) -> list[str]:
    """The text around places and their numbers, in turn: text, 0, text, 1, text, …"""
    return re.split(f"{_PLACE}([0-9]+){_PLACE}", text)


def _unescaped(text: str) -> str:
    return _WRITTEN.sub(lambda found: _RESERVED[int(found[1])], text) if _LITERAL in text else text


def _space(swallowed: bool) -> str:
    return r"\s*" if swallowed else ""
