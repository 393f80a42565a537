"""Where a new run is written: a taken name is refused, and a start that fails neither leaves nor removes a folder."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.core.errors import RunError
from condensegrpo.storage.new_run import new_run
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder


def trained(path: Path, *, overwrite: bool = False, text: str = "seed: 0\n") -> RunFolder:
    """A run that took a step."""
    with new_run(path, text, overwrite=overwrite) as run:
        JsonlTracker(run.metrics).log(1, {"success": 0.5})
    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_taken_name_is_refused_with_a_free_one(tmp_path: Path) -> None:
    run = trained(tmp_path / "mine")
    trained(tmp_path / "mine-2")
    taken = (
        rf"creating the run folder {run.path}: the name is taken by a run after step 1\. Give this run another name "
        rf"\(name=mine-3\), continue that run \(--resume {run.path}\), or delete it \(--overwrite\)\."
    )
    with pytest.raises(RunError, match=taken), new_run(run.path, "", overwrite=False):
        pass
    assert run.config.read_text() == "seed: 0\n"
    assert names(tmp_path) == ["mine", "mine-2"]


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_run(tmp_path / "mine", "", overwrite=False):
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_a_run_whose_process_ends_meanwhile_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In use when its name is looked at, and free when its lock is taken."""
    run = trained(tmp_path / "mine")
    monkeypatch.setattr("condensegrpo.storage.new_run.check_run_name", lambda *_, **__: None)
    with (
        pytest.raises(RunError, match="the name is taken by a run after step 1"),
        new_run(run.path, "", overwrite=False),
    ):
        pass
    assert run.metrics.is_file()


def test_an_overwritten_run_is_deleted(tmp_path: Path) -> None:
    trained(tmp_path / "mine")
    with new_run(tmp_path / "mine", "seed: 1\n", overwrite=True) as run:
        assert not run.metrics.exists()
        run.truncate_after(-1)
    assert names(tmp_path) == []  # nothing was learned in the new one


def test_trajectories_that_failed_keep_the_folder_since_they_say_why(tmp_path: Path) -> None:
    with new_run(tmp_path / "mine", "", overwrite=False) as run:
        run.truncate_after(-1)
        run.trajectories(1).write_text("{}\n")
    assert names(tmp_path) == ["mine"]


def test_a_start_that_was_killed_is_replaced(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "mine")  # as kill -9 leaves it
    run.config.write_text("seed: 7\n")
    assert trained(run.path).config.read_text() == "seed: 0\n"


def test_what_is_no_run_or_is_in_use_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("keep me")
    with pytest.raises(RunError, match=r"so it is no run"), new_run(tmp_path / "notes", "", overwrite=True):
        pass
    run = trained(tmp_path / "busy")
    with run.locked(), pytest.raises(RunError, match=r"in use by another"), new_run(run.path, "", overwrite=True):
        pass
    assert names(tmp_path) == ["busy", "notes"]
    assert (tmp_path / "notes/mine.txt").read_text() == "keep me"


def test_a_taken_name_is_refused_before_anything_is_checked_or_loaded(tmp_path: Path) -> None:
    taken = RunFolder.create(tmp_path / "mine")
    taken.config.write_text("name: mine")
    taken.metrics.write_text('{"step":3}\n')
    arguments = ["train", "quickstart", f"runs_dir={tmp_path}", "name=mine", "task.name=none_such"]
    assert "the name is taken by a run after step 3" in str(CliRunner().invoke(app, arguments).exception)
