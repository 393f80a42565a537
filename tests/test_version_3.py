"""Files of version 3 are read: ``golden/version_3`` is of the code before version 4."""

import json
from pathlib import Path

from condensegrpo.core.trajectory import Span, SpanStatus
from condensegrpo.storage.credit import read_credit
from condensegrpo.storage.trajectories import read_trajectories, write_trajectory

GOLDEN = Path(__file__).parent / "golden" / "version_3"
FILE = GOLDEN / "trajectories.jsonl"


def test_prompts_messages_and_outputs_are_those_of_the_lines() -> None:
    read = read_trajectories(FILE)
    assert read.provenance is not None
    assert (read.provenance.step, read.provenance.model) == (6, "tiny")
    for line, one in zip(map(json.loads, FILE.read_text().splitlines()), read.trajectories, strict=True):
        for written, turn in zip(line["trajectory"]["turns"], one.trajectory.turns, strict=True):
            assert written["prompt_ids"] == list(turn.prompt_ids)
            assert written["output_ids"] == list(turn.output_ids)
            assert [message["content"] for message in written["context"]] == [each.content for each in turn.context]
            assert written["reply"]["content"] == turn.reply.content
            assert [message["content"] for message in written["observations"]] == [
                each.content for each in turn.observations
            ]
    full, last_k, tools, summary = (one.trajectory for one in read.trajectories)
    assert [turn.tool_attempts for turn in tools.turns] == [1, 1, 1, 0]
    assert [turn.kind[0] for turn in summary.turns] == list("aaaacaca")
    assert (summary.rejected[0].before, full.turns[5].reply.content, last_k.answer) == (5, "answer 5", "5")
    assert read_credit(GOLDEN / "credit.jsonl")["6/0/0"].advantages == (0.5,) * 6


def test_spans_of_units_are_joined_to_runs() -> None:
    declared = read_trajectories(FILE).trajectories[1].trajectory.turns[5].condensation
    units = json.loads(FILE.read_text().splitlines()[1])["trajectory"]["turns"][5]["condensation"]["spans"]
    assert [unit["status"] for unit in units] == ["dropped"] * 4 + ["kept"]
    assert declared is not None
    assert declared.spans == (
        Span(first=0, last=3, units=4, status=SpanStatus.DROPPED, tokens=sum(unit["tokens"] for unit in units[:4])),
        Span(first=4, last=4, units=1, status=SpanStatus.KEPT, tokens=units[4]["tokens"]),
    )


def test_what_was_read_is_written_anew_and_smaller(tmp_path: Path) -> None:
    read = read_trajectories(FILE)
    for one in read.trajectories:
        write_trajectory(tmp_path / "new.jsonl", one, read.provenance)
    assert read_trajectories(tmp_path / "new.jsonl") == read
    assert (tmp_path / "new.jsonl").stat().st_size < 0.6 * FILE.stat().st_size
