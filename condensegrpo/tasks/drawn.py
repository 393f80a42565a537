"""Parts of tasks that draw their problems: problems by index, a held-out share, replies in one tag."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem

EVAL_SHARE = 8  # one problem in so many is kept for evaluation, by the hash of its content


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnProblems(Sequence[Problem]):
    """Problems that are made when they are read."""

    size: int
    draw: Callable[[int], Problem]  # the problem of an index

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        """The problem of an index, or a list for a slice."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self.size))]
        return self.draw(range(self.size)[index])


def is_eval_content(content: str) -> bool:
    """Whether the problem with this content is for evaluation."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % EVAL_SHARE == 0


def ends_with_request(context: Sequence[Message]) -> bool:
    """Whether a condenser requests a text at the end of a context: see ``Unit.with_instruction``."""
    return "\n\n" in context[-1].text


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a task's replies, in which words are separated by any whitespace."""

    pattern: re.Pattern[str]  # one group, the whole tag

    def words(self, text: str) -> tuple[str, ...]:
        """The words of a text, every tag a word of its own."""
        return tuple(self.pattern.sub(r" \1 ", text).split())

    def inside(self, words: Sequence[str], tag: str) -> tuple[str, ...] | None:
        """The words between one opening and one closing tag; ``None`` unless that is the whole reply."""
        if len(words) < 3 or words[0] != f"<{tag}>" or words[-1] != f"</{tag}>":
            return None
        content = tuple(words[1:-1])
        return None if any(self.pattern.fullmatch(word) for word in content) else content

    def answer(self, words: Sequence[str]) -> str | None:
        """The words between the tags ``answer``, with single spaces; ``None`` unless that is the whole reply."""
        content = self.inside(words, "answer")
        return None if content is None else " ".join(content)
