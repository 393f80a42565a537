"""What counts as fetching again: the same call once its result is out of sight."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.trajectory import Trajectory, Turn
from condensegrpo.metrics.trajectories import fetches

QUESTION = Message(role="user", content="why?")


def result(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="call_0", name="read")


def call(text: str, answer: Message | None, shown: Sequence[Message] = ()) -> Turn:
    observations = (answer,) if answer is not None else ()
    return turn([1], [2], context=(QUESTION, *shown), reply=text, observations=observations)


RED = result("red 7")


def test_a_call_whose_result_was_dropped_is_a_refetch() -> None:
    one = trajectory(call("read p1", RED), call("read p2", result("oak 3"), [RED]), call("read p1", RED))
    assert fetches(one) == (3, 1)
    assert fetches(one).rate == pytest.approx(1 / 3)


def test_a_call_whose_result_is_in_sight_is_a_mere_repetition() -> None:
    assert fetches(trajectory(call("read p1", RED), call("read p1", RED, [RED]))) == (2, 0)


def test_a_result_that_was_masked_is_out_of_sight() -> None:
    mask = result("[turn 0, tool result omitted: 5 tokens]")
    assert fetches(trajectory(call("read p1", RED), call("read p1", RED, [mask]))) == (2, 1)


def test_a_result_that_changed_meanwhile_is_a_refetch_all_the_same() -> None:
    assert fetches(trajectory(call("read p1", RED), call("read p1", result("red 7 report")))) == (2, 1)


def test_the_second_result_in_sight_is_enough() -> None:
    again = result("red 7 report")
    one = trajectory(call("read p1", RED), call("read p1", again), call("read p1", again, [again]))
    assert fetches(one) == (3, 1)


def parsed(*arguments: str) -> Turn:
    calls = tuple(ToolCall(id=f"call_{at}", name="read", arguments=text) for at, text in enumerate(arguments))
    said = turn([1], [2], context=(QUESTION,), reply="let me see", observations=[RED] * len(arguments))
    return replace(said, reply=replace(said.reply, tool_calls=calls))


def test_parsed_calls_are_compared_by_tool_and_arguments() -> None:
    assert fetches(trajectory(parsed('{"page": 1}', '{"page": 2}'), parsed('{"page": 2}'), parsed('{"page": 3}'))) == (
        4,
        1,
    )


def test_what_the_environment_says_is_no_result_of_a_call() -> None:
    said = Message(role="user", content="go on")
    assert fetches(trajectory(call("note", said), call("note", said))) == (0, 0)
    assert fetches(trajectory(call("note", None))) == (0, 0)
    assert fetches(trajectory(call("note", None))).rate == 0


@given(pages=st.lists(st.integers(0, 3), max_size=12))
@settings(max_examples=80)
def test_refetches_are_calls_made_before_and_none_where_everything_is_shown(pages: list[int]) -> None:
    every = [result(f"text {page}") for page in range(4)]

    def played(shown: Sequence[Message]) -> Trajectory:
        return trajectory(*(call(f"read {page}", every[page], shown) for page in pages))

    assert fetches(played(every)).refetches == 0
    assert fetches(played(())) == (len(pages), len(pages) - len(set(pages)))
