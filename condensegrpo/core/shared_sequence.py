"""Sequences that share their items with the sequences that continue them. Standard library only.

The prompts of an episode mostly continue each other. As tuples, K prompts that grow by n items hold K²·n/2 items; as
prefixes of one buffer they hold K·n, and each costs the time of what is new.

    storage   a b c d e f        append-only
    turn 0    a b                length 2
    turn 1    a b c d e f        length 6: turn0.extended("cdef")
"""

from array import array
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import islice
from typing import TypeVar, overload

T = TypeVar("T")


class SharedSequence(Sequence[T]):
    """The first ``length`` items of a storage that is only ever appended to. Immutable; equal to a tuple of its items.

    Any thread may read it. Only one thread at a time may extend the sequences of one storage: those of an episode are
    extended by that episode alone.
    """

    __slots__ = ("_length", "_storage")

    def __init__(self, storage: MutableSequence[T], length: int | None = None) -> None:
        """``storage`` belongs to the sequence from now on; ``length`` None: all of it."""
        self._storage = storage
        self._length = len(storage) if length is None else length

    def extended(self, items: Iterable[T]) -> "SharedSequence[T]":
        """This sequence with more items at its end. It shares the storage unless that already continues differently."""
        storage = self._storage if len(self._storage) == self._length else self._storage[: self._length]
        storage.extend(items)
        return SharedSequence(storage)

    def continues(self, other: Sequence[T]) -> bool:
        """Whether this sequence begins with another: known at once if they share their storage, else compared."""
        if len(other) > self._length:
            return False
        storage = other._storage if isinstance(other, SharedSequence) else other
        if storage is self._storage:
            return True
        begins, ends = self._storage[: len(other)], storage[: len(other)]
        return begins == ends if type(begins) is type(ends) else tuple(begins) == tuple(ends)

    def __len__(self) -> int:
        """How many items it has."""
        return self._length

    def __iter__(self) -> Iterator[T]:
        """The items, in order."""
        return islice(self._storage, self._length)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        """An item, or a tuple of some."""
        if not isinstance(index, slice):
            return self._storage[range(self._length)[index]]
        start, stop, step = index.indices(self._length)
        if step == 1:
            return tuple(self._storage[start:stop])
        return tuple(self._storage[item] for item in range(start, stop, step))

    def __add__(self, other: Iterable[T]) -> tuple[T, ...]:
        """A tuple of the items of both."""
        return (*self, *other)

    def __radd__(self, other: Iterable[T]) -> tuple[T, ...]:
        """A tuple of the items of both."""
        return (*other, *self)

    def __eq__(self, other: object) -> bool:
        """Whether another sequence, tuple or list has the same items."""
        if not isinstance(other, SharedSequence | tuple | list):
            return NotImplemented
        return len(other) == self._length and self.continues(other)

    def __hash__(self) -> int:
        """That of a tuple of the items."""
        return hash(tuple(self))

    def __repr__(self) -> str:
        """The items, as a tuple shows them."""
        return repr(tuple(self))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled with its storage, which a pickle of several sequences holds once."""
        return SharedSequence, (self._storage, self._length)


def common_prefix(first: Sequence[T], second: Sequence[T]) -> int:
    """How many items two sequences begin with alike."""
    continues = second.continues(first) if isinstance(second, SharedSequence) else second[: len(first)] == first
    if continues:
        return len(first)
    left, right = (each._storage if isinstance(each, SharedSequence) else each for each in (first, second))
    if type(left) is not type(right):
        left, right = tuple(left), tuple(right)
    low, high = 0, min(len(first), len(second))
    while low < high:  # slices are compared without a step of Python for each item
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def shared(items: Iterable[T]) -> SharedSequence[T]:
    """Some items as a shared sequence: themselves if they are one."""
    return items if isinstance(items, SharedSequence) else SharedSequence(list(items))


def shared_ids(ids: Iterable[int]) -> SharedSequence[int]:
    """Token ids as a shared sequence, four bytes an id: themselves if they are one."""
    return ids if isinstance(ids, SharedSequence) else SharedSequence(array("I", ids))


def packed_ids(ids: Sequence[int]) -> "array[int]":
    """A copy of token ids, four bytes an id."""
    stored = ids._storage if isinstance(ids, SharedSequence) else ids
    return stored[: len(ids)] if isinstance(stored, array) else array("I", ids)
