"""Text to token ids, with control over which special tokens are control tokens and which are text."""

import itertools
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LARGE = 1 << 16  # characters of a text that takes long: it may be tokenised in a thread, see ``Proxy``
CACHED_LARGE_TEXTS = 32  # of them, whose ids are kept
CACHED_TEXTS = 16384  # texts whose ids are kept
NO_IDS: Mapping[str, Sequence[int]] = {}
_NOTHING = "(?!)"  # matches nowhere


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
        patterns = []  # one for neighbours that swallow the same white space
        alike = itertools.groupby(longest_first, key=lambda text: (special[text].lstrip, special[text].rstrip))
        for swallows, texts in alike:
            before, after = (r"\s*" if swallowed else "" for swallowed in swallows)
            patterns.append(f"{before}({'|'.join(map(re.escape, texts))}){after}")
        self._control = re.compile("|".join(patterns) or _NOTHING)
        any_text = "|".join(map(re.escape, longest_first)) or _NOTHING
        self._any_special, self._firsts = re.compile(any_text), {text[0] for text in longest_first if text}
        self._start = re.compile(rf"(?=(?:{any_text}))(.)", re.DOTALL)  # finds overlapping ones too, but slowly
        self._anchor = next((text for text in longest_first if not special[text].rstrip), "")
        self._text_of = {token: text for text, token in self._ids.items()}
        self._controls = {token for text, token in self._ids.items() if "think" not in text.lower()}
        tokens = sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
        self.vocabulary = zlib.crc32("\n".join(token for token, _ in tokens).encode("utf-8", "surrogatepass"))
        self._copy: Any = None  # of the tokenizer, for large texts
        self._small_ids = lru_cache(CACHED_TEXTS)(self._encode_small)
        self._large_ids = lru_cache(CACHED_LARGE_TEXTS)(self._encode_large)

    def escape(self, text: str, marker: str) -> str:
        """The text with the marker after the first character of every special token's text."""
        if not any(first in text for first in self._firsts) or not self._any_special.search(text):
            return text
        return self._start.sub(rf"\1{marker}", text)

    def leading_control(self, text: str) -> int | None:
        """The id of the special token that the text starts with, white space aside."""
        match = self._control.match(text.lstrip())
        return self._id_of(match) if match else None

    def _id_of(self, found: re.Match[str]) -> int:
        """The id of a special token that ``_control`` found: it is in the one group that matched."""
        return self._ids[found[found.lastindex or 0]]

    def first_of(self, text: str, ids: Sequence[int], start: int = 0) -> tuple[int, int]:
        """The span of the first of some special tokens from ``start`` on; of the end if there is none."""
        spans = (found.span() for found in self._control.finditer(text, start) if self._id_of(found) in ids)
        return next(spans, (len(text), len(text)))

    def last_control(self, text: str) -> int:
        """The index after the last special token that is no tag of a thought."""
        ends = (found.end() for found in self._control.finditer(text) if "think" not in found[0].lower())
        return max(ends, default=0)

    def after_last_control(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids after the last special token that is no tag of a thought."""
        last = next((index for index in reversed(range(len(ids))) if ids[index] in self._controls), -1)
        return tuple(ids[last + 1 :])

    def encode(self, text: str, marker: str, known: Mapping[str, Sequence[int]] = NO_IDS) -> "array[int]":
        """The ids of a text; the marker falls away, and what it broke up gives no control token.

        ``known``: ids by the character that stands for them in the text.
        """
        ids = array("I")
        starts = (match.start() for match in self._control.finditer(text))
        borders = dict.fromkeys((0, *starts, len(text)))  # in order, each once
        breaks = re.compile(f"([{marker}{''.join(known)}])") if known or marker in text else None
        for start, end in itertools.pairwise(borders):
            first, *rest = breaks.split(text[start:end]) if breaks else (text[start:end],)
            ids.extend(self.ids(first))
            for mark, following in zip(rest[::2], rest[1::2], strict=True):
                ids.extend(known.get(mark, ()))
                ids.extend(self.after_control(following))
        return ids

    def after_control(self, text: str) -> "array[int]":
        """The ids of a text as they follow a control token: without the space that some tokenizers put first."""
        return self.ids(self._anchor + text)[bool(self._anchor) :] if text else array("I")

    def following(self, text: str, marker: str) -> "array[int]":
        """As ``after_control``, of a text with control tokens and a marker, see ``encode``."""
        return self.encode(f"{self._anchor}{text}", marker)[bool(self._anchor) :]

    def plain(self, text: str) -> "array[int]":
        """The ids of a text without control tokens, as they follow one."""
        marker = next(unused_characters((text,)))
        return self.following(self.escape(text, marker), marker)

    def decoded(self, ids: Sequence[int], marker: str) -> str:
        """The text of ids that were sampled, escaped where it is not a control token."""
        decode, texts = self._tokenizer.backend_tokenizer.decode, self._text_of
        runs = itertools.groupby(ids, key=texts.get)
        return "".join(
            text * len(list(run)) if text else self.escape(decode(list(run), skip_special_tokens=False), marker)
            for text, run in runs
        )

    def ids(self, text: str) -> "array[int]":
        """The ids of a text, whose special tokens are control tokens; remembered."""
        return self._large_ids(text) if len(text) > LARGE else self._small_ids(text)

    def _encode_large(self, text: str) -> "array[int]":
        """The ids of a large text, by a copy of the tokenizer: other threads can use it and Python meanwhile."""
        if self._copy is None:
            copy = self._copy = deepcopy(self._tokenizer.backend_tokenizer)
            copy.no_truncation()
            copy.no_padding()
            copy.encode_special_tokens = False
        (encoded,) = self._copy.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoded.ids)

    def _encode_small(self, text: str) -> "array[int]":
        backend = self._tokenizer.backend_tokenizer
        if backend.truncation or backend.padding or backend.encode_special_tokens:  # an earlier call left it so
            return array("I", self._tokenizer.encode(text, add_special_tokens=False))
        return array("I", backend.encode(text, add_special_tokens=False).ids)


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Private-use characters that none of the texts contains, always in the same order."""
    known = tuple(text for text in texts if not text.isascii())
    private = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
    return (character for character in map(chr, private) if not any(character in text for text in known))
