"""Many episodes at once: nobody waits for anybody, nobody depends on anybody, and a failure stays where it is."""

import asyncio
import random
import shlex
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import END, Counting, agent, counting, engine, ignore, last_count, problem, said, shown, simulated, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from condensegrpo.algorithms import segments
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams, StopReason, Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.group import ProblemGroup, problem_groups, rollout_groups
from condensegrpo.episodes.settings import CondenseSettings
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.samplers.transformers import TransformersSampler
from condensegrpo.tasks.ledger import Ledger

Groups = tuple[tuple[Trajectory, ...], ...]


def roll(
    parts: Engine,
    problems: Sequence[Problem],
    *,
    samples: int = 2,
    environment: Callable[[Problem], Counting] = Counting,
    run_seed: int = 0,
    on_finish: Callable[[Trajectory], None] = lambda _: None,
    run_loop: Callable[[Coroutine[Any, Any, Groups]], Groups] = asyncio.run,
) -> Groups:
    async def told(one: Trajectory) -> None:
        on_finish(one)

    async def run() -> Groups:
        return await rollout_groups(
            problem_groups(problems, 7),
            samples=samples,
            environment=environment,
            engine=parts,
            run_seed=run_seed,
            step=7,
            on_finish=told,
        )

    return run_loop(run())


@dataclass
class Seeded:
    """A sampler whose reply is a function of prompt and seed, and whose pace is random."""

    pace: random.Random = field(default_factory=random.Random)
    version: int = 0

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        await asyncio.sleep(self.pace.choice((0.0, 0.0, 0.002)))
        draw = random.Random(f"{params.seed} {shown(prompt_ids)}").randrange(4)
        ids = tuple(said("answer 1" if draw == 0 else f"hello {draw}"))
        return Generation(token_ids=ids, logprobs=(-1.0,) * len(ids), finish=FinishReason.STOP)

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def content(trajectory: Trajectory) -> tuple[object, ...]:
    """All of a trajectory but how long it took and its place in the batch."""
    return trajectory.problem_id, trajectory.sample, trajectory.turns, trajectory.stop, trajectory.answer


def test_groups_come_in_problem_order_under_readable_names() -> None:
    groups = roll(engine(agent(counting)), [problem(2), problem(1)], samples=3)
    assert [[one.id for one in group] for group in groups] == [
        ["7/0/0", "7/0/1", "7/0/2"],
        ["7/1/0", "7/1/1", "7/1/2"],
    ]
    assert [{one.group_id for one in group} for group in groups] == [{"7/0"}, {"7/1"}]
    assert [{one.problem_id for one in group} for group in groups] == [{"p2"}, {"p1"}]
    assert {one.answer for group in groups for one in group} == {"5"}


def test_on_finish_sees_each_trajectory_as_it_ends() -> None:
    seen: list[str] = []
    slow_first = ScriptedSampler(lambda _: said("answer 1"), seconds=lambda ids: 0.1 if "slow" in shown(ids) else 0.0)
    problems = [problem(0, "slow"), problem(1, "fast")]
    roll(engine(slow_first), problems, samples=1, on_finish=lambda one: seen.append(one.id), run_loop=simulated)
    assert seen == ["7/1/0", "7/0/0"]


def test_a_trajectory_does_not_depend_on_its_company_or_on_the_pace() -> None:
    parts = engine(Seeded())
    problems = [problem(number) for number in range(4)]
    together = [content(one) for group in roll(parts, problems, samples=4) for one in group]
    backwards = [content(one) for group in roll(parts, problems[::-1], samples=2) for one in group]
    single = [content(one) for one in roll(parts, [problems[2]], samples=1)[0]]
    assert (len(together), len(backwards)) == (16, 8)
    assert all(one in backwards for one in single)
    assert all(one in together for one in backwards)
    siblings = roll(parts, [problems[0]], samples=8)[0]
    assert len({tuple(turn.output_ids for turn in one.turns) for one in siblings}) > 2


def test_another_run_seed_gives_other_trajectories() -> None:
    parts = engine(Seeded())
    first, second = (roll(parts, [problem()], samples=6, run_seed=seed)[0] for seed in (0, 1))
    assert [content(one) for one in first] != [content(one) for one in second]


def test_a_problem_that_comes_twice_has_two_groups_with_streams_of_their_own() -> None:
    first, second = roll(engine(Seeded()), [problem(), problem()], samples=6)
    assert ({one.group_id for one in first}, {one.group_id for one in second}) == ({"7/0"}, {"7/1"})
    assert {one.problem_id for one in (*first, *second)} == {"p0"}
    assert len({one.id for one in (*first, *second)}) == 12
    assert [one.turns for one in first] != [one.turns for one in second]


def test_two_ranks_sample_what_one_would() -> None:
    """Names are given in the whole batch: within a rank's share both occurrences of p0 would be ``p0``."""
    batch = problem_groups([problem(0), problem(1), problem(1), problem(0)], 7)
    parts = engine(Seeded())

    def sampled(share: Sequence[ProblemGroup]) -> dict[str, object]:
        groups = asyncio.run(
            rollout_groups(
                share,
                samples=3,
                environment=Counting,
                engine=parts,
                run_seed=0,
                step=7,
                on_finish=ignore,
            )
        )
        return {one.id: content(one) for group in groups for one in group}

    together = sampled(batch)
    shares = [sampled(batch[rank::2]) for rank in range(2)]
    assert len(together) == 12
    assert not shares[0].keys() & shares[1].keys()
    assert {**shares[0], **shares[1]} == together


def test_problems_that_come_again_are_numbered() -> None:
    batch = [problem(0), problem(1), problem(0, "again"), problem(0)]
    groups = problem_groups(batch, 6)
    assert [group.name for group in groups] == ["p0", "p1", "p0~2", "p0~3"]
    assert [group.id for group in groups] == ["6/0", "6/1", "6/2", "6/3"]
    assert [group.problem for group in groups] == batch
    assert problem_groups([], 6) == ()


def test_ids_need_no_quotes_in_a_shell() -> None:
    """The id of a problem may hold anything; those of groups and trajectories are numbers."""
    (group,) = roll(engine(agent(counting)), [Problem(id="train 7: $(rm) 'a'", question="count")], samples=2)
    assert [one.id for one in group] == ["7/0/0", "7/0/1"] == [shlex.quote(one.id) for one in group]


@given(st.lists(st.sampled_from(["a", "a~2", "a~3", "a~2~", "a~2~2", "b"])))
def test_names_are_unique_whatever_the_ids(ids: list[str]) -> None:
    batch = [Problem(id=one, question=str(number)) for number, one in enumerate(ids)]
    groups = problem_groups(batch, 6)
    assert [group.problem for group in groups] == batch  # in order, none lost
    assert len({group.name for group in groups}) == len(batch)


def test_what_on_finish_raises_stops_the_rollout_and_leaves_nothing_running() -> None:
    """Such as a full disk: no trajectory may be lost in silence."""

    async def full(trajectory: Trajectory) -> None:
        raise OSError("no space left")

    async def run() -> set[str]:
        fast_and_slow = ScriptedSampler(
            lambda _: said("answer 1"), seconds=lambda ids: 60.0 if "slow" in shown(ids) else 0.0
        )
        with pytest.raises(OSError, match="no space left"):
            await rollout_groups(
                problem_groups([problem(0, "fast"), problem(1, "slow")], 7),
                samples=1,
                environment=Counting,
                engine=engine(fast_and_slow, turn_seconds=60),
                run_seed=0,
                step=0,
                on_finish=full,
            )
        await asyncio.sleep(0)
        return {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]  # a task is running

    started = time.monotonic()
    assert asyncio.run(run()) == set()
    assert time.monotonic() - started < 30


def test_a_cancelled_rollout_leaves_nothing_running() -> None:
    async def run() -> int:
        slow = ScriptedSampler(lambda _: said("answer 1"), seconds=60.0)
        task = asyncio.create_task(
            rollout_groups(
                problem_groups([problem()], 7),
                samples=3,
                environment=Counting,
                engine=engine(slow, turn_seconds=60),
                run_seed=0,
                step=0,
                on_finish=ignore,
            )
        )
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(run()) == 0


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 3), min_size=0, max_size=3), samples=st.integers(1, 3))
def test_every_asked_trajectory_comes_back_exactly_once(sizes: list[int], samples: int) -> None:
    problems = [problem(number) for number in sizes]
    finished: list[str] = []
    groups = roll(engine(Seeded()), problems, samples=samples, on_finish=lambda one: finished.append(one.id))
    assert [len(group) for group in groups] == [samples] * len(problems)
    returned = [one.id for group in groups for one in group]
    assert sorted(returned) == sorted(finished)
    assert len(set(returned)) == len(problems) * samples


# --- the real sampler -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("talker")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.02,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # all hidden states share a direction, and the end of a turn lies in it: about 1 token in 12
        model.model.embed_tokens.weight += 1.0
        model.lm_head.weight[END] = 0.1
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_model_and_an_environment_give_the_same_trajectories_in_any_company(model: str) -> None:
    """An untrained model babbles bytes: half of a character, unusual splits, control tokens. All of it must hold."""
    parts = engine(
        TransformersSampler(model),
        condenser=LastK(keep_last=1),
        max_turns=5,
        max_output_tokens=40,
        max_context_tokens=200,
        turn_seconds=120,  # a model on a busy machine
    )
    problems = [problem(number) for number in range(3)]
    groups = roll(parts, problems, samples=4)
    flat = [one for group in groups for one in group]
    assert [segments.broken_invariants(one) for one in flat] == [()] * 12
    assert {one.stop for one in flat} <= {StopReason.TURN_LIMIT, StopReason.OUTPUT_LENGTH}
    assert sum(len(one.turns) == 5 for one in flat) >= 3
    again = [one for group in roll(parts, problems[::-1], samples=2) for one in group]
    by_sample = {(one.problem_id, one.sample): one.turns for one in flat}
    for one in again:
        turns = by_sample[one.problem_id, one.sample]
        assert [turn.output_ids for turn in one.turns] == [turn.output_ids for turn in turns]
    seen = [turn.condensation for one in flat for turn in one.turns[2:]]
    assert any(seen)


def test_a_perfect_agent_solves_the_ledger_with_a_context_of_one_turn() -> None:
    """The whole way: task, condenser, renderer and engine with an agent that reads only what it is shown."""
    task = Ledger(eval_problems=12)

    def reply(prompt: str) -> str:
        messages = [part.partition("\n")[2].partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>")]
        newest = messages[-2]
        notes = [int("".join(c for c in text if c.isdigit())) for text in messages if text.startswith("<note>")]
        if newest.startswith("start"):
            return f"<note> {newest.split()[1]} </note>"
        if newest == "done report":
            return f"<answer> {notes[-1]} </answer>"
        return f"<note> {(notes[-1] + int(newest)) % 10} </note>"

    async def run() -> Groups:
        return await rollout_groups(
            problem_groups(task.problems("eval"), 7),
            samples=1,
            environment=task.environment,
            engine=engine(agent(reply), condenser=LastK(keep_last=1)),
            run_seed=0,
            step=0,
            on_finish=ignore,
        )

    for (one,), posed in zip(asyncio.run(run()), task.problems("eval"), strict=True):
        assert (one.stop, one.answer) == (StopReason.ANSWERED, posed.answer)
        assert segments.broken_invariants(one) == ()
        assert len({len(turn.context) for turn in one.turns[1:]}) == 1  # however long the episode


def test_siblings_share_the_jitter_of_their_problem_and_problems_differ() -> None:
    """Siblings that condensed at different lengths would be compared on something that nobody chose."""
    parts = engine(
        agent(lambda prompt: f"hello {last_count(prompt)}"),
        condenser=LastK(keep_last=1),
        trigger=CondenseSettings(when="over_budget", threshold=0.5, jitter=0.8),
        max_turns=12,
    )
    groups = roll(parts, [problem(number) for number in range(6)], samples=3)
    firsts = [
        {next(place for place, turn in enumerate(one.turns) if turn.condensation is not None) for one in group}
        for group in groups
    ]
    assert all(len(places) == 1 for places in firsts)
    assert len({next(iter(places)) for places in firsts}) > 2
