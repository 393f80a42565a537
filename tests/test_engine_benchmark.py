"""The engine's benchmark: cells are played to their end and measured, exponents mean what they say."""

import pytest
from engine import CONDENSERS, Cell, Cost, exponent, measured


def cost(seconds: float) -> Cost:
    return Cost(seconds=seconds, bytes=0)


def test_the_exponent_is_1_where_a_turn_costs_the_same_and_2_where_it_costs_twice_as_much_in_twice_the_turns() -> None:
    turns = (8, 16, 32)
    assert exponent(turns, [cost(0.8), cost(1.6), cost(3.2)]) == pytest.approx(1)
    assert exponent(turns, [cost(1.0), cost(4.0), cost(16.0)]) == pytest.approx(2)
    assert exponent(turns, [cost(1.0), cost(4.0), None]) == pytest.approx(2)  # the last cell was over its limit
    assert exponent(turns, [cost(1.0), None, None]) is None


def test_milliseconds_per_turn_by_hand() -> None:
    assert cost(0.4).per_turn(Cell(condenser="full", turns=10, trajectories=20)) == pytest.approx(2.0)


@pytest.mark.parametrize("condenser", CONDENSERS)
def test_every_condenser_is_played_and_measured(condenser: str) -> None:
    found = measured(Cell(condenser=condenser, turns=40, trajectories=8, tools=condenser == "last_k"), limit=60.0)
    assert found is not None
    assert 0 < found.seconds < 60


def test_a_cell_over_its_limit_has_no_cost() -> None:
    assert measured(Cell(condenser="observation_mask", turns=512, trajectories=64), limit=0.0) is None
