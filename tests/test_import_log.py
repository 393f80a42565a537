"""Logs of TRL, verifiers and Inspect become trajectories that the inspector shows."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import Codec, parquet
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.core.errors import DataError, RunError
from condensegrpo.core.trajectory import Stop
from condensegrpo.inspection.opened import first_difference
from condensegrpo.integrations.episodes import LogFormat
from condensegrpo.integrations.logs import read_log
from condensegrpo.storage.credit import read_credit
from condensegrpo.storage.run_folder import RunFolder

CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
CHAT = [
    {"role": "assistant", "content": None, "tool_calls": [json.dumps(CALL)]},
    {"role": "tool", "content": "Error: no such page", "tool_call_id": "c1"},
    {"role": "assistant", "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "It is 4."}]},
]
VERIFIERS = {
    "example_id": 7,
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
    "completion": CHAT,
    "answer": "4",
    "reward": 1.0,
    "metrics": {"right": 1.0, "brevity": 0.25},
    "timing": {"total_ms": 1500.0},
    "is_truncated": False,
}
SAMPLE: dict[str, Any] = {
    "id": "q1",
    "epoch": 1,
    "input": "2 + 2?",
    "target": "4",
    "messages": [
        {"role": "user", "content": "attachment://abc"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": "add", "arguments": {"a": 2}}]},
        {"role": "tool", "content": "4", "function": "add", "tool_call_id": "c1"},
        {"role": "assistant", "content": "4"},
    ],
    "attachments": {"abc": "What is 2 + 2?"},
    "output": {"choices": [{"stop_reason": "stop"}]},
    "scores": {"match": {"value": "C", "answer": "4"}, "style": {"value": {"short": 0.5, "kind": True}}},
    "total_time": 2.5,
}


def trl(folder: Path) -> Path:
    rows = [
        {"step": step, "prompt": prompt, "completion": text, "right": reward, "advantage": advantage}
        for step, prompt, text, reward, advantage in (
            (10, "1 + 1?", "2", 1.0, 0.7),
            (10, "1 + 1?", "3", 0.0, -0.7),
            (10, "1 + 2?", "3", 1.0, 0.0),
            (20, "1 + 1?", "2", 1.0, 0.0),
        )
    ]
    for step in (10, 20):
        table = pyarrow.Table.from_pylist([row for row in rows if row["step"] == step])
        parquet.write_table(table, folder / f"completions_{step:05d}.parquet")
    return folder


def test_trl_gives_steps_groups_rewards_and_advantages(tmp_path: Path) -> None:
    found = read_log(trl(tmp_path), LogFormat.TRL)
    assert [each.scored.trajectory.id for each in found] == ["10/0/0", "10/0/1", "10/1/0", "20/0/0"]
    assert [each.scored.score.correct for each in found] == [1.0, 0.0, 1.0, 1.0]
    assert found[1].advantages == (-0.7,)
    first = found[0].scored
    assert (first.score.components, first.trajectory.question, first.trajectory.answer) == ({"right": 1}, "1 + 1?", "2")


def test_trl_in_json_lines_has_whole_numbers_and_prompts_that_begin_alike(tmp_path: Path) -> None:
    begin = [{"role": "system", "content": "Reason step by step, then say the number. " * 3}]
    rows = [
        {"step": 1, "prompt": [*begin, {"role": "user", "content": asked}], "completion": "2", "right": 1, "brief": 0.5}
        for asked in ("1 + 1?", "2 + 2?")
    ]
    (tmp_path / "completions_1.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first, second = (each.scored for each in read_log(tmp_path, LogFormat.TRL))
    assert (first.score.total, first.score.components) == (1.5, {"right": 1.0, "brief": 0.5})
    assert first.trajectory.problem_id != second.trajectory.problem_id
    assert "1 + 1?" in first.trajectory.problem_id


def test_a_score_that_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    scores = {"unscored": {"value": float("nan")}, "match": {"value": 1}}
    (tmp_path / "log.json").write_text(json.dumps({"samples": [{**SAMPLE, "scores": scores}]}))
    (inspected,) = read_log(tmp_path / "log.json", LogFormat.INSPECT_AI)
    row = {**VERIFIERS, "reward": None, "metrics": {"right": float("nan"), "brevity": 0.25}}
    (tmp_path / "results.jsonl").write_text(json.dumps(row))
    (verified,) = read_log(tmp_path / "results.jsonl", LogFormat.VERIFIERS)
    assert (inspected.scored.score.total, inspected.scored.score.components) == (1.0, {"match": 1.0})
    assert (verified.scored.score.total, verified.scored.score.components) == (0.0, {"brevity": 0.25})


def test_a_damaged_log_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    packed, graph = tmp_path / "log.eval", tmp_path / "traces.jsonl"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as log:
        log.writestr("samples/q1_epoch_1.json", json.dumps(SAMPLE))
    data = bytearray(packed.read_bytes())
    data[60:80] = b"\xff" * 20
    packed.write_bytes(data)
    node = {"message": {"role": "user", "content": "2 + 2?"}, "parent": 7}
    graph.write_text(json.dumps({"traces": [{"task": {"data": {}}, "nodes": [node], "rewards": {}}]}))
    for file, form in ((packed, LogFormat.INSPECT_AI), (graph, LogFormat.VERIFIERS)):
        with pytest.raises(DataError, match=rf"{file.name} as a log of {form.value}: .*Is it a log"):
            read_log(file, form)


def test_verifiers_gives_messages_tool_calls_and_metrics(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    cut = {**VERIFIERS, "reward": 0.0, "is_truncated": True, "completion": "It"}
    file.write_text("".join(f"{json.dumps(row)}\n" for row in (VERIFIERS, cut)))
    whole, short = (each.scored for each in read_log(file, LogFormat.VERIFIERS))
    assert [turn.reply.content for turn in whole.trajectory.turns] == [
        '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>',
        "<think>hm</think>\nIt is 4.",
    ]
    first = whole.trajectory.turns[0]
    assert (first.tool_attempts, first.tool_successes, len(first.context)) == (1, 0, 2)
    assert (whole.trajectory.ground_truth, whole.trajectory.seconds, whole.score.total) == ("4", 1.5, 1.0)
    assert whole.score.components == {"right": 1.0, "brevity": 0.25}
    assert (short.trajectory.group_id, short.trajectory.sample) == ("0/0", 1)
    assert (short.trajectory.stop, short.trajectory.answer) == (Stop.OUTPUT_LENGTH, None)
    assert "token ids" in whole.trajectory.detail


@pytest.mark.parametrize("suffix", [".json", ".eval"])
def test_inspect_gives_scores_and_limits_of_both_file_types(tmp_path: Path, suffix: str) -> None:
    stopped = {**SAMPLE, "id": "q2", "limit": {"type": "context", "limit": 100}, "scores": None}
    file = tmp_path / f"log{suffix}"
    if suffix == ".json":
        file.write_text(json.dumps({"version": 2, "samples": [SAMPLE, stopped]}))
    else:
        with zipfile.ZipFile(file, "w") as log:
            for sample in (SAMPLE, stopped):
                log.writestr(f"samples/{sample['id']}_epoch_1.json", json.dumps(sample))
    first, second = (each.scored for each in read_log(file, LogFormat.INSPECT_AI))
    assert first.score.components == {"match": 1.0, "style": 0.75}
    assert (first.score.correct, first.trajectory.answer, first.trajectory.question) == (1.0, "4", "What is 2 + 2?")
    assert [turn.tool_successes for turn in first.trajectory.turns] == [1, 0]
    assert first.trajectory.turns[0].observations[0].name == "add"
    assert (second.trajectory.stop, second.score.total) == (Stop.CONTEXT_OVERFLOW, 0.0)


LOGS = Path(__file__).parent / "logs"  # written by Inspect 0.3.285 and by verifiers 0.4.0; what is not read was removed


def test_a_log_that_inspect_wrote(tmp_path: Path) -> None:
    failed, right, cancelled = (each.scored for each in read_log(LOGS / "inspect_ai.json", LogFormat.INSPECT_AI))
    assert failed.trajectory.stop is Stop.ENVIRONMENT_ERROR
    assert failed.trajectory.detail.startswith("ValueError('too large'); imported from inspect-ai")
    assert [(turn.tool_attempts, turn.tool_successes) for turn in failed.trajectory.turns] == [(1, 0)]  # it never ended
    assert (right.score.components, right.trajectory.answer) == ({"match": 1.0, "includes": 1.0}, "4")
    assert [message.role for message in right.trajectory.turns[1].context] == ["system", "user", "assistant", "tool"]
    assert (cancelled.trajectory.turns, cancelled.trajectory.group_id) == ((), right.trajectory.group_id)


@pytest.mark.parametrize(("answer", "truth"), [(0, "0"), (False, "False"), ("", None), (None, None)])
def test_an_answer_of_zero_is_a_ground_truth(tmp_path: Path, answer: object, truth: str | None) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps({**VERIFIERS, "answer": answer}))
    assert [each.scored.trajectory.ground_truth for each in read_log(file, LogFormat.VERIFIERS)] == [truth]


def test_traces_that_verifiers_wrote() -> None:
    right, failed = (each.scored for each in read_log(LOGS / "traces.jsonl", LogFormat.VERIFIERS))
    assert [turn.reply.content for turn in right.trajectory.turns] == [
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>',
        "<think>hm</think>\nIt is 4.",
    ]
    assert (right.score.total, right.score.components) == (1.1, {"correct": 1.0, "short": 0.5, "turns": 2.0})
    assert (right.trajectory.question, right.trajectory.ground_truth) == ("2 + 2?", "4")
    assert (failed.trajectory.id, failed.trajectory.stop) == ("0/0/1", Stop.ENVIRONMENT_ERROR)
    assert failed.trajectory.detail.startswith("ModelError: timeout; imported from verifiers")
    assert first_difference(right.trajectory, failed.trajectory) == (0, "reply")  # logs have no token ids


@pytest.mark.parametrize("lost", [0, 5])
def test_a_log_that_is_compressed_with_zstandard_as_inspect_writes_it(tmp_path: Path, lost: int) -> None:
    file, packed = tmp_path / "log.eval", Codec("zstd").compress(json.dumps(SAMPLE).encode(), asbytes=True)
    with zipfile.ZipFile(file, "w") as log:
        log.writestr("samples/q1_epoch_1.json", packed[: len(packed) - lost])
    data = bytearray(file.read_bytes())
    for header, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.index(header) + place] = 93  # the method of compression: zstandard
    file.write_bytes(data)
    if lost:
        with pytest.raises(DataError, match=r"samples/q1_epoch_1\.json of .*Copy the log again"):
            read_log(file, LogFormat.INSPECT_AI)
    else:
        (only,) = read_log(file, LogFormat.INSPECT_AI)
        assert (only.scored.score.correct, only.scored.trajectory.answer) == (1.0, "4")


def test_the_inspector_shows_what_was_imported(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    log, out = trl(tmp_path / "completions"), tmp_path / "imported"
    told = CliRunner().invoke(app, ["import", "trl", str(log), str(out)], catch_exceptions=False)
    assert "4 trajectories of 2 steps: text without token ids" in told.output
    assert f"next: condensegrpo inspect {out}" in told.output
    shown = CliRunner(env={"COLUMNS": "140"}).invoke(
        app, ["inspect-trajectory", str(out), "--step", "10"], catch_exceptions=False
    )
    assert "1 without signal" in shown.output
    assert "+0.70" in shown.output
    assert "imported from trl: text without token ids" in shown.output
    assert read_credit(RunFolder(out).credit(10))["10/0/1"].advantages == (-0.7,)


def test_another_file_or_a_taken_folder_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"question": "2 + 2?"}\n')
    for form in (LogFormat.TRL, LogFormat.VERIFIERS):
        with pytest.raises(
            DataError, match=rf"as a log of {form.value}: [a-z_]+: Field required. Is it a log of {form.value}\?"
        ):
            read_log(file, form)
    file.write_text(json.dumps(VERIFIERS) + "\n")
    with pytest.raises(RunError, match="the folder is not empty"):
        CliRunner().invoke(app, ["import", "verifiers", str(file), str(tmp_path)], catch_exceptions=False)
