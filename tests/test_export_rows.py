"""Rows for the trainers of others: by hand, through the command, and read by their packages."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import condensation, scored, trajectory, turn
from command import run as command
from command import succeed

from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.integrations.rows import System, export_rows, exported
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import Credit, Provenance, part_file, write_credit, write_trajectories

OPENENV = Path(__file__).parent.parent / ".venv" / "others" / "openenv" / "bin" / "python"  # of `make others`


def condensed(number: int = 0) -> ScoredTrajectory:
    """Two turns in one row, then a condensation and one turn in another; 9 of the second prompt was not sampled."""
    declared = condensation("dd", [3, 3], before=6, after=2)
    turns = (
        turn([1, 2], [3], logprobs=[-0.1]),
        turn([1, 2, 3, 9], [4, 5], logprobs=[-0.2, -0.3]),
        turn([7, 8], [6], logprobs=[-0.4], condensation=declared),
    )
    return scored(trajectory(*turns, id=f"1/0/{number}", group="1/0"), 0.5)


def credit_of(each: ScoredTrajectory, weights: tuple[float, ...] = (0.25, 0.25, 0.5)) -> Credit:
    return Credit(trajectory=each.trajectory.id, advantages=(1.0, 2.0, -1.0), weights=weights)


def rows(to: System, *, weights: tuple[float, ...] = (0.25, 0.25, 0.5)) -> list[dict[str, Any]]:
    each = condensed()
    return list(exported([each], to, credit={"1/0/0": credit_of(each, weights)}, temperature=0.7))


ORIGIN = {"trajectory": "1/0/0", "group": "1/0", "problem": "1/0", "segments": 2, "reward": 0.5}


def test_a_condensed_trajectory_is_a_row_for_each_segment() -> None:
    assert rows("trl") == [
        {
            "prompt_ids": [1, 2],
            "completion_ids": [3, 9, 4, 5],
            "tool_mask": [1, 0, 1, 1],
            "old_per_token_logps": [-0.1, 0.0, -0.2, -0.3],
            "advantages": [1.0, 0.0, 2.0, 2.0],
            "weights": [0.25, 0.0, 0.25, 0.25],
            "segment": 0,
            **ORIGIN,
        },
        {
            "prompt_ids": [7, 8],
            "completion_ids": [6],
            "tool_mask": [1],
            "old_per_token_logps": [-0.4],
            "advantages": [-1.0],
            "weights": [0.5],
            "segment": 1,
            **ORIGIN,
        },
    ]


def test_prime_rl_divides_by_the_trained_tokens_of_the_step_which_its_weights_undo() -> None:
    first, second = rows("prime-rl")
    assert first["token_ids"] == [1, 2, 3, 9, 4, 5]
    assert first["mask"] == [False, False, True, False, True, True]
    assert first["logprobs"] == [0.0, 0.0, -0.1, 0.0, -0.2, -0.3]
    assert first["temperatures"] == [0.7] * 6
    assert first["advantages"] == [0.0, 0.0, 1.0, 0.0, 2.0, 2.0]
    assert (first["rl_weights"], second["rl_weights"]) == ([0.0, 0.0, 1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 2.0])  # · 4
    assert first.keys() == {"token_ids", "mask", "logprobs", "temperatures", "env_name", "rl_weights", "advantages"}


def test_verl_has_the_reward_of_the_trajectory_in_every_row() -> None:
    first, second = rows("verl")
    assert (first["prompt_ids"], first["response_ids"]) == ([1, 2], [3, 9, 4, 5])
    assert (first["response_mask"], first["response_logprobs"]) == ([1, 0, 1, 1], [-0.1, 0.0, -0.2, -0.3])
    assert (first["reward_score"], second["reward_score"], first["metrics"]) == (0.5, 0.5, {})
    assert second["extra_fields"] == {**ORIGIN, "segment": 1, "advantages": [-1.0], "weights": [0.5]}


def test_turns_of_weight_0_train_nothing_and_rows_of_them_alone_are_left_out() -> None:
    (only,) = rows("trl", weights=(0.0, 1.0, 0.0))
    assert (only["completion_ids"], only["tool_mask"]) == ([3, 9, 4, 5], [0, 0, 1, 1])


def test_without_credit_there_are_rewards_and_no_advantages() -> None:
    first, _ = exported([condensed()], "trl")
    assert (first["tool_mask"], first["reward"], first["advantages"], first["weights"]) == (
        [1, 0, 1, 1],
        0.5,
        None,
        None,
    )


def test_replies_that_are_text_cannot_be_rows() -> None:
    text = scored(trajectory(turn([1], [2], logprobs=[])), 0.0)
    with pytest.raises(RolloutError, match="replies without log-probabilities"):
        list(exported([text], "trl"))


def a_run(folder: Path, steps: Sequence[int] = (1, 2)) -> RunFolder:
    """A run with a trajectory a step; the second step has no credit yet."""
    run = RunFolder.create(folder)
    run.config.write_text("name: rows\n")
    sampled_with = Provenance(
        evaluation=None, step=1, model="m", condenser="last_k", max_context_tokens=64, temperature=0.7, seed=0
    )
    for step in steps:
        each = condensed(step)
        write_trajectories(run.trajectories(step), [each], sampled_with)
        if step == 1:
            write_credit(run.credit(step), [credit_of(each)])
    return run


def test_the_command_writes_the_rows_of_a_run_or_of_a_file(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    written = tmp_path / "rows.jsonl"
    assert "4 rows for trl" in succeed("export-rows", str(run.path), "--to", "trl", "--out", str(written))
    assert [json.loads(line) for line in written.read_text().splitlines()] == list(export_rows(run.path, "trl"))
    again = command("export-rows", str(run.path), "--to", "verl", "--out", str(written))
    assert f"exporting to {written}: it is there already, and nothing is overwritten" in again.stderr
    assert again.returncode == 1
    lines = succeed("export-rows", str(run.trajectories(1)), "--to", "prime-rl").splitlines()
    assert [json.loads(line) for line in lines] == list(export_rows(run.path, "prime-rl", step=1))
    assert json.loads(lines[0])["temperatures"] == [0.7] * 6


def test_the_file_of_one_rank_has_the_credit_of_its_step(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", steps=(1,))
    whole = [*export_rows(run.path, "trl")]
    part = run.trajectories(1).rename(part_file(run.trajectories(1), 1))
    assert [*export_rows(part, "trl")] == whole
    assert all(row["advantages"] for row in whole)


def test_a_step_that_is_not_there_and_an_unknown_trainer_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="there is no step 3, the run has 1–2"):
        list(export_rows(run.path, "trl", step=3))
    with pytest.raises(ConfigError, match="found to='trlx', wanted trl, prime-rl, verl, openenv"):
        list(export_rows(run.path, "trlx"))  # type: ignore[arg-type]  # as a user may write


READ = """
import json, sys, types
sys.modules["openai"] = types.SimpleNamespace(AsyncOpenAI=None)  # of its clients of models, which are not installed
from openenv.core.harness.training import TrainingTrace
for line in sys.stdin:
    trace = TrainingTrace.model_validate_json(line)
    print(json.dumps([trace.model_dump(), len(trace.to_trace_entries())]))
"""


def test_openenv_reads_its_traces() -> None:
    if not OPENENV.exists():
        pytest.skip("`make others` installs openenv")
    (trace,) = rows("openenv")
    assert [(each["prompt_token_ids"], each["loss_mask"]) for each in trace["turns"]] == [
        ([1, 2], [0, 0, 1]),
        ([1, 2, 3, 9], [0, 0, 0, 0, 1, 1]),
        ([7, 8], [0, 0, 1]),
    ]
    read = subprocess.run([OPENENV, "-c", READ], input=json.dumps(trace), capture_output=True, text=True, check=True)
    back, entries = json.loads(read.stdout)
    assert (back["turns"][2]["metadata"], entries) == (trace["turns"][2]["metadata"], 3)
