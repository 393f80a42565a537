import base64
import re
from pathlib import Path

import pytest
from metrics_page import explained

from condensegrpo.core.errors import RunError
from condensegrpo.reporting.run_report import SHARES, Series, series, smoothed, variants, write_report
from condensegrpo.storage.trackers import JsonlTracker

PNG = b"\x89PNG\r\n\x1a\n"


def run_with(tmp_path: Path, *lines: dict[str, float]) -> Path:
    for line in lines:
        JsonlTracker(tmp_path / "metrics.jsonl").log(int(line["step"]), {k: v for k, v in line.items() if k != "step"})
    return tmp_path


FULL = (
    {"step": 0, "eval/success": 0.2, "eval/success_low": 0.15, "eval/success_high": 0.25, "eval/k20/success": 0.1},
    *(
        {"step": step, "success": 0.2 + step / 60, "reward": 0.01, "turns": 5.0, "grad_norm": 0.5}
        for step in range(1, 31)
    ),
    {"step": 30, "eval/success": 0.9, "eval/success_low": 0.86, "eval/success_high": 0.94, "eval/k20/success": 0.8},
)


def test_a_report_is_a_picture_and_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    image, page = write_report(run_with(tmp_path, *FULL))
    assert (image, page) == (tmp_path / "report.png", tmp_path / "report.html")
    assert image.read_bytes().startswith(PNG)
    text = page.read_text()
    embedded = re.search(r'src="data:image/png;base64,([^"]+)"', text)
    assert embedded is not None
    assert base64.b64decode(embedded[1]) == image.read_bytes()
    assert "http" not in text
    assert re.findall(r"(?:src|href)=\"(?!data:)", text) == []


def test_the_page_tells_first_and_last_values(tmp_path: Path) -> None:
    _, page = write_report(run_with(tmp_path, *FULL))
    text = page.read_text()
    assert (
        "<td>Success (share of trajectories), held-out</td><td>0.2 [0.15, 0.25]</td><td>0.9 [0.86, 0.94]</td>" in text
    )
    assert "<td>Success (share of trajectories), held-out k20</td><td>0.1</td><td>0.8</td><td>0 – 30</td>" in text
    assert "<td>Success (share of trajectories), training</td><td>0.2167</td><td>0.7</td><td>1 – 30</td>" in text
    assert "Output length" not in text


def test_the_page_tells_who_got_the_credit(tmp_path: Path) -> None:
    lines = [{"step": step, "weight/correct": step / 8, "masked": 0.5 - step / 8} for step in (1, 2, 3, 4)]
    _, page = write_report(run_with(tmp_path, *lines))
    text = page.read_text()
    assert "<td>Credit: weight on correct</td><td>0.125</td><td>0.5</td><td>1 – 4</td>" in text
    assert "<td>Signal: masked trajectories</td><td>0.375</td><td>0</td><td>1 – 4</td>" in text
    assert "Gini" not in text  # a run of an earlier version did not measure it


def test_every_share_that_is_drawn_is_explained() -> None:
    assert all(explained(metric) for shares in SHARES for metric, _ in shares.lines)


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "loss": 0.5},
        {"step": 1, "success": 1.0},
        {"step": 0, "eval/success": 0.5},
        {"step": 1, "masked": 0.0},
    ],
)
def test_absent_metrics_leave_empty_diagrams(tmp_path: Path, line: dict[str, float]) -> None:
    image, _ = write_report(run_with(tmp_path, line))
    assert image.read_bytes().startswith(PNG)


def test_a_run_name_cannot_break_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<script>&"
    folder.mkdir()
    _, page = write_report(run_with(folder, {"step": 1, "success": 1.0}))
    assert "<script>" not in page.read_text()
    assert "<h1>&lt;script&gt;&amp;</h1>" in page.read_text()


def test_a_run_that_measured_nothing_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no metrics yet"):
        write_report(tmp_path)


def test_an_image_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run_with(tmp_path, {"step": 1, "success": 1.0})
    (tmp_path / "report.png").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"report\.png: No space left on device"):
        write_report(tmp_path)


def test_a_series_is_in_order_and_has_one_value_a_step() -> None:
    lines = [{"step": 2, "a": 1.0}, {"step": 1, "a": 3.0}, {"step": 3, "b": 9.0}, {"step": 2, "a": 2.0}, {"a": 7.0}]
    assert series(lines, "a") == Series((1, 2), (3.0, 2.0))
    assert series(lines, "c") == Series((), ())


def test_variants_are_named_once_in_order() -> None:
    lines = [
        {"eval/success": 1.0, "eval/k50/success": 1.0, "eval/k20/success": 1.0},
        {"eval/k50/success": 1.0, "a/b/success": 1},
    ]
    assert variants(lines) == ("k50", "k20")


def test_smoothing_looks_back_only() -> None:
    assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == (1.0, 2.0, 4.0, 6.0)
    assert smoothed([1.0, 3.0], 1) == (1.0, 3.0)
