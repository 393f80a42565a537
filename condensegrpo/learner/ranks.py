"""What ranks say to each other besides gradients. All ranks must make the same calls; one process alone may too."""

from typing import Any, TypeVar

from torch import distributed

from condensegrpo.learner.deepspeed import rank, sum_over_ranks, world_size

T = TypeVar("T")

__all__ = ["any_rank", "barrier", "from_first", "gather", "rank", "sum_over_ranks", "world_size"]


def gather(value: T) -> list[T]:
    """The values of all ranks, in their order, on every rank. They are pickled."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, value)
    return found


def from_first(value: T) -> T:
    """The value that rank 0 gave, on every rank."""
    return gather(value)[0]


def barrier() -> None:
    """Wait until every rank is here."""
    gather(None)


def any_rank(flag: bool) -> bool:
    """Whether any rank says yes."""
    return any(gather(flag))
