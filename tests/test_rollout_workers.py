"""Rollouts in worker processes: the same trajectories with any number of them, and named errors where one dies."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from answering import Behaviour, endpoint
from command import ROOT
from stand_in_server import TOKEN, StandIn, serving
from talk import counting, said, save_model, shown
from transformers import AutoConfig, AutoModelForCausalLM
from waiting import eventually

from condensegrpo.assembly.build import build, build_components
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.assembly.workers import GroupPlayer, RolloutPlayers, SharingPlayer
from condensegrpo.config.load import validate, vary
from condensegrpo.config.resumed import Change
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.group import problem_groups
from condensegrpo.episodes.player import OnScored
from condensegrpo.samplers.vllm_server.server import shape_of

WORLD = ROOT / "tests" / "worker_world.py"
SAMPLES, SEED, STEP = 3, 0, 7


def completions(asked: Any) -> bytes:
    """Counts to five; the reply, its number and its log-probabilities depend on prompt and seed alone."""
    text = counting(shown(asked["prompt"]))
    ids = said(text if "answer" in text else f"{text} {asked['seed'] % 100}")
    logprobs = [-1 / (1 + place + asked["seed"] % 1000) for place in range(len(ids))]
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop", "text": text}
    return json.dumps({"choices": [choice]}).encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with endpoint(Behaviour(answer=completions)) as served:
        yield served


@pytest.fixture(scope="module")
def config(model: Path, url: str) -> RunConfig:
    tree = {
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"name": f"{WORLD}:Task"},
        "condenser": {"name": f"{WORLD}:CountedLastK"},
        "reward": {"name": f"{WORLD}:Turns"},
        "sampler": {"name": "openai", "options": {"url": url, "model": "big"}},
        "rollout": {"limits": {"max_context_tokens": 400, "max_output_tokens": 40}, "workers": {"processes": 2}},
    }
    return validate(tree, source="test")


Play = Callable[..., tuple[ScoredTrajectory, ...]]


@pytest.fixture(scope="module")
def players(config: RunConfig, model: Path) -> Iterator[RolloutPlayers]:
    """The players of one sampler, whose workers are started once."""
    with closing(open_sampler(config, str(model))) as sampler, closing(RolloutPlayers(sampler, str(model))) as players:
        yield players


async def played(
    player: GroupPlayer,
    questions: Sequence[str],
    on_scored: Callable[[ScoredTrajectory], None],
    data: Mapping[str, Any],
) -> tuple[ScoredTrajectory, ...]:
    problems = [Problem(id=f"p{number}", question=each, answer="5", data=data) for number, each in enumerate(questions)]
    batch = problem_groups(problems, STEP)
    return await player.play(batch, samples=SAMPLES, run_seed=SEED, step=STEP, on_scored=on_scored)


def play(
    player: GroupPlayer,
    *questions: str,
    on_scored: OnScored = lambda _: None,
    data: Mapping[str, Any] | None = None,
) -> tuple[ScoredTrajectory, ...]:
    return timeless(asyncio.run(played(player, questions, on_scored, data or {})))


def timeless(scored: Sequence[ScoredTrajectory]) -> tuple[ScoredTrajectory, ...]:
    """Without what the clock says, and the frames of the engine in tracebacks."""
    failures = [each.trajectory.failure for each in scored]
    shown = [None if failure is None else replace(failure, traceback="") for failure in failures]
    return tuple(
        ScoredTrajectory.of(
            replace(
                each.trajectory,
                seconds=0.0,
                failure=failure,
                turns=tuple(replace(turn, tool_seconds=0.0) for turn in each.trajectory.turns),
            ),
            each.score,
        )
        for each, failure in zip(scored, shown, strict=True)
    )


def player_of(players: RolloutPlayers, config: RunConfig, *changes: str) -> GroupPlayer:
    return players.player(build_components(vary(config, changes)), temperature=1.0)


# --- the same trajectories --------------------------------------------------------------------------------------------


def test_trajectories_do_not_depend_on_the_number_of_workers(players: RolloutPlayers, config: RunConfig) -> None:
    ids: list[str] = []
    results = [
        play(
            player_of(players, config, f"rollout.workers.processes={number}"),
            *("a", "raise", "c"),
            on_scored=lambda each: ids.append(each.trajectory.id),
        )
        for number in (0, 2)
    ]
    assert all(result == results[0] for result in results)
    assert sorted(ids) == sorted([f"7/{group}/{sample}" for group in range(3) for sample in range(SAMPLES)] * 2)
    assert any(turn.condensation for turn in results[0][0].trajectory.turns)
    failed = results[0][SAMPLES].trajectory.failure
    assert failed is not None
    assert failed.location.startswith("tests/worker_world.py:")


def test_whole_groups_are_played_and_scored_in_other_processes(players: RolloutPlayers, config: RunConfig) -> None:
    scored = play(player_of(players, config, f"reward.name={WORLD}:Process"), "a", "b")
    processes = [each.score.components["process"] for each in scored]
    assert len(set(processes[:SAMPLES])) == len(set(processes[SAMPLES:])) == 1
    assert len({*processes, os.getpid()}) == 3
    scored = play(player_of(players, config, f"reward.name={WORLD}:Siblings"), "a", "b")
    assert [each.score.total for each in scored] == [3.0] * 6


def test_counts_and_seconds_of_the_condensers_are_added_up(players: RolloutPlayers, config: RunConfig) -> None:
    player = player_of(players, config)
    scored = play(player, "a", "b")
    assert player.counts() == {"calls": sum(len(each.trajectory.turns) - 1 for each in scored)}
    assert player.counts() == {}
    assert player.condensing_seconds > 0


def test_workers_sample_from_the_servers_under_the_weights_of_their_batch(
    model: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the rank raises for a trajectory, as of a full disk, ends the batch and its worker."""

    def full(_: ScoredTrajectory) -> None:
        raise RolloutError("the disk is full")

    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    shape, running = shape_of(AutoConfig.from_pretrained(model)), psutil.Process().children()
    with serving(StandIn(shape, max_model_len=9000)) as first, serving(StandIn(shape, max_model_len=9000)) as second:
        varied = vary(
            config,
            [
                f"sampler={{name: vllm_server, options: {{urls: [{first.url}, {second.url}]}}}}",
                "rollout.workers.processes=1",
            ],
        )
        build(varied)
        with (
            closing(open_sampler(varied, str(model))) as sampler,
            closing(RolloutPlayers(sampler, str(model))) as players,
        ):
            player = players.player(build_components(varied), temperature=1.0)
            before = play(player, "a", "b", "c", "d")
            sampler.update(AutoModelForCausalLM.from_pretrained(model).state_dict().items(), 4)
            after = play(player, "a", "b")
            with pytest.raises(RolloutError, match="the disk is full"):
                play(player, "a", on_scored=full)
            assert play(player) == ()  # of a rank without a problem
            assert psutil.Process().children() == running
    assert {turn.policy_version for each in before for turn in each.trajectory.turns} == {0}
    assert {turn.policy_version for each in after for turn in each.trajectory.turns} == {4}
    assert not [each.trajectory.detail for each in (*before, *after) if each.trajectory.failure]
    assert first.prompts
    assert second.prompts


# --- failures ---------------------------------------------------------------------------------------------------------


def test_what_a_worker_cannot_set_up_ends_the_batch(players: RolloutPlayers, config: RunConfig) -> None:
    player = player_of(players, config)
    assert isinstance(player, SharingPlayer)
    elsewhere = replace(player, settings=replace(player.settings, source="no/such-model"))
    with pytest.raises(ConfigError, match="loading the tokenizer of no/such-model"):
        play(elsewhere, "a")


class OfTheRank:
    """A value that can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 1, r"sending problems to a rollout worker.*rollout\.workers\.processes=0"),
        (OfTheRank(), r"reading problems in a rollout worker: ValueError: invalid literal"),
    ],
)
def test_a_problem_that_cannot_be_sent_is_an_error_that_says_what_to_do(
    players: RolloutPlayers, config: RunConfig, value: object, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        play(player_of(players, config), "a", data={"value": value})


def test_a_worker_that_dies_ends_the_batch(players: RolloutPlayers, config: RunConfig) -> None:
    player = player_of(players, config, f"reward.name={WORLD}:Process")
    killed = r"playing 1 group in a worker: process \d+ was killed by signal 9 \(Killed\).*Lower rollout.workers"
    worker = psutil.Process(int(play(player, "a")[0].score.components["process"]))
    worker.kill()  # while it is idle
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # all its threads have ended
    with pytest.raises(RolloutError, match=killed) as caught:
        play(player, "kill")
    assert f"process {worker.pid} " not in str(caught.value)


def test_workers_that_died_are_replaced_and_a_cancelled_batch_ends_them_with_the_processes_of_their_tools(
    players: RolloutPlayers, config: RunConfig, tmp_path: Path
) -> None:
    player = player_of(players, config)
    assert len(play(player, "a")) == SAMPLES

    async def interrupted() -> None:
        data = {"tools": str(tmp_path)}
        batch = asyncio.create_task(played(player, ("tool",), lambda _: None, data))
        while not list(tmp_path.iterdir()):
            await asyncio.sleep(0.05)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(interrupted())
    tools = [int(each.name) for each in tmp_path.iterdir()]
    assert eventually(lambda: not any(alive(tool) for tool in tools))


def alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("sampler={name: transformers}",), r"found processes=2, and the model of the sampler transformers is in this"),
        (
            ("condenser={name: attention, options: {scorer: MODEL}}",),
            r"found processes=2, and the condenser attention has units scored by .*, a model in this process",
        ),
    ],
)
def test_models_that_workers_cannot_reach_are_refused_before_one_is_loaded(
    config: RunConfig, model: Path, changes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"checking rollout.workers: {message}.*rollout.workers.processes=0"):
        build(vary(config, [change.replace("MODEL", str(model)) for change in changes]))


def test_a_resume_may_change_the_workers_since_they_change_nothing_that_is_learned() -> None:
    assert not Change(first_step=1, key="rollout.workers.processes", old=0, new=4).learned
    assert Change(first_step=1, key="rollout.staleness", old=0, new=1).learned
