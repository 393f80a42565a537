"""``condensegrpo init``: what it writes runs at once, and its tests pass."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from command import run
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.config.load import load_config
from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.display.theme import as_typed, program
from condensegrpo.storage.run_folder import read_metrics

FILES = ["counting.py", "counting.yaml", "test_counting.py"]


def init(*arguments: object, answers: str = "") -> str:
    result = CliRunner().invoke(app, ["init", *map(str, arguments)], input=answers)
    if result.exception is not None:
        raise result.exception
    return result.output


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("episodes", ["turns", "question"])
def test_the_tests_that_it_writes_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, episodes: str) -> None:
    told = init(tmp_path / "own", "--name", "counting", "--episodes", episodes, "--model", "new")
    assert f"next: cd {tmp_path / 'own'} && pytest test_counting.py && condensegrpo train counting.yaml" in told
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == FILES
    monkeypatch.syspath_prepend(tmp_path / "own")
    monkeypatch.delitem(sys.modules, "counting", raising=False)
    tests = imported(tmp_path / "own" / "test_counting.py")
    tests.test_the_splits_share_no_problem()
    tests.test_right_replies_lead_to_the_right_answer()
    tests.test_the_configuration_can_be_trained(monkeypatch)
    monkeypatch.delitem(sys.modules, "counting", raising=False)


def test_the_next_commands_are_those_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "my env" / "condensegrpo")])
    monkeypatch.chdir(tmp_path)
    options = ("--name", "counting", "--episodes", "turns", "--model", "new")
    assert program() == "'my env/condensegrpo'"
    told = as_typed(
        "condensegrpo has no such run: `condensegrpo train --resume RUN`, those of condensegrpo eval, condensegrpo."
    )
    path = "'my env/condensegrpo'"
    assert told == f"condensegrpo has no such run: `{path} train --resume RUN`, those of {path} eval, condensegrpo."
    assert as_typed("runs: env/condensegrpo train a.yaml") == "runs: env/condensegrpo train a.yaml"
    train = "'../my env/condensegrpo' train counting.yaml"
    assert f"next: cd own && '../my env/pytest' test_counting.py && {train}\n" in init("own", *options)
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert f"next: cd untested && {train}\n" in init("untested", *options)
    (tmp_path / "my env").mkdir()
    monkeypatch.chdir("my env")
    assert program() == "./condensegrpo"


def test_three_questions_are_asked_and_the_result_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = init(answers="counting\nturns\nnew\n")
    assert [asked.count(word) for word in ("Name of the task", "Episodes", "Model")] == [1, 1, 1]
    small = ("warm_start.steps=2", "train.steps=1", "train.problems_per_step=2", "evaluate.problems=4")
    done = run("train", "counting.yaml", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "not rehearsed: the condenser last_k, which had nothing to condense" in done.stdout
    assert "threads: 1" in (tmp_path / "counting.yaml").read_text()
    assert [line["step"] for line in read_metrics(tmp_path / "runs" / "counting" / "metrics.jsonl")] == [0, 1, 1]


def test_a_pretrained_model_has_no_warm_start(tmp_path: Path) -> None:
    init(tmp_path, "--name", "counting", "--episodes", "question", "--model", "Qwen/Qwen2.5-0.5B-Instruct")
    text = (tmp_path / "counting.yaml").read_text()
    assert 'model: {path: "Qwen/Qwen2.5-0.5B-Instruct"}' in text
    assert "warm_start" not in text


def test_a_model_folder_is_named_as_the_configuration_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    init(Path("mytask"), "--name", "counting", "--episodes", "question", "--model", "models/tiny")
    for folder in (tmp_path, tmp_path / "mytask"):
        monkeypatch.chdir(folder)
        path = load_config(tmp_path / "mytask/counting.yaml").model.path
        assert path is not None
        assert Path(path).samefile(tmp_path / "models/tiny")


def test_nothing_is_overwritten_and_a_wrong_answer_says_what_was_wanted(tmp_path: Path) -> None:
    (tmp_path / "counting.yaml").write_text("mine")
    known: list[tuple[Callable[[], str], type[Exception], str]] = [
        (lambda: init(tmp_path, answers="counting\nturns\nnew\n"), RunError, "the file exists"),
        (lambda: init(tmp_path, answers="My-Task\nturns\nnew\n"), ConfigError, "found 'My-Task', wanted the name"),
        (lambda: init(tmp_path, answers="random\nturns\nnew\n"), ConfigError, "none that Python uses itself"),
    ]
    for call, kind, message in known:
        with pytest.raises(kind, match=message):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["counting.yaml"]


def test_a_name_that_yaml_would_read_as_a_truth_value_is_a_name(tmp_path: Path) -> None:
    init(tmp_path, "--name", "on", "--episodes", "turns", "--model", "new")
    assert load_config(tmp_path / "on.yaml").name == "on"


def test_a_wrong_answer_is_asked_for_again(tmp_path: Path) -> None:
    told = init(tmp_path, answers="other\nboth\nturns\nnew\n")
    assert "found 'both', wanted turns or question" in told
    assert (tmp_path / "test_other.py").is_file()
