"""Paths that are relative to another folder: of a YAML file, and of a run that was started elsewhere."""

import json
import shutil
from pathlib import Path

import pytest

from condensegrpo.config.load import load_config
from condensegrpo.config.resumed import Change, allowed_changes, named_as, recorded_changes, store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, DataMissing, ModelMissing, PluginError
from condensegrpo.core.plugins import load_plugin
from condensegrpo.inspection.page import typed_path
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.reporting.model_card import write_card
from condensegrpo.storage.environment import write_environment
from condensegrpo.storage.rows import read_rows
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.checkpoints import rollout_settings

CONFIG = """
name: run
model: {new: {}}
task: {name: ledger, data: rows.jsonl}
reward: {name: "my/reward.py:Mine"}
evaluate: {variants: {other: ["reward.name=my/reward.py:Mine"]}}
"""
MINE = "class Mine:\n    def __call__(self, trajectory, problem):\n        return {'mine': 1.0}\n"


def names_of(config: RunConfig) -> set[str]:
    return {config.reward.name, config.evaluate.variants["other"][0].partition("=")[2]}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration, a reward, data and a run that was started in this folder; the working directory is beside it."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "my").mkdir(parents=True)
    elsewhere.mkdir()
    (project / "my/reward.py").write_text(MINE)
    (project / "config.yaml").write_text(CONFIG)
    (project / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(project)
    run = RunFolder.create(project / "runs/run")
    store_configuration(run, load_config(Path("config.yaml")), first_step=0)
    write_environment(run.path)
    monkeypatch.chdir(elsewhere)
    return project


def test_a_run_keeps_relative_paths_and_is_read_from_any_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(project / "runs/run")
    assert "name: my/reward.py:Mine" in run.config.read_text()
    config = load_config(run.config)
    assert names_of(config) == {f"{project}/my/reward.py:Mine"}
    assert config.task.data == f"{project}/rows.jsonl"
    assert load_plugin("rewards", config.reward.name).__name__ == "Mine"
    assert allowed_changes(run, config, allow_changes=False) == ()
    assert names_of(load_config(project / "config.yaml")) == {f"{project}/my/reward.py:Mine"}  # beside the file
    monkeypatch.chdir(project)
    assert names_of(load_config(run.config)) == {"my/reward.py:Mine"}


def test_the_file_of_a_run_comes_before_one_of_the_same_name_in_the_working_directory(project: Path) -> None:
    Path("my").mkdir()
    shutil.copy(project / "my/reward.py", "my/reward.py")
    run = RunFolder(project / "runs/run")
    assert names_of(load_config(run.config)) == {f"{project}/my/reward.py:Mine"}
    given = load_config(run.config, ["reward.name=my/reward.py:Mine"])
    assert given.reward.name == f"{Path.cwd()}/my/reward.py:Mine"  # of an override: not what the run means by it


def test_a_project_that_was_moved_is_found_from_its_new_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = project.rename(project.with_name("moved"))
    monkeypatch.chdir(moved)
    run = RunFolder(moved / "runs/run")
    config = load_config(run.config)
    assert names_of(config) == {f"{moved}/my/reward.py:Mine"}
    assert allowed_changes(run, config, allow_changes=False) == ()


def test_a_run_goes_on_from_another_folder_with_the_configuration_that_started_it(project: Path) -> None:
    run, elsewhere = RunFolder(project / "runs/run"), Path("by_link/../project")
    Path("by_link").symlink_to(project)
    same = load_config(elsewhere / "config.yaml", [f"runs_dir={elsewhere / 'runs'}"])
    assert names_of(same) == {"by_link/../project/my/reward.py:Mine"}
    assert allowed_changes(run, same, allow_changes=False) == ()
    shutil.copy(project / "my/reward.py", "reward.py")
    with pytest.raises(ConfigError, match=r"reward\.name would change"):
        allowed_changes(run, load_config(run.config, ["reward.name=reward.py:Mine"]), allow_changes=False)
    with pytest.raises(ConfigError, match=r"runs_dir cannot change"):
        allowed_changes(run, load_config(run.config, ["runs_dir=elsewhere"]), allow_changes=False)


def test_batches_that_were_sampled_ahead_know_a_file_by_the_path_of_the_first_start(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(project / "runs/run")
    elsewhere = rollout_settings(load_config(run.config))
    monkeypatch.chdir(project)
    settings = rollout_settings(load_config(run.config))
    monkeypatch.chdir(project.with_name("elsewhere"))
    assert elsewhere != settings
    assert named_as(run, settings, elsewhere) == settings


def test_a_text_that_begins_with_a_tilde_need_be_no_path(project: Path) -> None:
    """The home of a user of this name was looked for, and that there is none ended in a traceback."""
    config = load_config(
        project / "config.yaml", ["rollout.answer_form=~~{answer}~~", "task.data=~nobody-here/a.jsonl"]
    )
    assert (config.rollout.answer_form, config.task.data) == ("~~{answer}~~", "~nobody-here/a.jsonl")
    with pytest.raises(DataMissing, match=r"the dataset ~nobody-here/a\.jsonl: there is no such file"):
        read_rows("~nobody-here/a.jsonl", split="train")
    with pytest.raises(ModelMissing, match="the tokenizer of ~nobody-here/model: there is no folder"):
        load_tokenizer("~nobody-here/model")


def test_a_path_of_a_variant_may_hold_an_equals_sign(project: Path) -> None:
    (project / "lr=1").mkdir()
    shutil.copy(project / "rows.jsonl", project / "lr=1/rows.jsonl")
    (project / "config.yaml").write_text(CONFIG.replace("reward.name=my/reward.py:Mine", "task.data=lr=1/rows.jsonl"))
    config = load_config(project / "config.yaml")
    assert config.evaluate.variants["other"] == [f"task.data={project}/lr=1/rows.jsonl"]


def test_a_run_that_was_resumed_elsewhere_goes_on_when_its_project_is_moved(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):  # a second time, since the folder of the first start is gone then
        run = RunFolder(project / "runs/run")
        store_configuration(run, load_config(run.config, ["train.steps=9"]), first_step=1)
        project = project.rename(project.with_name(f"moved_{number}"))
        monkeypatch.chdir(project)
        write_environment(project / "runs/run")
        run = RunFolder(project / "runs/run")
        assert "name: my/reward.py:Mine" in run.config.read_text()
        assert recorded_changes(run) == (Change(first_step=1, key="train.steps", old=100, new=9),)
        monkeypatch.chdir(project.with_name("elsewhere"))
        assert names_of(load_config(run.config)) == {f"{project}/my/reward.py:Mine"}


def test_what_an_agent_runs_and_writes_is_relative_to_its_own_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("agent.py", "check.py", "answer.txt"):
        (project / name).touch()
    options = "{program: [python3, agent.py], outcome: [python3, check.py], answer_file: answer.txt, folder: my}"
    text = CONFIG.replace("name: ledger", f"name: agent, options: {options}")
    (project / "config.yaml").write_text(text)
    found = load_config(project / "config.yaml").task.options
    assert found["program"] == ["python3", "agent.py"]
    assert found["outcome"] == ["python3", "check.py"]
    assert found["answer_file"] == "answer.txt"
    (project / "config.yaml").write_text(text.replace("[python3, agent.py]", "my/reward.py:Mine"))  # a function
    assert load_config(project / "config.yaml").task.options["program"] == f"{project}/my/reward.py:Mine"


def test_a_run_goes_on_when_the_working_directory_is_removed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a clone that is deleted: the run ended in a traceback when it next wrote its report."""
    run = RunFolder(project / "runs/run")
    gone = project / "clone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert names_of(load_config(run.config)) == {f"{project}/my/reward.py:Mine"}
    assert typed_path(run.path) == run.path
    monkeypatch.chdir(project)  # pytest wants one


def test_an_export_elsewhere_names_no_folder_of_this_machine(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, target = RunFolder(project / "runs/run"), Path("exported")
    monkeypatch.chdir(project)
    mine = load_config(run.config, ["condenser={name: 'my/condenser.py:Mine'}"])
    store_configuration(run, mine, first_step=0)
    (project / "my/condenser.py").write_text("")
    run.metrics.write_text('{"step": 3, "eval/success": 0.5}\n')
    monkeypatch.chdir(project.with_name("elsewhere"))
    target.mkdir()
    write_card(run, target, 3, part="model", name="exported", licence=None)
    settings, card = (target / "condenser.yaml").read_text(), (target / "README.md").read_text()
    assert "name: my/condenser.py:Mine" in settings
    assert "my/reward.py:Mine" in card
    assert str(project) not in settings + card


def test_an_error_names_the_folders_in_which_a_file_was_looked_for(project: Path) -> None:
    (project / "my/reward.py").unlink()
    name = load_config(project / "runs/run/config.yaml").reward.name
    expected = rf"no file {project}/my/reward\.py, nor {Path.cwd()}/my/reward\.py, and no module"
    with pytest.raises(PluginError, match=expected):
        load_plugin("rewards", name)


def test_the_folder_stays_that_of_the_first_start(project: Path) -> None:
    run = project / "runs/run"
    write_environment(run)
    assert json.loads((run / "environment.json").read_text())["folder"] == str(project)
