"""The rollout benchmark: what it plays is what it says, and its tables come out."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import rollout
import torch
from builders import turn
from command import succeed
from needs_vllm import needs_vllm
from rollout import _exponent, _ratio
from rollout_sides import Reading
from rollout_world import Size, World, chatter, engine, make_model, new_tokens, play, processed, waves
from trl_rollout import EndAt

from condensegrpo.condensers.whole_units import LastK
from condensegrpo.core.trajectory import StopReason, Trajectory

TOY = World(trajectories=3, turns=4, reply=(5, 9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "policy"
    make_model(made, Size(hidden=32, layers=1, heads=1))
    return made


def test_every_trajectory_has_all_its_turns_and_replies_of_set_lengths(folder: Path) -> None:
    found = play(engine(folder, chatter(2000), TOY), TOY)
    lengths = [[len(turn.output_ids) for turn in one.turns] for one in found]
    assert lengths == TOY.lengths()
    assert [len(one) for one in lengths] == [4, 4, 4]
    assert {length for one in lengths for length in one} <= set(range(5, 10))
    assert {one.stop for one in found} == {StopReason.ANSWERED}
    again = play(engine(folder, chatter(2000), TOY), TOY, barrier=True)
    assert [[len(turn.output_ids) for turn in one.turns] for one in again] == lengths


def test_siblings_share_a_question_and_have_log_normal_lengths_of_their_own(folder: Path) -> None:
    world = World(trajectories=4, samples=2, turns=2, reply=(8, 8), spread=0.5)
    found = play(engine(folder, chatter(2000), world), world)
    assert [[len(turn.output_ids) for turn in one.turns] for one in found] == world.lengths()
    assert [one.question for one in found] == [question for question in world.questions() for _ in range(2)]
    many = sorted(replace(world, trajectories=1000).lengths())
    assert [row[0] for row in many][500] == pytest.approx(8, abs=1)


def test_a_row_of_trls_generate_ends_at_its_length_and_not_before() -> None:
    ends, vocabulary = EndAt([2, 3], end=9, width=5), 12
    first, second, third = (
        ends(torch.zeros(2, 5 + drawn, dtype=torch.long), torch.zeros(2, vocabulary)) for drawn in range(3)
    )
    assert first[:, 9].tolist() == [-torch.inf] * 2
    assert (int(second[0].argmax()), second[1, 9].item()) == (9, -torch.inf)
    assert int(third[1].argmax()) == 9
    assert int(second[0].isfinite().sum()) == 1


def test_contexts_grow_by_reply_and_reading_and_stay_under_last_k(folder: Path) -> None:
    world = World(trajectories=1, turns=5, reply=(5, 5))
    (whole,) = play(engine(folder, chatter(2000), world), world)
    (short,) = play(engine(folder, chatter(2000), world, condenser=LastK(keep_last=1)), world)
    # <start> user 32 words <end> <start> assistant; then 5 + <end> and <start> user 40 words <end> <start> assistant
    assert [len(one.prompt_ids) for one in whole.turns] == [37 + 51 * turn for turn in range(5)]
    assert [len(one.prompt_ids) for one in short.turns] == [37, 88, 88, 88, 88]


def trajectory(*turns: tuple[list[int], list[int]]) -> Trajectory:
    made = tuple(turn(prompt, output) for prompt, output in turns)
    return Trajectory(
        id="a", problem_id="a", group_id="a", sample=0, turns=made, stop=StopReason.ANSWERED, answer="", seconds=1.0
    )


def test_tokens_are_counted_with_and_without_what_the_last_turn_left() -> None:
    grown = trajectory(([1, 2], [3]), ([1, 2, 3, 4], [5]))
    assert (processed(grown), new_tokens(grown)) == (3 + 5, 3 + 2)
    rewritten = trajectory(([1, 2], [3]), ([1, 9, 9, 9], [5]))
    assert (processed(rewritten), new_tokens(rewritten)) == (3 + 5, 3 + 4)


def test_waves_are_what_a_bare_engine_is_given() -> None:
    one = trajectory(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]))
    assert waves([one, one]) == [[((1, 2), 1)] * 2, [((1, 2, 3, 4), 2)] * 2]


def test_latencies_are_the_same_for_the_same_seed() -> None:
    world = World(trajectories=200, turns=4, reply=(1, 1), latency=2.0)
    assert world.pace("7") == world.pace("7")
    every = sorted(second for number in range(200) for second in world.pace(str(number)))
    assert every[400] == pytest.approx(2.0, rel=0.1)


def test_the_exponent_of_a_power_is_the_power() -> None:
    assert _exponent((8, 16, 32), [3 * count**1.5 for count in (8, 16, 32)]) == pytest.approx(1.5)


def test_a_ratio_is_taken_within_rounds() -> None:
    over, under = ([Reading(wall, 1.0, None) for wall in walls] for walls in ((10, 40, 12), (5, 10, 4)))
    assert _ratio(over, under, "wall") == 3  # of 2, 4 and 3


def benchmark(*arguments: str) -> str:
    return succeed("--quick", "--rounds", "1", *arguments, program=rollout.main)


def test_the_script_prints_the_tables_that_need_no_vllm() -> None:
    out = benchmark("--parts", "barrier", "turns", "--trajectories", "4", "--turns", "2")
    for wanted in ("| no barrier |", "| a barrier a turn |", "| full |", "| last_k(keep_last=2) |"):
        assert wanted in out
    assert "exponent of the tokens processed under last_k" in out


@needs_vllm
@pytest.mark.skipif("LONG_TESTS" not in os.environ, reason="starts vLLM twice for a benchmark: LONG_TESTS=1 runs it")
def test_the_script_compares_the_engine_with_bare_vllm() -> None:
    out = benchmark("--parts", "overhead", "--trajectories", "4", "--turns", "2", "--output", "4")
    assert "| engine on vLLM |" in out
    assert "| bare LLM.generate | " in out
    assert "engine against bare vLLM, CPU seconds" in out
    [engine_line] = [line for line in out.splitlines() if line.startswith("| engine on vLLM |")]
    assert float(engine_line.removesuffix("% |").rpartition("| ")[2]) > 0  # MFU
