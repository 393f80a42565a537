"""Which problems a step trains on."""

from hypothesis import given
from hypothesis import strategies as st

from condensegrpo.assembly.data_order import problem_indices


def test_one_epoch_takes_every_problem_once() -> None:
    taken = [index for step in range(5) for index in problem_indices(seed=0, step=step, count=2, size=10)]
    assert sorted(taken) == list(range(10))


def test_a_step_across_the_end_of_an_epoch_takes_the_rest_and_goes_on() -> None:
    steps = [problem_indices(seed=0, step=step, count=4, size=6) for step in range(3)]
    taken = [index for step in steps for index in step]
    assert sorted(taken[:6]) == list(range(6))
    assert sorted(taken[6:]) == list(range(6))


def test_epochs_and_seeds_are_shuffled_anew() -> None:
    first = problem_indices(seed=0, step=0, count=50, size=50)
    assert first != problem_indices(seed=0, step=1, count=50, size=50)
    assert first != problem_indices(seed=1, step=0, count=50, size=50)


@given(step=st.integers(0, 40), count=st.integers(1, 9), size=st.integers(1, 23))
def test_the_cursor_is_the_step_alone(step: int, count: int, size: int) -> None:
    whole = [
        index for number in range(step + 1) for index in problem_indices(seed=3, step=number, count=count, size=size)
    ]
    assert tuple(whole[step * count :]) == problem_indices(seed=3, step=step, count=count, size=size)
    assert all(0 <= index < size for index in whole)
