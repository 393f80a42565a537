"""The task ``textworld`` with games that textworld makes: what is shown, what ends a game, what stays of one."""

import asyncio
import gc
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from command import ROOT, succeed
from talk import agent, engine, play_one

from condensegrpo.assembly.build import build
from condensegrpo.assembly.demonstrations import DemonstratedTurn, demonstrations
from condensegrpo.assembly.preflight import made_tokenizer
from condensegrpo.assembly.runtime import renderer_with
from condensegrpo.config.load import load_config
from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import ConfigError, DataMissing
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.integrations.textworld import ANSWERS, Game, TextWorld, walkthrough
from condensegrpo.storage.run_folder import read_metrics

pytestmark = [  # nothing is imported while tests are collected, in every process
    pytest.mark.skipif(
        find_spec("textworld") is None, reason="textworld is not installed: pip install 'condensegrpo[textworld]'"
    ),
    pytest.mark.filterwarnings("ignore:Game .* is not fully supported"),  # as textworld does when imported
]
PAGE = (ROOT / "docs" / "how-to" / "connect-textworld.md").read_text(encoding="utf-8")
SMALL = {"recipe": 1, "take": 1, "go": 1, "cook": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the games, which take seconds to make."""
    return tmp_path_factory.mktemp("games")


@pytest.fixture(scope="module")
def task(folder: Path) -> TextWorld:
    made = TextWorld(arguments=SMALL, train_games=1, eval_games=1, folder=str(folder))
    assert len(made.problems("train")) == 1
    return made


def commands(problem: Problem) -> Sequence[str]:
    return walkthrough(Path(problem.data["file"]))


def wins(problem: Problem) -> Callable[[str], str]:
    """A policy that knows what wins a game."""
    told = commands(problem)
    return lambda prompt: f"<action>{told[prompt.count('<|im_start|>assistant') - 1]}</action>"


async def play(
    task: TextWorld, problem: Problem, reply: Callable[[str], str], sample: int = 0, **limits: Any
) -> Trajectory:
    parts = engine(agent(reply), **{"max_turns": 30, "max_context_tokens": 40_000, "max_output_tokens": 400, **limits})
    return await play_one(parts, problem, task.environment, sample=sample)


async def walk(task: TextWorld, problem: Problem) -> tuple[tuple[str, ...], float | None]:
    """What is shown and the outcome, when a game is played without a policy."""
    episode = task.environment(problem)
    shown = [(await episode.start())[-1].text]
    for command in commands(problem):
        step = await episode.step(Message(role="assistant", content=f"<action>{command}</action>"))
        shown.append(step.observations[0].text)
    await episode.close()
    assert step.done
    return tuple(shown), step.outcome


def open_files() -> set[str]:
    """What the descriptors of this process stand for; what earlier tests left to the garbage collector is closed."""
    gc.collect()
    return {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


def texts(trajectory: Trajectory) -> list[str]:
    """The first observation and all others that were shown."""
    observed = [turn.observations[0].text for turn in trajectory.turns if turn.observations]
    return [trajectory.turns[0].context[-1].text, *observed]


def test_the_walkthrough_wins_and_every_episode_of_a_game_is_the_same(task: TextWorld) -> None:
    problems = [*task.problems("train"), *task.problems("eval")]
    before = open_files()

    async def episodes(count: int) -> list[tuple[tuple[str, ...], float | None]]:
        return await asyncio.gather(*(walk(task, problems[number % 2]) for number in range(count)))

    played = asyncio.run(episodes(4))
    assert len(set(played)) == 2  # every episode of a game is the same
    assert {outcome for _, outcome in played} == {1.0}
    shown = played[0][0]
    opening = shown[0].splitlines()
    assert opening[0].startswith("You are hungry! Let's cook a delicious meal.")
    assert opening[1] == "-= Kitchen =-"
    assert not any("$" in line or "-= Kitchen =-0/" in line for text in shown for line in text.splitlines())
    assert any("Directions:" in text for text in shown)
    assert "Your score has just gone up by one point." in shown[-1]
    for thread in [thread for thread in threading.enumerate() if thread.name == "environment"]:
        thread.join(10)
        assert not thread.is_alive()
    assert open_files() - before == set()


def test_what_a_game_does_not_understand_it_answers_and_no_command_writes_a_file(
    task: TextWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = ("dance", "", "save", "Z. Save", "script", "quit", "tw-print", "look\n" + "é" * 100, "take moon")
    (problem,) = task.problems("train")
    trajectory = asyncio.run(
        play(
            task,
            problem,
            lambda prompt: f"<action>{said[prompt.count('<|im_start|>assistant') - 1]}</action>",
            max_turns=9,
        )
    )
    answers = texts(trajectory)[1:]
    assert answers[0] == answers[2] == answers[3] == answers[4] == answers[5] == answers[6] == ANSWERS[0]
    assert (answers[1], answers[8]) == (ANSWERS[2], ANSWERS[1])
    assert (trajectory.stop, trajectory.outcome) == (StopReason.TURN_LIMIT, None)
    assert not list(tmp_path.iterdir())


def test_a_game_ends_after_its_commands_with_the_points_that_were_made(task: TextWorld) -> None:
    (problem,) = task.problems("train")
    short = replace(task, max_commands=len(commands(problem)) - 1, admissible=True, system="")
    trajectory = asyncio.run(play(short, problem, wins(problem)))
    assert trajectory.stop is StopReason.FINISHED
    assert trajectory.outcome == 3 / 4  # all but the point for eating
    last = texts(trajectory)[-1].partition("\nCommands:\n")[2].splitlines()
    assert "eat meal" in last
    assert [message.role for message in trajectory.turns[0].context] == ["user"]
    won = asyncio.run(play(replace(short, outcome="won"), problem, wins(problem)))
    assert won.outcome == 0.0


@pytest.mark.parametrize("won", [False, True])
def test_a_game_without_points_pays_whether_it_is_won(won: bool) -> None:
    game = Game("hall.z8", TextWorld())
    game._state = SimpleNamespace(score=0, max_score=0, won=won, lost=False)
    assert game.worth == float(won)


def test_games_are_made_once_and_no_game_is_in_both_splits(task: TextWorld, folder: Path) -> None:
    files = {split: {problem.data["file"] for problem in task.problems(split)} for split in ("train", "eval")}  # type: ignore[arg-type]  # a loop has str, not Split
    times = [Path(file).stat().st_mtime_ns for file in files["train"]]
    again = replace(task).problems("train")
    assert [Path(problem.data["file"]).stat().st_mtime_ns for problem in again] == times
    assert not files["train"] & files["eval"]
    given = replace(task, data=f"{folder}/**/1*.z8", eval_data=f"{folder}/**/0.z8")
    assert {problem.data["file"] for problem in given.problems("train")} >= files["train"]
    with pytest.raises(ConfigError, match=r"fits task.data and task.eval_data. Give disjoint"):
        replace(task, data=f"{folder}/**/*.z8", eval_data=f"{folder}/**/0.z8").problems("train")
    with pytest.raises(DataMissing, match=r"found no .*nowhere/\*.json. Wanted a pattern of .z8 files"):
        replace(task, data=f"{folder}/nowhere/*.z8", eval_data=f"{folder}/**/0.z8").problems("train")
    with pytest.raises(ConfigError, match=r"wanted both of task\.data and task\.eval_data"):
        replace(task, data="games/*.z8")


def test_arguments_that_tw_make_refuses_are_named_and_leave_nothing(tmp_path: Path) -> None:
    refused = TextWorld(arguments={"recipe": 1, "spice": 2}, train_games=1, folder=str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"tw-make tw-cooking --recipe 1 --spice 2: .*unrecognized arguments: --spice 2"
    ):
        refused.problems("train")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


def test_the_examples_of_the_page_make_a_task_and_count_the_games_that_are_won(
    task: TextWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```yaml\n(# cooking\.yaml.*?)```", PAGE, re.DOTALL)
    assert isinstance(build_plugin("tasks", "textworld", yaml.safe_load(block)["task"]["options"]), TextWorld)
    (block,) = re.findall(r"```python\n(# won\.py.*?)```", PAGE, re.DOTALL)
    given = f"arguments={SMALL}, train_games=1, eval_games=1, folder={task.folder!r}"
    exec(block.replace('TextWorld(outcome="won"', f'TextWorld(outcome="won", {given}'), {})
    assert capsys.readouterr().out == "1 of 1 train games are won\n1 of 1 eval games are won\n"


def overrides(task: TextWorld) -> list[str]:
    arguments = json.dumps(SMALL)
    return [f"task.options={{folder: {task.folder}, arguments: {arguments}, train_games: 1, eval_games: 1}}"]


def demonstrated(task: TextWorld, *changes: str) -> Iterator[DemonstratedTurn]:
    config = load_config(ROOT / "configs" / "textworld_cooking.yaml", [*overrides(task), *changes])
    components = build(config)
    assert config.model.new is not None
    renderer = renderer_with(components, made_tokenizer(components.task, config.model.new), stop_ids=())
    for turn in demonstrations(components, renderer, "the model of the warm start").turns(0):
        assert list(turn.prompt_ids) == list(renderer.prompt(turn.shown.context))
        assert turn.reply_ids == renderer.reply_ids(turn.shown.reply)
        yield turn


def action(text: str) -> str:
    return f"<action> {text} </action>"  # as a tokenizer of words writes it


def test_a_warm_start_under_last_k_shows_the_newest_units_and_nothing_else(task: TextWorld) -> None:
    (problem,) = task.problems("train")
    told = list(map(action, commands(problem)))
    turns = list(islice(demonstrated(task, "condenser={name: last_k, options: {keep_last: 1}}"), len(told)))
    assert sorted(turn.shown.reply for turn in turns) == sorted(told)
    for turn in turns:
        *before, _ = [*turn.shown.context, None]
        replies = [message.text for message in before if message is not None and message.role == "assistant"]
        assert replies == told[: told.index(turn.shown.reply)][-1:] or told.count(turn.shown.reply) > 1
        assert turn.shown.problem == problem


def test_a_warm_start_under_summary_shows_the_requests_and_what_the_expert_wrote(
    task: TextWorld, tmp_path: Path
) -> None:
    template = tmp_path / "note.txt"
    template.write_text("look")
    options = f"{{keep_last: 1, max_tokens: 80, template: {template}}}"
    limits = (
        *("rollout.limits.max_context_tokens=400", "rollout.limits.max_output_tokens=80"),
        "rollout.condense={when: over_budget, threshold: 0.6}",  # so that a request has room for the whole history
    )
    turns = list(islice(demonstrated(task, f"condenser={{name: summary, options: {options}}}", *limits), 60))
    written = {turn.shown.reply for turn in turns if turn.shown.context[-1].text.endswith("\n\nlook")}
    assert any("examine cookbook Ingredients:" in text for text in written)
    shown = {message.text for turn in turns for message in turn.shown.context if message.role == "assistant"}
    assert written & shown  # as the reply of the unit that stands for those that were summarised
    assert max(len(turn.prompt_ids) for turn in turns) <= 400


def test_an_expert_without_room_is_named(task: TextWorld) -> None:
    with pytest.raises(ConfigError, match=r"task TextWorld: 1 of 1 problems ended .* as turn_limit: no answer in 2"):
        next(demonstrated(task, "rollout.limits.max_turns=2"))
    with pytest.raises(ConfigError, match=r"as output_length: a reply was cut off at 2 tokens"):
        next(demonstrated(task, "rollout.limits.max_output_tokens=2"))


def test_a_new_model_with_the_words_of_the_games_warms_up_and_trains(task: TextWorld, tmp_path: Path) -> None:
    succeed(
        *("train", "textworld_cooking", f"runs_dir={tmp_path}", *overrides(task), "warm_start.steps=4"),
        *("warm_start.turns_per_step=8", "warm_start.probe_target=1", "warm_start.max_rounds=1", "train.steps=2"),
        *("train.problems_per_step=1", "train.samples_per_problem=2", "rollout.limits.max_turns=12"),
    )
    assert "single turns are sound" in (tmp_path / "textworld_cooking" / "log.txt").read_text()
    assert read_metrics(tmp_path / "textworld_cooking" / "metrics.jsonl")[-1]["step"] == 2
