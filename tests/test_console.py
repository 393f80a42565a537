"""The console of a run: what a pipe, log.txt, programs and terminals of several widths get."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from datetime import datetime
from pathlib import Path

from command import ENVIRONMENT
from metrics_page import tables
from rich.console import Console

from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.observer import Observers
from condensegrpo.display.console import PhaseDisplay, TrainingConsole
from condensegrpo.display.run_log import (
    COLUMNS,
    GAP,
    HEADING_EVERY,
    WIDTH,
    JsonLines,
    RunLog,
    StepTable,
    fitting,
    headings,
)

METRICS = {
    "trajectories": 64.0,
    "success": 0.5,
    "reward": -0.125,
    "format_valid": 1.0,
    "context_tokens": 1234.56,
    "turns": 3.25,
    "output_tokens": 87.0,
    "price": 1582400.0,
    "groups_of_equal_reward": 0.25,
    "groups_dropped": 0.0,
    "masked": 0.0,
    "trajectories_without_advantage": 0.375,
    "correct_with_negative_advantage": 0.1,
    "ratio": 1.0,
    "grad_norm": 0.0123,
    "seconds": 12.0,
}
AT_80 = [
    *("time", "step", "success", "reward", "context tokens", "price", "groups without signal", "tokens per s"),
    "time left",
]
EVALUATION = Evaluation(
    name="held-out", problems=256, samples=1, seed=0, success=0.742, success_low=0.688, success_high=0.79,
    pass_at={1: 0.742}, metrics={"context_tokens": 24.06, "price": 431.2, "turns": 5.1}, information=(), seconds=3.44,
)  # fmt: skip


def logged(file: Path) -> list[str]:
    """The lines of a log without their times."""
    return [line.split("  ", 1)[1] for line in file.read_text().splitlines()]


def names(width: int) -> list[str]:
    return [" ".join(column.heading) for column in fitting(width, COLUMNS)]


def test_every_cell_stands_under_its_heading() -> None:
    table = StepTable(60, clock=lambda: 0.0)
    *headed, row = table.lines(7, METRICS, 200)
    assert row.split()[1:] == [
        "7/60", "0.50", "-0.125", "100%", "1234.6", "3.2", "87", "1582400", "25%", "0%", "0%", "38%", "10%", "1.0000",
        "0.012", "12.0", "464", "0:10:36",
    ]  # fmt: skip
    end = -GAP
    assert headings(COLUMNS) == headed
    for column in COLUMNS:
        end += GAP + column.width
        assert row[end - 1] != " "
        assert all(line[:end].endswith(word) for line, word in zip(headed[::-1], column.heading[::-1], strict=False))


def test_the_table_fits_every_terminal_and_the_log() -> None:
    assert names(80) == AT_80
    assert set(AT_80) < set(names(WIDTH)) < set(names(120))
    for width in range(10, 170):
        *headed, row = StepTable(60).lines(7, METRICS, width)
        assert max(map(len, (*headed, row))) <= width
        assert set(names(width)) <= set(names(width + 1))


def test_the_headings_come_again_after_some_rows_and_never_change() -> None:
    table = StepTable(60)
    lines = [table.lines(step, {**METRICS, "masked": step / 60}, 100) for step in range(1, 2 * HEADING_EVERY + 2)]
    headed = {step: each[:-1] for step, each in enumerate(lines, 1) if len(each) > 1}
    assert [*headed] == [1, 1 + HEADING_EVERY, 1 + 2 * HEADING_EVERY]
    assert headed[1] == headed[1 + HEADING_EVERY]


def test_the_time_left_is_that_of_the_steps_so_far() -> None:
    now = iter((100.0, 110.0, 130.0))
    table = StepTable(10, clock=lambda: next(now))
    assert [table.lines(step, METRICS, 200)[-1].split()[-1] for step in (1, 2, 3)] == ["0:01:48", "0:01:20", "0:01:45"]


def test_what_was_not_measured_is_a_dash() -> None:
    row = StepTable(60).lines(7, {"rows": 0.0, "success": 0.5}, 200)[-1]
    assert row.split()[1:] == ["7/60", "0.50", *["–"] * (len(COLUMNS) - 4), "0:00:00"]


def test_no_two_columns_are_equally_important_and_every_word_fits_its_column() -> None:
    assert sorted(column.rank for column in COLUMNS) == list(range(len(COLUMNS)))
    assert all(column.width >= len(word) for column in COLUMNS for word in column.heading)


def test_a_pipe_gets_plain_lines_of_at_most_100_columns(tmp_path: Path) -> None:
    pipe = io.StringIO()
    with TrainingConsole(steps=30, stream=pipe, debug=False) as console, RunLog(tmp_path / "log.txt", steps=30) as log:
        both = Observers(log, console)
        both.log_lines("command: condensegrpo train quickstart")
        both.notice("run folder runs/x")
        both.phase("step 1: sampling", 64)
        assert log.doing() == "step 1"
        for step in range(1, HEADING_EVERY + 2):
            both.step(step, METRICS)
        both.phase("evaluating held-out", 256)
        assert log.doing() == "the evaluation held-out"
        both.evaluated(20, [EVALUATION])
        both.trajectories_failed("1 of 64 trajectories failed\x1b[2J", "Traceback: mine.py, line 3")
    lines = pipe.getvalue().splitlines()
    assert not any(ord(char) < 32 for line in lines for char in line)
    assert max(map(len, lines)) <= WIDTH
    assert [line[10:] for line in lines if line[2] == line[5] == ":" and "/30" not in line] == [
        "run folder runs/x",
        "evaluating held-out …",
        "after 20 steps, held-out: success 0.742 [0.688, 0.790], context 24.1, price 431, 3.44 s",
        "1 of 64 trajectories failed␛[2J (--debug shows the traceback)",
    ]
    assert (
        sum(line.split()[:2] == ["time", "step"] for line in lines) == 2
    )  # headings at the top, and again after so many rows
    text = logged(tmp_path / "log.txt")
    assert text[:2] == ["command: condensegrpo train quickstart", "run folder runs/x"]
    assert text[-2:] == ["1 of 64 trajectories failed␛[2J", "Traceback: mine.py, line 3"]
    assert max(map(len, text)) <= WIDTH


def test_a_pipe_hears_of_a_long_phase_now_and_then() -> None:
    pipe = io.StringIO()
    with TrainingConsole(steps=30, stream=pipe, status_seconds=0.0) as console:
        console.phase("warm start, round 1", 1300)
        console.advance("loss 0.532")
    assert [line[10:] for line in pipe.getvalue().splitlines()] == [
        "warm start, round 1 …",
        "warm start, round 1: 1 of 1300, loss 0.532",
    ]


def test_a_part_counts_as_done_when_the_next_one_is_taken() -> None:
    display = PhaseDisplay(Console(file=io.StringIO()))
    display.phase("checking", 3)
    (task,) = display.progress.tasks
    assert [(part, task.completed) for part in display.counted("abc")] == [("a", 0), ("b", 1), ("c", 2)]
    assert task.completed == task.total == 3


def test_every_line_of_the_log_begins_with_its_time(tmp_path: Path) -> None:
    before = datetime.now().astimezone().replace(microsecond=0)
    with RunLog(tmp_path / "log.txt", steps=30) as log:
        log.phase("loading DeepSpeed", None)
        log.step(1, METRICS)
        log.log_lines("error: two\nlines")
    times, texts = zip(*(line.split("  ", 1) for line in (tmp_path / "log.txt").read_text().splitlines()), strict=True)
    assert texts[0] == "loading DeepSpeed …"
    assert texts[-2:] == ("error: two", "lines")
    assert all(before <= datetime.fromisoformat(time) <= datetime.now().astimezone() for time in times)


def test_json_is_one_object_a_line_with_all_metrics() -> None:
    pipe = io.StringIO()
    lines = JsonLines(pipe)
    lines.notice("run folder runs/x\nand a second line")
    lines.phase("evaluating held-out", 256)
    lines.step(3, METRICS)
    lines.evaluated(3, [EVALUATION])
    events = [json.loads(line) for line in pipe.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["message", "phase", "step", "evaluation"]
    assert (events[2]["step"], events[2]["metrics"]) == (3, METRICS)
    assert (events[3]["name"], events[3]["success_low"]) == ("held-out", 0.688)


def test_the_page_explains_every_heading() -> None:
    shown = [(" ".join(column.heading), column.metric) for column in COLUMNS]
    assert [line[:2] for line in tables()["The console"]] == shown


PROGRAM = """
import fcntl, struct, sys, termios
from test_console import EVALUATION, METRICS
from condensegrpo.display.console import TrainingConsole

with TrainingConsole(steps=9) as console:
    console.phase("step 1: sampling", 64)
    console.advance()
    console.step(1, METRICS)
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, int(sys.argv[1]), 0, 0))  # a hand draws at the window
    console.step(2, METRICS)
    console.evaluated(2, [EVALUATION])
"""


def on_terminal(width: int, then: int) -> list[str]:
    """What stays on a real terminal of so many columns, which then gets another width."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(Path(__file__).parent)}
    arguments = [sys.executable, "-c", PROGRAM, str(then)]
    with subprocess.Popen(arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        output = b""
        try:
            while chunk := os.read(controller, 4096):
                output += chunk
        except OSError:  # Linux says so when the other side has closed
            pass
    os.close(controller)
    assert process.returncode == 0, output.decode()
    written = (line.split("\x1b[2K")[-1] for line in output.decode().splitlines())  # after the last erased display
    plain = (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line).rstrip() for line in written)  # no colours and cursor
    return [line for line in plain if line and not "\u2800" <= line[0] <= "\u28ff"]  # the spinner of the display


def test_a_terminal_shows_what_fits_it_and_new_headings_when_it_changes() -> None:
    wide, narrow = (fitting(width, COLUMNS) for width in (120, 80))
    lines = on_terminal(120, 80)
    first, second = headings(wide), headings(narrow)
    assert lines[: len(first)] == first
    assert lines[len(first) + 1 :][: len(second)] == second
    row, *evaluation = lines[len(first) + 1 + len(second) :]
    assert len(row) <= 80
    assert [line[10:] for line in evaluation] == [
        "after 2 steps, held-out: success 0.742 [0.688, 0.790], context 24.1,",
        "price 431, 3.44 s",
    ]
