"""Training with every condenser: three steps on the quickstart's model, and exactly the right tokens trained."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import NEVER_CUTS, OPTIONS

from condensegrpo import assemble, plugins, segments
from condensegrpo.cli.quiet import quiet_libraries
from condensegrpo.config import RunConfig, find_config, load_config
from condensegrpo.errors import ConfigError
from condensegrpo.observer import Silent
from condensegrpo.storage import RunFolder, read_credit, read_metrics, read_trajectories
from condensegrpo.train import train
from condensegrpo.trajectory import ScoredTrajectory

SMALL = (
    "warm_start.probe_target=null",
    "train.problems_per_step=2",
    "train.samples_per_problem=4",
    "train.eval_every=0",
    "train.save_every=0",
    "evaluate.problems=2",
    "evaluate.variants={}",
    "algorithm={estimator: grpo}",
    "task.options={min_ops: 4, max_ops: 6}",
    "reward={name: weighted_sum, options: {parts: [{name: correct, weight: 1}, {name: format, weight: 0.2}]}}",
)
# a condenser of the package that has more to do on so short a conversation with other options than in the suite
TRAINED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "summary": lambda template: {"template": str(template), "max_tokens": 16},
    "summary_model": lambda template: {"model": str(template.parent / "none")},  # that cannot be loaded
    "pipeline": lambda template: {
        "stages": [
            {"name": "observation_mask", "options": {"keep": 1, "drop_oldest": False}},
            {"name": "summary", "options": {"template": str(template), "max_tokens": 16}},
            {"name": "last_k", "options": {"keep_last": 2, "keep_first": 1}},
        ]
    },
}


def run(config: RunConfig) -> RunFolder:
    quiet_libraries()
    folder = RunFolder.create(Path(config.runs_dir) / config.name)
    with folder.locked():
        assert train(config, assemble.check(config), folder, observer=Silent(), stopping=lambda: False)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a short warm start."""
    runs = tmp_path_factory.mktemp("warm")
    overrides = (*SMALL, "warm_start.steps=60", "train.steps=0", f"runs_dir={runs}", "name=warm")
    return run(load_config(find_config("quickstart"), overrides)).checkpoints / "step_000000" / "model"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ask.txt"
    path.write_text("keep a note")  # words that the model knows
    return path


def config(name: str, options: dict[str, Any], model: Path, runs: Path, *more: str) -> RunConfig:
    base = load_config(
        find_config("quickstart"),
        (
            *SMALL,
            "model.new=null",
            f"model.path={model}",
            "warm_start.steps=0",
            "train.steps=3",
            "rollout.max_context_tokens=80",
            "rollout.condense=over_budget",
            "rollout.condense_share=0.75",
            f"runs_dir={runs}",
            f"name=of-{name}",
            *more,
        ),
    )
    tree = base.model_dump(mode="json")
    return RunConfig.model_validate({**tree, "condenser": {"name": name, "options": options}})


def sampled(folder: RunFolder) -> Iterator[tuple[int, list[ScoredTrajectory]]]:
    for step in folder.steps():
        yield step, list(read_trajectories(folder.trajectories(step)).trajectories)


def names() -> list[str]:
    return [point.name for point in plugins.installed("condensers")]


def options_of(name: str, template: Path) -> dict[str, Any]:
    chosen = TRAINED[name](template) if name in TRAINED else OPTIONS.get(name, [{}])[0]
    return chosen() if callable(chosen) else chosen


@pytest.mark.parametrize("name", names())
def test_three_steps_with_every_condenser_train_every_sampled_token_once(
    name: str, model: Path, template: Path, tmp_path: Path
) -> None:
    folder = run(config(name, options_of(name, template), model, tmp_path))
    lines = {int(line["step"]): line for line in read_metrics(folder.metrics) if "groups_dropped" in line}
    assert set(lines) == {1, 2, 3}
    turns = [turn for _, found in sampled(folder) for one in found for turn in one.trajectory.turns]
    rewritten = [turn for turn in turns if turn.condensation is not None]
    assert rewritten or name in NEVER_CUTS, "a run in which nothing was condensed tests nothing"
    for step, found in sampled(folder):
        assert [segments.check(one.trajectory) for one in found] == [()] * len(found)
        credit = read_credit(folder.credit(step))
        learning = [one.trajectory for one in found if any(credit[one.trajectory.id].advantages)]
        assert lines[step].get("tokens", 0) == sum(one.output_tokens for one in learning), "each exactly once"
    if name in ("summary", "pipeline"):
        wrote = [turn for turn in turns if turn.kind == "condense"]
        assert wrote
        assert sum(line.get("summaries", 0) for line in lines.values()) > 0
        assert any(line.get("weight/summaries", 0) > 0 for line in lines.values())
    if name == "summary_model":
        assert all(line["condenser/calls"] == line["condenser/refused"] for line in lines.values())
        assert all("no summary can be used" in turn.condensation.reason for turn in rewritten if turn.condensation)


def test_the_share_of_the_weight_on_summaries_can_be_set_and_is_logged(
    model: Path, template: Path, tmp_path: Path
) -> None:
    options = options_of("summary", template)
    folder = run(config("summary", options, model, tmp_path, "algorithm.summary_share=0.5", "train.steps=1"))
    (line,) = [line for line in read_metrics(folder.metrics) if "groups_dropped" in line]
    assert math.isclose(line["weight/summaries"], 0.5, rel_tol=1e-6)


def test_a_budget_that_leaves_a_summary_no_room_stops_the_run_before_anything_is_sampled(
    model: Path, template: Path, tmp_path: Path
) -> None:
    wrong = config("summary", options_of("summary", template), model, tmp_path, "rollout.max_context_tokens=30")
    with pytest.raises(ConfigError, match="checking the room of the condenser summary: behind system message and"):
        run(wrong)
    assert not list((tmp_path / "of-summary" / "trajectories").glob("*"))
