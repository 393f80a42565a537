"""Where a new run is written: a taken name is refused, and a start that fails neither leaves nor removes a folder."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.core.errors import RunError
from condensegrpo.storage.new_run import discard_replaced, new_run
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


def test_an_overwritten_run_is_deleted_when_the_new_one_has_learned_something(tmp_path: Path) -> None:
    trained(tmp_path / "mine")
    with new_run(tmp_path / "mine", "seed: 1\n", overwrite=True) as run:
        assert names(tmp_path) == [".mine.tmp-replaced", "mine"]
        JsonlTracker(run.metrics).log(1, {"success": 0.5})
        discard_replaced(run)
        assert names(tmp_path) == ["mine"]
    assert run.config.read_text() == "seed: 1\n"


def test_an_overwritten_run_comes_back_if_the_new_one_fails_to_start(tmp_path: Path) -> None:
    run = trained(tmp_path / "mine")
    with pytest.raises(ZeroDivisionError), new_run(run.path, "", overwrite=True):
        raise ZeroDivisionError
    assert names(tmp_path) == ["mine"]
    assert run.config.read_text() == "seed: 0\n"
    assert run.metrics.is_file()


def test_an_overwritten_run_comes_back_if_the_first_rollout_of_the_new_one_fails(tmp_path: Path) -> None:
    """The folder then holds empty metrics, as every run does before its first measurement, and failed trajectories."""
    trained(tmp_path / "mine")
    with new_run(tmp_path / "mine", "", overwrite=True) as run:
        run.truncate_after(-1)
        run.trajectories(1).write_text("{}\n")
    assert names(tmp_path) == ["mine"]
    assert run.config.read_text() == "seed: 0\n"
    with new_run(tmp_path / "other", "", overwrite=False) as run:
        run.truncate_after(-1)
    assert names(tmp_path) == ["mine"]
    with new_run(tmp_path / "other", "", overwrite=False) as run:
        run.truncate_after(-1)
        run.trajectories(1).write_text("{}\n")
    assert names(tmp_path) == ["mine", "other"]  # the trajectories that failed say why


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_overwritten_run_comes_back_if_the_new_one_was_killed_in_its_first_rollout(
    tmp_path: Path, overwrite: bool
) -> None:
    trained(tmp_path / "mine").path.rename(tmp_path / ".mine.tmp-replaced")
    killed = RunFolder.create(tmp_path / "mine")
    killed.config.write_text("seed: 7\n")
    killed.truncate_after(-1)
    killed.trajectories(1).write_text("{}\n")
    if overwrite:
        with new_run(killed.path, "seed: 8\n", overwrite=True):
            pass
    else:
        with pytest.raises(RunError, match="taken by a run after step 1"), new_run(killed.path, "", overwrite=False):
            pass
    assert names(tmp_path) == ["mine"]
    assert killed.config.read_text() == "seed: 0\n"


def test_a_start_that_was_killed_is_replaced_and_hides_no_older_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "mine")  # as kill -9 leaves it
    run.config.write_text("seed: 7\n")
    assert trained(run.path).config.read_text() == "seed: 0\n"
    run.path.rename(tmp_path / ".mine.tmp-replaced")
    RunFolder.create(run.path)
    with pytest.raises(RunError, match=r"taken by a run after step 1"), new_run(run.path, "", overwrite=False):
        pass
    assert names(tmp_path) == ["mine"]


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
