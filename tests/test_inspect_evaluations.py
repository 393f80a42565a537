"""Evaluations in the inspector: what the policy was, under what budget, and that nothing is learned from them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import ledger_episode, scored, write_tokenizer
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.core.errors import RunError
from condensegrpo.inspection.batches import choose, credit_file, run_of
from condensegrpo.inspection.index import Index
from condensegrpo.storage.run_folder import RunFolder, evaluation_file
from condensegrpo.storage.trajectories import Provenance, write_trajectories

SAMPLED_WITH = Provenance(
    evaluation="held-out",
    step=60,
    model="runs/demo/checkpoints/step_000060/model",
    condenser="last_k",
    max_context_tokens=64,
    temperature=0.0,
    seed=3,
)


def inspect(*arguments: object) -> str:
    done = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["inspect-trajectory", *map(str, arguments)])
    if isinstance(done.exception, RunError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def write(file: Path, known: Provenance, *, problems: int = 2) -> None:
    """Two samples of each problem, all of them wrong, so that all scores are equal."""
    file.parent.mkdir(parents=True, exist_ok=True)
    some = []
    for problem in range(problems):
        for sample in range(2):
            group = f"{known.step}/{problem}"
            one = ledger_episode(
                ["<note> 3 </note>", "<answer> 3 </answer>"], ["done report"],
                keep_last=1, id=f"{group}/{sample}", group=group, answer="3", sample=sample,
            )  # fmt: skip
            one = replace(one, turns=tuple(replace(turn, policy_version=known.step or 0) for turn in one.turns))
            some.append(scored(one, 0.0, correct=0.0))
    write_trajectories(file, some, known)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What ``eval --save`` leaves, of two contenders."""
    write(tmp_path / "saved" / "held-out.parquet", SAMPLED_WITH)
    write(tmp_path / "saved" / evaluation_file("K=20 (long)"), replace(SAMPLED_WITH, evaluation="K=20 (long)"))
    write_tokenizer(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_evaluation_knows_policy_step_budget_and_tokens(saved: Path) -> None:
    lines = [line.strip() for line in inspect(saved, "--tokens", "--turn", 1).splitlines()]
    assert lines[0].startswith("evaluation held-out after 60 steps of training · 4 trajectories")
    (sampled_with,) = [line for line in lines if line.startswith("model runs/demo/checkpoints/step_000060/model · ")]
    assert sampled_with.endswith("condenser last_k · contexts of at most 64 tokens · greedy · seed 3")
    assert any("context of 64 tokens" in line for line in lines)
    assert any(line.endswith("policy after 60 steps") for line in lines)
    assert any(line.split() == ["<answer>", "3", "</answer>", "<end>"] for line in lines)


def test_the_command_of_a_page_shows_what_the_page_shows(saved: Path, tmp_path: Path) -> None:
    """It had a step, which a folder of evaluations does not know."""
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("name: run\n")
    write(run.evaluation(60, "held-out"), SAMPLED_WITH)
    for folder, file in ((saved, saved / "held-out.parquet"), (run.path, run.evaluation(60, "held-out"))):
        index = Index(folder)
        _, _, path, *options = index.batch(file).command(folder)
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert choose(Path(path), int(given["--step"]) if "--step" in given else None, given["--evaluation"]) == file
    assert "--step" in options


def test_the_credit_of_a_run_is_found_where_its_trajectories_are_a_link(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.trajectory_folder.rename(tmp_path / "moved")
    run.trajectory_folder.symlink_to(tmp_path / "moved")
    run.trajectories(1).touch()
    assert credit_file(run.trajectories(1)) == run.credit(1)
    (tmp_path / "t.parquet").symlink_to(run.trajectories(1))  # a link to a file is that file
    assert run_of(tmp_path / "t.parquet") is None


def test_a_folder_of_a_study_names_its_runs(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a-seed0").config.write_text("name: a-seed0\n")
    with pytest.raises(RunError, match="a-seed0"):
        inspect(tmp_path)


def test_nothing_is_said_of_learning_where_nothing_is_learned(saved: Path) -> None:
    text = inspect(saved)
    assert not [wrong for wrong in ("learned", "signal", "advantage", "trained ") if wrong in text]


def test_an_evaluation_of_several_is_named(saved: Path) -> None:
    assert "beside it: K=20_long (--evaluation NAME)" in inspect(saved)
    for name in ("K=20 (long)", "K=20_long"):
        assert "evaluation K=20 (long) after 60 steps" in inspect(saved, "--evaluation", name)
    with pytest.raises(RunError, match=r"there is no evaluation K=3\. There are: K=20_long, held-out\."):
        inspect(saved, "--evaluation", "K=3")
    assert list(json.loads(inspect(saved, "--check", "--json"))["breaches"].values()) == [[], []]


def test_a_policy_whose_steps_are_not_known_has_none(tmp_path: Path) -> None:
    write(tmp_path / "held-out.parquet", replace(SAMPLED_WITH, step=None, model="Qwen/Qwen2.5-0.5B-Instruct"))
    text = inspect(tmp_path / "held-out.parquet")
    assert "evaluation held-out · 4 trajectories" in text
    assert "policy after" not in text


def test_the_evaluations_of_a_run_are_beside_its_steps(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("model: {new: {}}\ntask: {name: ledger}\n")
    run.metrics.write_text('{"step": 0}\n')
    training = replace(SAMPLED_WITH, evaluation=None, max_context_tokens=48)
    for step in (1, 2):
        write(run.trajectories(step), replace(training, step=step))
    for step in (0, 2):
        write(run.evaluation(step, "held-out"), replace(SAMPLED_WITH, step=step))
    assert "step 2 · 4 trajectories" in inspect(run.path)
    assert "context of 48 tokens" in inspect(run.path)  # of the step: the run's configuration may have changed since
    assert "evaluation held-out after 2 steps" in inspect(run.path, "--evaluation", "held-out")
    assert "evaluation held-out after 0 steps" in inspect(run.path, "--evaluation", "held-out", "--step", 0)
    with pytest.raises(
        RunError, match=r"no evaluation held-out after step 1\. There are: held-out; after steps 0, 2\."
    ):
        inspect(run.path, "--evaluation", "held-out", "--step", 1)
    assert len(json.loads(inspect(run.path, "--check", "--json"))["breaches"]) == 4
    run.truncate_after(1)
    assert [file.parent.name for file in run.path.glob("evaluations/*/*")] == ["step_000000"]
    run.trajectories(1).unlink()
    assert "evaluation held-out after 0 steps" in inspect(run.path)  # there is nothing else


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--trajectory", "1/1/0"], "1/1/0"),  # the step of the id is opened
        (["--trajectory", "1/0"], "2/1/0"),  # problem and sample, of the last step
        (["--trajectory", "3"], "2/1/1"),
        (["--trajectory", "#3"], "2/1/1"),
        (["--group", "1/1"], "1/1/0"),
        (["--group", "1"], "2/1/0"),
        (["--group", "1", "--trajectory", "1/1"], "2/1/1"),
    ],
)
def test_short_ids_name_trajectories(tmp_path: Path, arguments: list[str], shown: str) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("model: {new: {}}\ntask: {name: ledger}\n")
    for step in (1, 2):
        write(run.trajectories(step), replace(SAMPLED_WITH, evaluation=None, step=step))
    assert json.loads(inspect(run.path, *arguments, "--json"))["trajectory"]["id"] == shown
