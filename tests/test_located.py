"""Paths are absolute once a configuration is loaded, so that a run is read and resumed from any folder."""

import shutil
from pathlib import Path

import pytest

from condensegrpo.config.load import load_config, plugin_files, vary
from condensegrpo.config.resumed import allowed_changes, store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, DataMissing, ModelMissing, PluginError
from condensegrpo.core.plugins import load_plugin
from condensegrpo.inspection.page import typed_path
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.reporting.model_card import write_card
from condensegrpo.storage.rows import read_rows
from condensegrpo.storage.run_folder import RunFolder

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
    monkeypatch.chdir(elsewhere)
    return project


def test_a_run_holds_absolute_paths_and_is_read_from_any_folder(project: Path) -> None:
    run = RunFolder(project / "runs/run")
    config = load_config(run.config)
    assert names_of(config) == {f"{project}/my/reward.py:Mine"}
    assert config.task.data == f"{project}/rows.jsonl"
    assert load_plugin("rewards", config.reward.name).__name__ == "Mine"
    assert plugin_files(config) == (project / "my/reward.py",)
    assert allowed_changes(run, config, allow_changes=False) == ()
    assert load_config(project / "config.yaml") == config  # beside the file


def test_the_working_directory_comes_before_the_folder_of_the_file(project: Path) -> None:
    Path("my").mkdir()
    shutil.copy(project / "my/reward.py", "my/reward.py")
    here = f"{Path.cwd()}/my/reward.py:Mine"
    assert names_of(load_config(project / "config.yaml")) == {here}
    assert names_of(load_config(project / "runs/run/config.yaml")) == {f"{project}/my/reward.py:Mine"}
    assert vary(load_config(project / "runs/run/config.yaml"), ["reward.name=my/reward.py:Mine"]).reward.name == here


def test_an_override_is_relative_to_the_working_directory_alone(project: Path) -> None:
    config = load_config(project / "config.yaml", ["reward.name=my/reward.py:Mine"])
    assert config.reward.name == "my/reward.py:Mine"
    with pytest.raises(PluginError, match=rf"no file {Path.cwd()}/my/reward\.py, nor one beside the configuration"):
        load_plugin("rewards", config.reward.name)


def test_a_run_goes_on_from_another_folder_with_the_configuration_that_started_it(project: Path) -> None:
    run, elsewhere = RunFolder(project / "runs/run"), Path("by_link/../project")
    Path("by_link").symlink_to(project)
    same = load_config(elsewhere / "config.yaml", [f"runs_dir={elsewhere / 'runs'}"])
    assert names_of(same) == {f"{project}/my/reward.py:Mine"}
    assert allowed_changes(run, same, allow_changes=False) == ()
    shutil.copy(project / "my/reward.py", "reward.py")
    with pytest.raises(ConfigError, match=r"reward\.name would change"):
        allowed_changes(run, load_config(run.config, ["reward.name=reward.py:Mine"]), allow_changes=False)
    with pytest.raises(ConfigError, match=r"runs_dir cannot change"):
        allowed_changes(run, load_config(run.config, ["runs_dir=elsewhere"]), allow_changes=False)


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


def test_what_an_agent_runs_and_writes_is_relative_to_its_own_folder(project: Path) -> None:
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


@pytest.mark.parametrize("inside", [True, False])
def test_an_export_names_no_folder_of_this_machine(
    project: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    run, target = RunFolder(project / "runs/run"), project / "exported"
    (project / "my/condenser.py").write_text("")
    monkeypatch.chdir(project)
    mine = load_config(run.config, ["condenser={name: 'my/condenser.py:Mine'}"])
    store_configuration(run, mine, first_step=0)
    run.metrics.write_text('{"step": 3, "eval/success": 0.5}\n')
    monkeypatch.chdir(project if inside else project.with_name("elsewhere"))
    target.mkdir()
    write_card(run, target, 3, part="model", name="exported", licence=None)
    settings, card = (target / "condenser.yaml").read_text(), (target / "README.md").read_text()
    folder = "my/" if inside else ""
    assert f"name: {folder}condenser.py:Mine" in settings
    assert f"| {folder}reward.py:Mine" in card
    assert str(project) not in settings + card
