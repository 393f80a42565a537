"""Trajectory and credit files of version 1 are read. ``golden/version_1`` was written by the code before version 2."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.core.errors import TrajectoryFileError
from condensegrpo.core.trajectory import SpanStatus
from condensegrpo.storage.credit import read_credit
from condensegrpo.storage.trajectories import read_trajectories, write_trajectory

RUN = Path(__file__).parent / "golden" / "version_1"
TRAJECTORIES = RUN / "trajectories" / "step_000060.jsonl"
CREDIT = RUN / "credit" / "step_000060.jsonl"


def test_renamed_and_added_fields_are_filled_from_version_1() -> None:
    wrong, right, tool = (scored.trajectory for scored in read_trajectories(TRAJECTORIES).trajectories)
    assert [one.sample for one in (wrong, right, tool)] == [4, 3, 0]
    assert (right.id, right.question, right.ground_truth) == ("60-train-38605:9-3-1-1-3", None, None)
    declared = right.turns[-1].condensation
    assert declared is not None
    assert [(span.first, span.last, span.units, span.status) for span in declared.spans] == [
        (0, 2, 3, SpanStatus.DROPPED),
        (3, 3, 1, SpanStatus.KEPT),
    ]
    assert [(turn.tool_attempts, turn.tool_successes, turn.turn_rewards) for turn in tool.turns] == [
        (1, 1, {}),
        (0, 0, {"brief": 0.5}),
    ]
    assert read_credit(CREDIT).keys() == {wrong.id, right.id, tool.id}


def test_what_was_read_from_version_1_is_written_as_version_4(tmp_path: Path) -> None:
    read = read_trajectories(TRAJECTORIES).trajectories
    for scored in read:
        write_trajectory(tmp_path / "new.jsonl", scored)
    assert (tmp_path / "new.jsonl").read_text().count('{"version":4,') == 3
    assert read_trajectories(tmp_path / "new.jsonl").trajectories == read


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--where", "correct == 0", "--tokens"]])
def test_a_run_of_version_1_is_inspected(arguments: list[str], tmp_path: Path) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")  # the command writes an index beside the files
    done = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["inspect-trajectory", str(run), *arguments])
    assert done.exit_code == 0, done.output
    assert "60-train-38605:9-3-1-1-4" in done.output


def test_a_line_of_a_check_is_not_broken_however_long_the_path_is(tmp_path: Path) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    done = CliRunner(env={"COLUMNS": "30"}).invoke(app, ["inspect-trajectory", str(run), "--check"])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{run}/trajectories/step_000060.jsonl: 3 trajectories, 12 turns, no breach\n"


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ('"fate":"kept"', '"fate":"lost"', "wanted one of kept, dropped, rewritten"),
        ('"tool_attempts":1.0', '"tool_attempts":"1"', r"turn_rewards\.tool_attempts: wanted a number"),
        ('"turns":[{', '"turns":[7,{', r"turns\[0\]: wanted an object"),
    ],
)
def test_damage_in_a_line_of_version_1_is_named(tmp_path: Path, before: str, after: str, fault: str) -> None:
    file = shutil.copy(TRAJECTORIES, tmp_path / "t.jsonl")
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(TrajectoryFileError, match=fault):
        read_trajectories(file)
