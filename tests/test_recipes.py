"""The shipped recipes: each loads with its published figures, and trains a step on a tiny model with small data."""

import asyncio
import re
from pathlib import Path

import pytest
import train_recipes
from command import ROOT, succeed
from recipe_world import recipe_overrides
from talk import said, tokenizer
from transformers import AutoTokenizer

from condensegrpo.assembly.build import build, build_components
from condensegrpo.assembly.learning_signal import advantage_estimator, objective
from condensegrpo.assembly.runtime import trajectory_engine
from condensegrpo.config.load import find_config, load_config, shipped
from condensegrpo.core.trajectory import StopReason, Turn
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.run_folder import read_metrics
from condensegrpo.storage.trajectories import read_trajectories

RECIPES = (
    "mt_grpo_gsm8k_code",
    *(f"condensed_{domain}" for domain in ("general", "math", "coding")),
    *(f"search_{estimator}" for estimator in ("ms_grpo", "mt_grpo", "ms_po", "grpo", "grpo_merged")),
    *(f"search_mt_grpo_qwen3_{size}" for size in ("0.6b", "1.7b", "4b")),
    *(f"tool_use_{task}_lora" for task in ("gsm8k", "mbpp")),
)
SIZES = ("search_mt_grpo_qwen3_1.7b", "search_mt_grpo_qwen3_4b")  # differ from 0.6b in the model alone: not trained
# differ from search_mt_grpo in the estimator alone: not trained, as test_algorithms.py trains with every estimator
ESTIMATORS = tuple(f"search_{estimator}" for estimator in ("ms_grpo", "ms_po", "grpo", "grpo_merged"))
# data and match of the one, and the task of the other, are those of other recipes: not trained
TASKS = ("condensed_general", "tool_use_mbpp_lora")
TRAINED = tuple(name for name in RECIPES if name not in (*SIZES, *ESTIMATORS, *TASKS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every recipe of ``TRAINED`` has been trained."""
    folder = tmp_path_factory.mktemp("recipes")
    succeed(str(folder), *TRAINED, program=train_recipes.main)
    return folder


def test_every_recipe_is_shipped() -> None:
    assert set(RECIPES) <= set(shipped())


def test_the_page_of_recipes_names_every_configuration() -> None:
    page = (ROOT / "docs/how-to/recipes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w[\w.]*)`", page)) | {f"search_mt_grpo_qwen3{size}" for size in ("_1.7b", "_4b")}
    assert set(RECIPES) <= named


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_and_its_learning_signal_can_be_built(name: str) -> None:
    config = load_config(find_config(name))
    assert config.name == name
    advantage_estimator(config)
    objective(config.algorithm)


@pytest.mark.parametrize("name", SIZES)
def test_recipes_of_other_sizes_differ_in_the_model_alone(name: str) -> None:
    small, other = (load_config(find_config(recipe)) for recipe in ("search_mt_grpo_qwen3_0.6b", name))
    assert other.model.path != small.model.path
    model = small.model.model_copy(update={"path": other.model.path})
    assert other == small.model_copy(update={"name": name, "model": model})


@pytest.mark.parametrize("name", ESTIMATORS)
def test_recipes_of_other_estimators_differ_in_the_estimator_alone(name: str) -> None:
    one, other = (load_config(find_config(recipe)) for recipe in ("search_mt_grpo", name))
    algorithm = one.algorithm.model_copy(update={"advantage": other.algorithm.advantage})
    assert other.algorithm.advantage.estimator == name.removeprefix("search_")
    assert other == one.model_copy(update={"name": name, "algorithm": algorithm})


@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_trains(trained: Path, name: str) -> None:
    error = trained / f"{name}.error"
    assert not error.exists(), error.read_text()
    lines = [line for line in read_metrics(trained / "runs" / name / "metrics.jsonl") if "rows" in line]
    assert [line["step"] for line in lines] == [1]
    assert {"train/turn_reward", "train/num_valid_actions", "train/accuracy"} <= lines[0].keys()
    assert lines[0]["train/accuracy"] == lines[0]["success"]


def turns_of(trained: Path, name: str) -> list[Turn]:
    """The turns of a run."""
    read = read_trajectories(trained / f"runs/{name}/trajectories/step_000001.parquet")
    return [turn for scored in read for turn in scored.trajectory.turns]


@pytest.mark.parametrize("name", ["mt_grpo_gsm8k_code", "search_mt_grpo", "tool_use_gsm8k_lora"])
def test_the_formats_of_the_recipes_reach_their_tools(trained: Path, name: str) -> None:
    assert any(turn.tool_attempts for turn in turns_of(trained, name))


@pytest.mark.parametrize("name", ["mt_grpo_gsm8k_code", "search_mt_grpo", "search_mt_grpo_qwen3_0.6b"])
def test_an_answer_ends_its_reply_without_the_end_of_the_turn(trained: Path, name: str) -> None:
    end = AutoTokenizer.from_pretrained(trained / "model").eos_token_id
    answers = [turn for turn in turns_of(trained, name) if "</answer>" in turn.reply.content]
    assert answers
    assert all(turn.reply.content.endswith("</answer>") and turn.output_ids[-1] != end for turn in answers)


def test_the_kl_terms_of_a_trained_recipe_are_logged(trained: Path) -> None:
    lines = {
        name: [line for line in read_metrics(trained / f"runs/{name}/metrics.jsonl") if "rows" in line]
        for name in ("tool_use_gsm8k_lora", "search_mt_grpo_qwen3_0.6b", "search_mt_grpo")
    }
    assert lines["tool_use_gsm8k_lora"][0]["kl_loss"] == 0  # adapters of 0
    r3 = lines["search_mt_grpo_qwen3_0.6b"][0]  # k3 with the weights of the losses, token_mean: 0.01 times kl
    assert r3["kl"] > 0
    assert r3["kl_loss"] == pytest.approx(0.01 * r3["kl"], rel=1e-4)
    assert all("kl_loss" not in line for line in lines["search_mt_grpo"])


def test_the_original_names_of_the_multi_turn_metrics_are_what_they_say(trained: Path) -> None:
    lines = [line for line in read_metrics(trained / "runs/search_mt_grpo/metrics.jsonl") if "rows" in line]
    assert any(line["train/num_valid_actions"] > 0 and line["train/turn_reward"] > 0 for line in lines)


def test_the_loss_of_tool_use_is_the_sum_over_a_trajectory_and_not_its_mean() -> None:
    algorithm = load_config(find_config("tool_use_gsm8k_lora")).algorithm
    assert (algorithm.aggregation.mode, algorithm.aggregation.max_tokens) == ("trajectory_constant", 1)


def test_the_kl_terms_are_those_of_the_published_systems() -> None:
    """R3 adds β·k3 to the loss of every token; R4 the mean of k1 over a trajectory's tokens; the others have none."""
    found = {}
    for name in shipped():
        algorithm = load_config(find_config(name)).algorithm
        if algorithm.kl.coefficient:
            found[name] = (algorithm.kl.coefficient, algorithm.kl.estimator, algorithm.kl.aggregation)
            assert algorithm.aggregation.mode == (
                "token_mean" if algorithm.kl.aggregation is None else "trajectory_constant"
            )
    assert found == {
        **{f"search_mt_grpo_qwen3_{size}": (0.01, "k3", None) for size in ("0.6b", "1.7b", "4b")},
        **{f"tool_use_{task}_lora": (0.1, "k1", "trajectory_mean") for task in ("gsm8k", "mbpp")},
    }


def test_the_warm_up_of_the_aws_sample_is_a_tenth_of_its_optimiser_steps() -> None:
    config = load_config(find_config("search_mt_grpo_qwen3_0.6b"))
    assert config.learner.optimiser.warmup_steps == 0.1 * config.train.steps * config.algorithm.updates_per_batch


def test_search_takes_sixteen_questions_of_twenty_one_samples_an_update() -> None:
    config = load_config(find_config("search_mt_grpo"))
    assert config.train.problems_per_step * config.train.samples_per_problem == 84 * 4
    assert config.algorithm.updates_per_batch == 2


def test_a_second_call_ends_a_trajectory_of_the_search_recipe_unexecuted(tmp_path: Path) -> None:
    overrides = [each for each in recipe_overrides("search_grpo", tmp_path) if not each.startswith("rollout.limits.")]
    config = load_config(find_config("search_grpo"), [*overrides, "rollout.limits.max_turns=3"])
    parts = build_components(config)
    call = said('<tool>{"name": "search", "args": {"query": "Paris"}}</tool>')
    episode = run_episode(
        parts.problems("train")[0],
        environment=parts.task.environment,
        engine=trajectory_engine(
            parts, renderer=Renderer(tokenizer()), sampler=ScriptedSampler([call, call, call]), temperature=1.0
        ),
        group_id="g",
        sample=0,
        seed=lambda number: number,
    )
    trajectory = asyncio.run(episode)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.TURN_LIMIT, 2)
    assert "rollout.tools.max_turns" in trajectory.detail
    assert "Paris is the capital" in trajectory.turns[0].observations[0].content
    assert trajectory.turns[1].observations == ()


CALL, ANSWER = said('<tool_call>{"name": "calculator", "arguments": {"expression": "70+2"}}</tool_call>'), said("72")


@pytest.mark.parametrize(
    ("replies", "stop", "turns"),
    [
        (
            [*[CALL] * 5, ANSWER, *[CALL] * 5, ANSWER],
            StopReason.ANSWERED,
            12,
        ),  # five tool rounds for each of two queries
        ([ANSWER, *[CALL] * 5, ANSWER], StopReason.ANSWERED, 7),
        ([*[CALL] * 6, ANSWER, ANSWER], StopReason.TURN_LIMIT, 6),
        (
            [CALL, ANSWER, *[CALL] * 6, ANSWER],
            StopReason.TURN_LIMIT,
            8,
        ),  # what the first query left over does not count
    ],
)
def test_tool_use_allows_five_tool_rounds_for_every_query(
    tmp_path: Path, replies: list[list[int]], stop: StopReason, turns: int
) -> None:
    name = "tool_use_gsm8k_lora"
    overrides = [each for each in recipe_overrides(name, tmp_path) if not each.startswith("rollout.limits.")]
    parts = build_components(load_config(find_config(name), overrides))
    (two_queries,) = [each for each in parts.problems("train") if each.data.get("follow_ups")]
    episode = run_episode(
        two_queries,
        environment=parts.task.environment,
        engine=trajectory_engine(
            parts, renderer=Renderer(tokenizer()), sampler=ScriptedSampler(replies), temperature=1.0
        ),
        group_id="g",
        sample=0,
        seed=lambda number: number,
    )
    trajectory = asyncio.run(episode)
    assert (trajectory.stop, len(trajectory.turns)) == (stop, turns)
    assert ("rollout.tools.max_turns_per_query" in trajectory.detail) == (stop is StopReason.TURN_LIMIT)


def test_a_recipe_without_its_data_says_what_is_missing(tmp_path: Path) -> None:
    config = load_config(find_config("search_mt_grpo"), [f"task.data={tmp_path}/none.parquet"])
    with pytest.raises(Exception, match="there is no such file"):
        build(config)
