"""The console of a run: what a pipe, log.txt and terminals of several widths show."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from datetime import datetime
from pathlib import Path

import pytest
from command import ENVIRONMENT
from metrics_page import tables

from condensegrpo.cli.console import COLUMNS, GAP, HEADING_EVERY, TrainingConsole, fitting, headings, row

METRICS = {
    "success": 0.5,
    "reward": -0.125,
    "format_valid": 1.0,
    "context_tokens": 1234.56,
    "turns": 3.25,
    "output_tokens": 87.0,
    "groups_of_equal_reward": 0.25,
    "groups_dropped": 0.0,
    "masked": 0.0625,
    "trajectories_without_advantage": 0.375,
    "correct_with_negative_advantage": 0.1,
    "weight/correct": 0.6,
    "weight/gini": 0.33,
    "ratio": 1.0,
    "grad_norm": 0.0123,
    "seconds": 12.34,
}
IMPORTANT = [  # at 80 columns
    "success", "reward", "context tokens", "turns", "no signal", "no grad", "correct adv<0", "grad norm",
    "step seconds",
]  # fmt: skip


def logged(file: Path) -> list[str]:
    """The lines of a log without their times."""
    return [line.split("  ", 1)[1] for line in file.read_text().splitlines()]


def shown(width: int) -> list[str]:
    return [column.heading for column in fitting(width)]


def test_every_column_has_its_metric_and_its_cells_stand_under_their_headings() -> None:
    (upper, lower), line = headings(COLUMNS).splitlines(), row(7, METRICS, COLUMNS)
    assert line.split() == [
        "7", "0.50", "-0.125", "1.00", "1234.6", "3.2", "87", "0.25", "0.00", "0.06", "0.38", "0.10", "0.60", "0.33",
        "1.0000", "1.2e-02", "12.3",
    ]  # fmt: skip
    assert len(upper) == len(lower) == len(line) <= 160
    end = len("step")
    for column in COLUMNS:
        end += GAP + column.width
        first, last = ("", *column.heading.split())[-2:]
        assert upper[:end].endswith(f" {first}")
        assert lower[:end].endswith(f" {last}")
        assert all(text[end - 1] != " " and text[end : end + 1] in ("", " ") for text in (line, lower))


def test_what_was_not_measured_is_a_dash() -> None:
    assert row(7, {"rows": 0.0, "success": 0.5}, COLUMNS).split() == ["7", "0.50", *["–"] * (len(COLUMNS) - 1)]


def test_a_narrow_terminal_loses_the_least_important_columns() -> None:
    assert shown(80) == IMPORTANT
    assert set(IMPORTANT) < set(shown(120))
    assert shown(160) == [column.heading for column in COLUMNS]
    assert shown(1) == []


@pytest.mark.parametrize("width", range(1, 170))
def test_a_row_never_wraps_and_a_wider_terminal_never_shows_less(width: int) -> None:
    columns = fitting(width)
    assert all(len(line) <= max(width, 4) for line in headings(columns).splitlines())
    assert len(row(7, METRICS, columns)) <= max(width, 4)
    assert set(columns) <= set(fitting(width + 1))


def test_no_two_columns_are_equally_important() -> None:
    assert sorted(column.rank for column in COLUMNS) == list(range(1, len(COLUMNS) + 1))
    assert all(column.width >= len(word) for column in COLUMNS for word in column.heading.split())
    assert all(len(column.heading.split()) <= 2 for column in COLUMNS)


def test_a_pipe_and_the_log_get_all_columns(tmp_path: Path) -> None:
    pipe = io.StringIO()
    with TrainingConsole(steps=30, log=tmp_path / "log.txt", stream=pipe) as console:
        for step in range(1, HEADING_EVERY + 2):
            console.step(step, METRICS)
    lines = logged(tmp_path / "log.txt")
    assert lines == pipe.getvalue().splitlines()
    assert len(lines) == HEADING_EVERY + 5  # headings of two lines at the top, and again after so many rows
    assert lines[:2] == lines[HEADING_EVERY + 2 :][:2] == headings(COLUMNS).splitlines()
    assert lines[-1] == row(HEADING_EVERY + 1, METRICS, COLUMNS)


def test_every_line_of_the_log_begins_with_its_time(tmp_path: Path) -> None:
    before = datetime.now().astimezone().replace(microsecond=0)
    with TrainingConsole(steps=30, log=tmp_path / "log.txt", stream=io.StringIO()) as console:
        console.say("run folder runs/x")
        console.phase("loading DeepSpeed", None)
        console.step(1, METRICS)
        console.record("error: two\nlines")
    times, texts = zip(*(line.split("  ", 1) for line in (tmp_path / "log.txt").read_text().splitlines()), strict=True)
    assert texts[:2] == ("run folder runs/x", "loading DeepSpeed …")
    assert texts[2:] == (*headings(COLUMNS).splitlines(), row(1, METRICS, COLUMNS), "error: two", "lines")
    assert all(before <= datetime.fromisoformat(time) <= datetime.now().astimezone() for time in times)


def test_the_page_explains_every_heading() -> None:
    assert [line[:2] for line in tables()["The console"]] == [(column.heading, column.metric) for column in COLUMNS]


PROGRAM = """
import fcntl, struct, sys, termios
from pathlib import Path
from test_console import METRICS
from condensegrpo.cli.console import TrainingConsole

with TrainingConsole(steps=9, log=Path(sys.argv[1])) as console:
    console.step(1, METRICS)
    console.step(2, METRICS)
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, int(sys.argv[2]), 0, 0))  # a hand draws at the window
    console.step(3, METRICS)
"""


def on_terminal(width: int, then: int, log: Path) -> list[str]:
    """The table as a real terminal of so many columns shows it, and after it got another width."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(Path(__file__).parent)}
    arguments = [sys.executable, "-c", PROGRAM, str(log), str(then)]
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
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line) for line in written]  # without colours and cursor
    table = {line for columns in (fitting(width), fitting(then)) for line in headings(columns).splitlines()}
    return [line for line in plain if line in table or line.lstrip()[:1].isdigit()]


@pytest.mark.parametrize(("width", "then"), [(80, 80), (120, 80), (160, 120)])
def test_a_terminal_shows_what_fits_it_and_new_headings_when_it_changes(tmp_path: Path, width: int, then: int) -> None:
    before, after = fitting(width), fitting(then)
    assert on_terminal(width, then, tmp_path / "log.txt") == [
        *headings(before).splitlines(),
        row(1, METRICS, before),
        row(2, METRICS, before),
        *([] if before == after else headings(after).splitlines()),
        row(3, METRICS, after),
    ]
    assert logged(tmp_path / "log.txt")[:2] == headings(COLUMNS).splitlines()
