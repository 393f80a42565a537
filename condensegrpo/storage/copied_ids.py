"""Token ids as copies of earlier ids with new ones between them: most of a condensed prompt was in the last one.

    earlier  5 6 7 8 9 10 11 12     ids  5 6 7 99 9 10 11 12     ─▶     [0, 3, 99] [4, 8]

A part ``[first, end, new, …]`` stands for the earlier ids from ``first`` up to, not including, ``end``, and new ones
behind them.
"""

from array import array
from collections.abc import Iterable, Sequence

from condensegrpo.core.shared_sequence import packed_ids

LEAST = 8  # consecutive ids that are worth a copy
BYTES = array("I").itemsize  # of an id
BETWEEN = 64  # matches of the same bytes that begin within an id, after which a copy is not looked for any further

Part = list[int]


def copied_parts(ids: Sequence[int], earlier: Sequence[int]) -> list[Part]:
    """The parts that make up some ids."""
    packed, known = packed_ids(ids), packed_ids(earlier)
    target, source = packed.tobytes(), known.tobytes()
    result, done, at = [[0, 0]], 0, 0  # the first ``done`` ids have parts
    while at + LEAST <= len(packed):
        first = _index(target[at * BYTES : (at + LEAST) * BYTES], source, likely=result[-1][1])
        if first is None:
            at += LEAST
            continue
        while at > done and first > 0 and packed[at - 1] == known[first - 1]:
            at, first = at - 1, first - 1
        length = _common(target[at * BYTES :], source[first * BYTES :])
        result[-1] += packed[done:at]
        result.append([first, first + length])
        done = at = at + length
    result[-1] += packed[done:]
    return [part for part in result if part != [0, 0]]


def ids_of_parts(stored: Iterable[Sequence[int]], earlier: Sequence[int]) -> "array[int]":
    """The ids that parts stand for.

    Raises:
        ValueError: a part has no first and end, or copies what is not there.
    """
    known, ids = packed_ids(earlier), array("I")
    for part in stored:
        if len(part) < 2 or not 0 <= part[0] <= part[1] <= len(known):
            raise ValueError(f"wanted parts [first, end, new, …] of {len(known)} earlier ids, found {part!r:.60}")
        ids += known[part[0] : part[1]]
        ids.extend(part[2:])
    return ids


def _index(ids: bytes, source: bytes, *, likely: int) -> int | None:
    """Where some ids are in the source: at the likely index if they are there; None if they are not."""
    if source.startswith(ids, likely * BYTES):
        return likely
    at = source.find(ids)
    for _ in range(BETWEEN):
        if at < 0 or not at % BYTES:
            break
        at = source.find(ids, at + 1)
    return None if at % BYTES else at // BYTES  # −1 is between ids, too


def _common(first: bytes, second: bytes) -> int:
    """With how many equal ids two sequences begin."""
    equal, most = 0, min(len(first), len(second)) // BYTES
    while equal < most:
        middle = (equal + most + 1) // 2
        if first[equal * BYTES : middle * BYTES] == second[equal * BYTES : middle * BYTES]:
            equal = middle
        else:
            most = middle - 1
    return equal
