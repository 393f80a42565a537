"""The problems of a training step: a function of (seed, step) alone, so that the data cursor of a run *is* its step."""

import random
from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"order-{seed}-{epoch}").shuffle(order)
    return tuple(order)


def problem_indices(*, seed: int, step: int, count: int, size: int) -> tuple[int, ...]:
    """The indices of the problems of one step: ``count`` of ``size``, each once an epoch.

    Every epoch has another order. Step 0 takes the first ``count`` of the first epoch's, step 1 the next, across the
    borders of epochs.
    """
    cursor = range(step * count, (step + 1) * count)
    return tuple(_permutation(seed, position // size, size)[position % size] for position in cursor)


def spare_indices(*, seed: int, step: int, number: int, count: int, size: int, used: Sequence[int]) -> tuple[int, ...]:
    """The indices of ``count`` further problems for round ``number`` of a step, none of ``used`` as long as there are
    others. They do not move the cursor: the data comes in its own order later, whatever was drawn here.
    """
    draw = random.Random(f"spare-{seed}-{step}-{number}")
    fresh = [index for index in draw.sample(range(size), min(size, count + len(set(used)))) if index not in used]
    return tuple((fresh + draw.choices(range(size), k=max(0, count - len(fresh))))[:count])
