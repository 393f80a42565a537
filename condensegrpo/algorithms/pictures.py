"""Pictures in rows of training data: hashes and token ids. Pure; no pixels, no model.

All embeddings of pictures go to positions of one id, the model's placeholder. So that rows can be compared, each of
these tokens gets a **name**, a negative number of the picture's hash and the token's index in it. Two tokens have one
name if and only if they show the same part of the same picture; rows that share names and ids share their prefix.

    token_ids   7 8 8 8 9 8 8 8     8 is the placeholder, the pictures are a and b
    named       7 a₀ a₁ a₂ 9 b₀ b₁ b₂
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from condensegrpo.core.errors import LearnerError
from condensegrpo.core.trajectory import Segment

INDEX_BITS = 20  # of a token's index in its picture
_INDEX = (1 << INDEX_BITS) - 1


class NamedPicture(NamedTuple):
    """A picture as it stands in rows."""

    token_ids: tuple[int, ...]  # what its family's processor writes for it
    named: tuple[int, ...]  # the same, with names for placeholders


def named_picture(sha256: str, token_ids: tuple[int, ...], *, placeholder_id: int) -> NamedPicture:
    """The tokens of a picture; tiles may have other tokens between the placeholders."""
    first, count, named = int(sha256, 16) << INDEX_BITS, 0, list[int]()
    for token in token_ids:
        named.append(~(first | count) if token == placeholder_id else token)
        count += token == placeholder_id
    return NamedPicture(token_ids, tuple(named))


def with_names(row: Segment, picture_of: Callable[[str], NamedPicture]) -> Segment:
    """The row with names for the tokens of its pictures. Placeholders that the policy sampled keep their id.

    Raises:
        LearnerError: the tokens of a picture are not in its prompts.
    """
    token_ids, start = list(row.token_ids), 0
    context = _context_ends(row)
    for sha256 in row.media:
        picture = picture_of(sha256)
        start = _find(row.token_ids, picture.token_ids, start, context)
        if start < 0:
            raise LearnerError(
                f"packing the row of trajectory {row.trajectory!r} from turn {row.first_turn} on: its prompt does not "
                f"hold the {len(picture.token_ids)} tokens of the picture {sha256[:12]}. Sample and train with the "
                f"same image processor (preprocessor_config.json)."
            )
        end = start + len(picture.named)
        token_ids[start:end] = picture.named
        start = end
    return replace(row, token_ids=tuple(token_ids))


def numbered(tokens: Iterable[int]) -> tuple[list[int], tuple[str, ...]]:
    """Named tokens as numbers of 64 bits, and the pictures in them: the token i of picture p becomes ~(p·2²⁰ + i)."""
    numbers: dict[int, int] = {}
    result = []
    for token in tokens:
        if token < 0:
            key = ~token >> INDEX_BITS
            token = ~(numbers.setdefault(key, len(numbers)) << INDEX_BITS | ~token & _INDEX)
        result.append(token)
    return result, tuple(f"{key:064x}" for key in numbers)


def _context_ends(row: Segment) -> list[int]:
    """For each token the end of the run of context that it stands in; 0: it was sampled."""
    ends, end = [0] * len(row.token_ids), len(row.token_ids)
    for turn in reversed(row.turns):
        ends[turn.positions.stop : end] = [end] * (end - turn.positions.stop)
        end = turn.start
    ends[:end] = [end] * end
    return ends


def _find(tokens: Sequence[int], part: tuple[int, ...], start: int, context_ends: Sequence[int]) -> int:
    """The first index from ``start`` on at which the context holds a part; −1: none."""
    size = len(part)
    for index in range(start, len(tokens) - size + 1):
        if tokens[index] == part[0] and index + size <= context_ends[index] and tokens[index : index + size] == part:
            return index
    return -1
