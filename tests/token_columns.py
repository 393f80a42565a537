"""Rows of training data token by token: made from marks, and read as columns."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from condensegrpo.core.trajectory import Segment, TrainedTurn


class Columns(NamedTuple):
    """What a row has at each of its L tokens; context has zeros, and −1 for its turn."""

    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    turns: tuple[int, ...]


def columns(row: Segment) -> Columns:
    """The columns of a row."""
    of = {place: (turn, place - turn.start) for turn in row.turns for place in turn.positions}
    every = [of.get(place) for place in range(len(row.token_ids))]
    return Columns(
        trained=tuple(known is not None for known in every),
        logprobs=tuple(known[0].logprobs[known[1]] if known else 0.0 for known in every),
        advantages=tuple(known[0].advantage if known else 0.0 for known in every),
        weights=tuple(known[0].weight if known else 0.0 for known in every),
        turns=tuple(known[0].turn if known else -1 for known in every),
    )


def trained_tokens(row: Segment) -> list[int]:
    """The ids of its trained tokens, in order."""
    return [row.token_ids[place] for turn in row.turns for place in turn.positions]


def places_of(row: Segment) -> list[int]:
    """The places of its trained tokens."""
    return [place for turn in row.turns for place in turn.positions]


def runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Where runs of flags that are set begin, and how long they are."""
    for is_set, group in groupby(enumerate(flags), key=lambda entry: entry[1]):
        run = [place for place, _ in group]
        if is_set:
            yield run[0], len(run)


def marked(
    token_ids: Sequence[int],
    flags: Sequence[bool],
    *,
    advantage: float = 1.0,
    weight: float = 1.0,
    logprob: float = -1.0,
    trajectory: str = "t",
    first_turn: int = 0,
) -> Segment:
    """A row in which the flagged tokens were sampled: each run of them by a turn of its own."""
    turns = tuple(
        TrainedTurn(
            turn=first_turn + number, start=start, logprobs=(logprob,) * length, advantage=advantage, weight=weight
        )
        for number, (start, length) in enumerate(runs(flags))
    )
    return Segment(token_ids=tuple(token_ids), turns=turns, trajectory=trajectory, first_turn=first_turn)
