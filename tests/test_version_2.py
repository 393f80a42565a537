"""Files of version 2 are read: ``golden/version_2``, a run and an evaluation, is of the code before version 3."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.storage.trajectories import read_trajectories, write_trajectory

RUN = Path(__file__).parent / "golden" / "version_2"
OLD = "2-train-85914:3-1-3+3-3-1+1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy: the command writes an index beside the files."""
    return shutil.copytree(RUN, tmp_path / "run")


def inspect(*arguments: object) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["inspect-trajectory", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_file_of_version_2_is_read_and_written_anew(tmp_path: Path) -> None:
    read = read_trajectories(RUN / "trajectories" / "step_000002.jsonl")
    assert read.provenance is None
    assert {(one.trajectory.question, one.trajectory.ground_truth) for one in read.trajectories} == {
        ("start 1 keep a note", "8"),
        ("start 3 keep a note", "9"),
    }
    for one in read.trajectories:
        write_trajectory(tmp_path / "new.jsonl", one)
    assert read_trajectories(tmp_path / "new.jsonl") == read


@pytest.mark.parametrize(
    "arguments",
    [
        ("--trajectory", f"{OLD}-1"),
        ("--trajectory", "#3"),
        ("--trajectory", "3"),
        ("--group", OLD, "--where", "output == 62"),
        ("--group", "1", "--where", "output == 62"),
    ],
)
def test_old_ids_and_numbers_find_a_trajectory(arguments: tuple[str, ...], run: Path) -> None:
    assert f"\n{OLD}-1   ✗ wrong" in inspect(run, *arguments)


def test_the_step_of_an_old_id_is_opened(run: Path) -> None:
    assert "step 2 · 4 trajectories" in inspect(run, "--trajectory", f"{OLD}-0")
    assert "no breach" in inspect(run, "--check")


def test_an_old_evaluation_does_not_claim_what_it_does_not_know(run: Path) -> None:
    text = inspect(run / "evaluation.jsonl")
    assert "evaluation · 2 trajectories" in text
    assert "the context budget is not known" in text
    assert not [wrong for wrong in ("nothing is learned", "no signal", "advantage", "policy after") if wrong in text]
