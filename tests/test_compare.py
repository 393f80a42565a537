"""Condensers compared: who takes part, what is counted, and the command as a user runs it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import condensation, scored, trajectory, turn
from command import run, succeed
from rich.console import Console

from condensegrpo.cli.evaluate import figures_table, parsed_budgets, parsed_condensers
from condensegrpo.config.load import validate
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.messages import Message
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.evaluation.evaluate import contender_config, contenders
from condensegrpo.evaluation.figures import (
    Contender,
    ContenderFigures,
    ContenderResult,
    comparison,
    contender_result,
    evaluation_of,
)
from condensegrpo.reporting.plots import plot_comparison
from condensegrpo.storage.trajectories import read_trajectories


def config(**sections: object) -> RunConfig:
    return validate({"model": {"new": {}}, "task": {"name": "ledger"}, **sections}, source="the test")


# --- who takes part -------------------------------------------------------------------------------------------------


def test_condensers_are_read_with_their_options() -> None:
    assert parsed_condensers("full, last_k keep_last=3 keep_first=1,my/own.py:Mine words=[a, b] deep={x: 1, y: 2}") == [
        ("full", {}),
        ("last_k", {"keep_last": 3, "keep_first": 1}),
        ("my/own.py:Mine", {"words": ["a", "b"], "deep": {"x": 1, "y": 2}}),
    ]


@pytest.mark.parametrize("text", ["", "full,", "keep_last=3", "last_k, keep_last=3"])
def test_what_is_no_list_of_condensers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 'full, last_k keep_last=3"):
        parsed_condensers(text)


def test_budgets_are_read() -> None:
    assert parsed_budgets("64, 96") == [64, 96]
    assert parsed_budgets(None) == []


@pytest.mark.parametrize("text", ["", "64,", "0", "-3", "a", "6.5"])
def test_what_is_no_list_of_budgets_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 64,96"):
        parsed_budgets(text)


def test_every_condenser_meets_every_budget_and_full_has_none() -> None:
    found = contenders([("full", {}), ("last_k", {"keep_last": 2}), ("truncate", {})], [64, 96], config())
    assert [one.name for one in found] == [
        "full",
        "last_k(keep_last=2) within 64 tokens",
        "last_k(keep_last=2) within 96 tokens",
        "truncate within 64 tokens",
        "truncate within 96 tokens",
    ]


def test_the_configurations_own_condenser_has_its_options_and_its_budget() -> None:
    own = config(
        condenser={"name": "last_k", "options": {"keep_last": 5}}, rollout={"limits": {"max_context_tokens": 77}}
    )
    assert contenders([("last_k", {})], [], own) == (
        Contender(condenser="last_k", options={"keep_last": 5}, budget=77),
    )
    assert contenders([("last_k", {"keep_last": 1})], [], own)[0].options == {"keep_last": 1}


def test_a_budget_that_shrank_in_training_is_compared_as_evaluations_have_it_and_shrinks_no_other() -> None:
    own = config(rollout={"limits": {"max_context_tokens": 80}, "condense": {"schedule": [[0, 1.0], [9, 0.5]]}})
    (its_own,), (given,) = contenders([("last_k", {})], [], own), contenders([("last_k", {})], [64], own)
    varied = [contender_config(own, each, "no model").rollout for each in (its_own, given)]
    assert [rollout.condense.budget(rollout.limits.max_context_tokens, -1) for rollout in varied] == [40, 64]
    assert [its_own.budget, given.budget] == [40, 64]


def test_a_contender_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="truncate within 64 tokens is named twice"):
        contenders([("truncate", {}), ("truncate", {})], [64], config())


# --- what is counted ------------------------------------------------------------------------------------------------


def test_figures_count_contexts_condensations_and_refetches() -> None:
    question, page = Message(role="user", content="q"), Message(role="tool", content="red 7", tool_call_id="read")
    dropped = condensation("d", [5], before=9, after=4)
    one = trajectory(
        turn([1] * 4, [2], context=(question,), reply="read p1", observations=[page]),
        turn([1] * 9, [2], context=(question, page), reply="read p2", observations=[page]),
        turn([1] * 6, [2], context=(question,), reply="read p1", observations=[page], condensation=dropped),
    )
    entry = entrant("d", [scored(one, 1.0)])
    assert entry.correct == {"p0": [1.0]}
    assert entry.figures.success == pytest.approx((1.0, 0.2065, 1.0), abs=1e-4)  # one problem
    assert entry.figures == ContenderFigures(
        contender=Contender(condenser="d", options={}, budget=64),
        success=entry.figures.success,
        calls=3,
        peak_tokens=9,
        picture_tokens=0,
        prompt_tokens=19,
        prompt_tokens_uncached=4 + 5 + 0,  # the third prompt begins the second one
        output_tokens=3,
        price=9 + 0.1 * 10 + 4 * 3,  # uncached, from the cache, sampled
        condensations=1,
        refetches=1,
        refetch_rate=1 / 3,
        seconds=20.0,
        condensing=0.05,
    )


def entrant(name: str, trajectories: Sequence[ScoredTrajectory], *, budget: int | None = 64) -> ContenderResult:
    facts = [each.figures for each in trajectories]
    return contender_result(
        Contender(condenser=name, options={}, budget=budget),
        trajectories,
        evaluation_of(name, facts, seed=3, seconds=20.0, condensing=1.0),
    )


def rated(name: str, right: dict[str, list[float]], *, budget: int | None = 64) -> ContenderResult:
    every = [
        scored(trajectory(turn([1] * 10, [2]), id=f"{problem}/{at}", group=problem), value, correct=value)
        for problem, values in right.items()
        for at, value in enumerate(values)
    ]
    return entrant(name, every, budget=budget)


def test_figures_and_paired_differences_of_equal_budgets() -> None:
    found = comparison(
        "m",
        [
            rated("full", {"a": [1, 1], "b": [1, 1]}, budget=None),
            rated("x", {"a": [1, 0], "b": [0, 0]}),
            rated("y", {"a": [1, 1], "b": [1, 0]}),
            rated("y", {"a": [0, 0], "b": [0, 0]}, budget=32),
        ],
    )
    assert (found.problems, found.samples, found.seed) == (2, 2, 3)
    assert [one.success.mean for one in found.figures] == [1.0, 0.25, 0.75, 0.0]
    assert found.figures[1].condensing == 0.05
    assert [(one.ours, one.theirs, one.budget, one.success.mean) for one in found.differences] == [
        ("x", "full", 64, -0.75),
        ("y", "full", 64, -0.25),
        ("y", "x", 64, 0.5),
        ("y", "full", 32, -1.0),
    ]


def test_a_contender_without_a_budget_is_compared_wherever_it_stands() -> None:
    full, other = rated("full", {"a": [1, 1]}, budget=None), rated("x", {"a": [1, 0]})
    found = [comparison("m", entries).differences for entries in ([full, other], [other, full])]
    assert [[(one.ours, one.theirs, one.budget, one.success.mean) for one in each] for each in found] == [
        [("x", "full", 64, -0.5)],
        [("full", "x", 64, 0.5)],
    ]


def test_a_narrow_terminal_shows_whole_names_and_no_times() -> None:
    screen = Console(width=80)
    found = comparison("m", [rated("last_k(keep_last=2)", {"a": [1, 0]})])
    with screen.capture() as capture:
        screen.print(figures_table(found, with_times=False))
    assert "last_k(keep_last=2)" in capture.get()
    assert "seconds" not in capture.get()


def test_the_picture_is_written_as_png_and_svg(tmp_path: Path) -> None:
    found = comparison("m", [rated("x", {"a": [1.0], "b": [0.0]}), rated("one problem", {"a": [1.0], "b": [1.0]})])
    png, svg = plot_comparison(found, tmp_path / "comparison")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "one problem" in svg.read_text(encoding="utf-8")
    again = plot_comparison(found, tmp_path / "again")[1]
    assert again.read_text(encoding="utf-8") == svg.read_text(encoding="utf-8")


def test_a_label_with_dollars_is_no_formula(tmp_path: Path) -> None:
    label = r"summary(prompt=from $5 to $6, no \frac)"
    found = comparison("m", [rated(label, {"a": [1.0]}), rated(r"$\frac$", {"a": [1.0]})])
    assert label in plot_comparison(found, tmp_path / "comparison")[1].read_text(encoding="utf-8")


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of no steps: a model that babbles."""
    folder = tmp_path_factory.mktemp("runs")
    succeed(
        "train", "studies/configs/memory.yaml", f"runs_dir={folder}", "warm_start.steps=0", "train.steps=0",
        "evaluate.problems=6", "task.options={pages: 6, facts: 2, asked: 1}",
    )  # fmt: skip
    return folder / "memory"


@pytest.mark.parametrize("options", [(), ("--compare", "full")])
def test_an_evaluation_that_fails_before_its_first_trajectory_leaves_no_folder(
    untrained: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    model = shutil.copytree(next(untrained.glob("checkpoints/*/model")), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"cut off")
    done = run("eval", str(model), str(untrained), "--save", str(tmp_path / "saved"), *options, cwd=tmp_path)
    assert done.returncode
    assert "damaged or cut off" in done.stderr
    assert not (tmp_path / "saved").exists()


def test_options_may_hold_lists_of_mappings() -> None:
    stages = [{"name": "observation_mask"}, {"name": "last_k", "options": {"keep_last": 2}}]
    text = "pipeline stages=[{name: observation_mask}, {name: last_k, options: {keep_last: 2}}], full"
    assert parsed_condensers(text) == [("pipeline", {"stages": stages}), ("full", {})]


def test_the_command_compares_and_writes_table_json_and_picture(untrained: Path, tmp_path: Path) -> None:
    shown = succeed(
        "eval", str(untrained), "--compare", "full, truncate, random_drop seed=1", "--budgets", "40,60",
        "--out", str(tmp_path / "out"), "--save", str(tmp_path / "saved"),
    )  # fmt: skip
    assert "6 held-out problems × 1 sample" in shown
    assert "random_drop(seed=1)" in shown
    tables, _, _ = shown.partition("\nmodel ")
    assert max(len(line.rstrip()) for line in tables.splitlines()) <= 100
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "comparison.json", "comparison.png", "comparison.svg",
    }  # fmt: skip
    written = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    budgets = [(one["contender"]["condenser"], one["contender"]["budget"]) for one in written["figures"]]
    assert budgets == [
        ("full", None), ("truncate", 40), ("truncate", 60), ("random_drop", 40), ("random_drop", 60),
    ]  # fmt: skip
    assert all(one["peak_tokens"] <= (one["contender"]["budget"] or 2048) for one in written["figures"])
    assert len(written["differences"]) == 2 * 3
    assert {file.name: len(read_trajectories(file)) for file in (tmp_path / "saved").glob("*.parquet")} == {
        "full.parquet": 6,
        "truncate_within_40_tokens.parquet": 6,
        "truncate_within_60_tokens.parquet": 6,
        "random_drop_seed=1_within_40_tokens.parquet": 6,
        "random_drop_seed=1_within_60_tokens.parquet": 6,
    }
    chosen = ("--evaluation", "truncate within 40 tokens", "--tokens", "--json")
    view = json.loads(succeed("inspect-trajectory", str(tmp_path / "saved"), *chosen))
    assert (view["provenance"]["condenser"], view["budget"], view["step"]) == ("truncate", 40, 0)
    assert view["turns"][0]["tokens"][0]["text"]
    assert written["step"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budgets", "40"], "without --compare"),
        (["--compare", "trunkate"], "Did you mean 'truncate'"),
        (["--compare", "truncate", "--budgets", "6"], "rollout.limits.max_context_tokens"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_sampled(
    untrained: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = run("eval", str(untrained), *arguments, *(["--out", str(tmp_path)] if "--compare" in arguments else []))
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
