"""Sequences that share their storage with those that continue them."""

import asyncio
import pickle
from dataclasses import replace
from typing import Any

import pytest
from builders import scored, trajectory, turn
from talk import Counting, agent, counting, engine, problem

from condensegrpo.algorithms.credit import scores_of
from condensegrpo.algorithms.segments import segments
from condensegrpo.condensers.whole_units import Full
from condensegrpo.core.shared_sequence import SharedSequence, shared, shared_ids
from condensegrpo.episodes.episode import run_episode


def test_it_is_equal_to_a_tuple_and_gives_tuples() -> None:
    ids = shared_ids((1, 2, 3))
    assert ids == (1, 2, 3) == ids == [1, 2, 3]
    assert all(ids != other for other in ((1, 2), (1, 2, 4), {1, 2, 3}))
    assert (hash(ids), repr(ids)) == (hash((1, 2, 3)), "(1, 2, 3)")
    assert (ids[0], ids[-1], ids[1:], ids[::-1], ids[:-1]) == (1, 3, (2, 3), (3, 2, 1), (1, 2))
    assert (ids + (4,), (0,) + ids, (*ids,)) == ((1, 2, 3, 4), (0, 1, 2, 3), (1, 2, 3))  # noqa: RUF005  the operator + is what is tested
    assert shared_ids(ids) is ids
    with pytest.raises(IndexError):
        ids[3]


def test_a_longer_sequence_shares_the_storage_and_leaves_the_shorter_as_it_was() -> None:
    first = shared(["a", "b"])
    second = first.extended(["c"])
    third = second.extended(["d", "e"])
    assert [*map(tuple, (first, second, third))] == [("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d", "e")]
    assert (len(first), first[-1], first[1:], list(first)) == (2, "b", ("b",), ["a", "b"])
    assert first._storage is third._storage
    assert (third.continues(second), second.continues(third)) == (True, False)
    with pytest.raises(IndexError):
        first[2]


def test_two_continuations_of_one_sequence_do_not_see_each_other() -> None:
    first = shared_ids([1, 2])
    one, other = first.extended([3]), first.extended([4])
    assert [*map(tuple, (first, one, other))] == [(1, 2), (1, 2, 3), (1, 2, 4)]
    assert [other.continues(earlier) for earlier in (first, (1, 2), other, one, (2,))] == [True] * 3 + [False] * 2
    assert shared_ids([1, 2, 4]).continues(other)


def test_a_pickle_of_growing_prompts_holds_their_storage_once() -> None:
    prompts = [shared_ids(range(100))]
    for _ in range(99):
        prompts.append(prompts[-1].extended(range(100)))
    data = pickle.dumps(prompts)
    assert len(data) < 4 * 10_000 + 100 * 40
    read = pickle.loads(data)
    assert read == prompts
    assert read[0]._storage is read[99]._storage


class Counted(list[int]):
    """A storage that counts the items that are read in slices."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        items = super().__getitem__(key)
        self.read += len(items) if isinstance(key, slice) else 1
        return items


def test_rows_and_states_of_a_long_episode_read_each_token_a_few_times() -> None:
    storage = Counted([0])
    prompt, turns = SharedSequence(storage), []
    for token in range(200):
        turns.append(replace(turn([0], [token]), prompt_ids=prompt))
        prompt = prompt.extended([token, 9])
    one = trajectory(*turns)
    (row,) = segments(one, advantage_K=[1.0] * 200, weight_K=[1.0] * 200)
    assert row.token_ids == prompt[:-1]
    states = scores_of([scored(one, 1.0)]).state_NK
    assert states.tolist() == [list(range(200))]
    assert storage.read < 5 * len(prompt)  # read whole in every turn: 200 times half of it


def test_the_prompts_of_an_episode_share_their_ids_and_messages() -> None:
    play = run_episode(
        problem(),
        environment=Counting,
        engine=engine(agent(counting), condenser=Full(), condense_when="over_budget", max_context_tokens=1000),
        group_id="g",
        sample=0,
        seed=int,
    )
    turns = asyncio.run(play).turns
    assert len(turns) == 6
    assert len({id(each.prompt_ids._storage) for each in turns}) == 1  # type: ignore[attr-defined]  # a shared sequence, declared as a tuple
    assert len({id(each.context._storage) for each in turns}) == 1  # type: ignore[attr-defined]  # a shared sequence, declared as a tuple
