"""The order in which random_drop drops units, kept from turn to turn, is that of sorting them all."""

from condensegrpo.condensers.random_drop import _ranking
from condensegrpo.core.messages import Message, Unit

QUESTION = (Message(role="user", content="count"),)


def units(*turns: int) -> tuple[Unit, ...]:
    return tuple(Unit(turn=turn, reply=Message(role="assistant", content=f"{turn}")) for turn in turns)


def test_places_are_sorted_by_rank_whatever_was_asked_before() -> None:
    ranking = _ranking(3, QUESTION)
    for turns in (range(5), range(40), range(12), (0, 2, 3, 7, 50), (6,), ()):
        shown = units(*turns)
        ranks = [ranking._rank(turn) for turn in turns]
        by_rank = sorted(range(len(shown) - 1), key=ranks.__getitem__, reverse=True)
        assert list(ranking.indices(shown)) == [*range(len(shown))[-1:], *by_rank]


def test_another_question_or_seed_has_another_order() -> None:
    orders = {
        tuple(_ranking(seed, (Message(role="user", content=text),)).indices(units(*range(30))))
        for seed in (0, 1)
        for text in ("count", "sum")
    }
    assert len(orders) == 4
