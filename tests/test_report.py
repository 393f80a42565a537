import json
import math
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from builders import add_trajectory, ledger_episode, scored, trajectory, turn
from metrics_page import explained
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.core.errors import RunError
from condensegrpo.inspection.samples import SampleReader, spread
from condensegrpo.reporting.plots import SHARES, Series, alone, arm_style, series, smoothed, variants
from condensegrpo.reporting.run_report import ReportTracker, write_page
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder

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


def data_of(page: Path) -> dict[str, Any]:
    """The data in a page, as its script reads them."""
    text = page.read_text()
    start = text.index('id="data">') + len('id="data">')
    values: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])
    return values


def test_a_report_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    run_with(tmp_path, *FULL)
    assert write_page(tmp_path) == tmp_path / "report.html"
    text = (tmp_path / "report.html").read_text()
    assert text.count("http") == text.count("http-equiv") + text.count("http://www.w3.org/2000/svg")
    assert re.findall(r"(?:src|href)=\"", text) == []


def test_the_page_holds_every_metric_with_its_steps(tmp_path: Path) -> None:
    data = data_of(write_page(run_with(tmp_path, *FULL, {"step": 31, "loss": float("nan"), "success": 1 / 3})))
    curves = {key: (data["grids"][grid], values) for key, (grid, values) in data["curves"].items()}
    assert curves["eval/success"] == ([0, 30], [0.2, 0.9])
    assert curves["eval/success_low"] == ([0, 30], [0.15, 0.86])
    assert curves["eval/k20/success"] == ([0, 30], [0.1, 0.8])
    assert curves["success"][0] == list(range(1, 32))
    assert curves["success"][1][-2:] == [0.7, 0.333333]
    assert curves["loss"] == ([31], [None])
    assert data["variants"] == ["k20"]
    assert [diagram["title"] for diagram in data["diagrams"]] == ["Success", "Reward", "Turns", "Gradient norm"]
    assert data["state"].startswith("31 steps, written 20")


def test_a_curve_of_many_steps_is_thinned_and_keeps_its_last_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step":{step},"loss":1.0}}\n' for step in range(1, 5002)))
    (steps,) = data_of(write_page(tmp_path))["grids"]
    assert (steps[:3], steps[-1], len(steps)) == ([3, 6, 9], 5001, 1667)


def test_a_run_that_trains_writes_its_page_now_and_then_and_once_at_its_end(tmp_path: Path) -> None:
    run, written = RunFolder(tmp_path), tmp_path / "report.html"
    own, page = JsonlTracker(run.metrics), ReportTracker(run)
    page.flush()  # of a run that measured nothing
    run.metrics.touch()
    page.flush()  # of one that has begun a file for it
    shown = []
    for step, line in enumerate([{"success": 0.5}, {"success": 0.6}, {"eval/success": 0.7}], 1):
        own.log(step, line)
        page.log(step, line)
        shown.append(max(steps[-1] for steps in data_of(written)["grids"]))
    assert shown == [1, 1, 1]  # the others come too soon
    page.flush()
    assert max(steps[-1] for steps in data_of(written)["grids"]) == 3
    before = written.stat().st_ino
    page.flush()
    assert written.stat().st_ino == before  # nothing is new


def test_the_command_writes_the_page_of_a_run_at_any_time(tmp_path: Path) -> None:
    (run_with(tmp_path, {"step": 1, "loss": 1.0}) / "config.yaml").write_text("train: {steps: 60}\n")
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).stdout == f"{tmp_path / 'report.html'}\n"
    data = data_of(tmp_path / "report.html")
    assert data["state"].startswith("1 step of 60, written 20")
    assert data["configuration"] == [["train.steps", "60"]]


def test_of_a_run_that_cannot_be_written_the_page_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, page = run_with(tmp_path, {"step": 1, "loss": 1.0}), tmp_path / "page.html"
    (run / "config.yaml").write_text("train: {steps: 60}\n")
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)  # root may write everywhere
    refused = CliRunner().invoke(app, ["report", str(run)])
    assert str(refused.exception).endswith("its folder cannot be written. Write it elsewhere: --output FILE.")
    assert CliRunner().invoke(app, ["report", str(run), "--output", str(page)]).stdout == f"{page}\n"


def test_samples_of_many_steps_are_spread_and_stay_where_they_are() -> None:
    assert spread(range(5), 5) == (0, 1, 2, 3, 4)
    assert spread(range(6), 5) == (0, 2, 4, 5)
    assert spread(range(12), 5) == (0, 4, 8, 11)


def test_the_samples_of_a_file_are_a_correct_one_a_wrong_one_and_the_largest_context(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    for sample, (correct, turns) in enumerate([(1, 1), (1, 1), (0, 1), (1, 1), (1, 3)]):
        one = ledger_episode(["<note> 3 </note>"] * turns, ["+2"] * turns, id=f"1/0/{sample}", sample=sample)
        add_trajectory(run.trajectories(1), scored(one, correct, correct=correct))
    (samples,) = SampleReader(run).read()
    assert [(one["figures"].id, one["chosen"]) for one in samples.trajectories] == [
        ("1/0/0", "the first correct"),
        ("1/0/2", "the first not correct"),
        ("1/0/4", "the largest context"),
    ]
    assert (samples.step, samples.evaluation, samples.count) == (1, None, 5)
    assert [turn["strip"] for turn in samples.trajectories[2]["turns"]] == ["", "k", "kk"]
    assert [one["price"] for one in samples.trajectories] == [one["figures"].price for one in samples.trajectories]


def test_a_long_trajectory_keeps_its_first_turns_and_its_last(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    turns = [turn([1], [2], reply=f"{number} {'x' * 5000}") for number in range(8)]
    add_trajectory(run.trajectories(1), scored(trajectory(*turns, id="1/0/0"), 1.0))
    ((one,),) = (samples.trajectories for samples in SampleReader(run).read())
    assert [turn["turn"] for turn in one["turns"]] == [0, 1, 2, 7]
    assert one["turns"][0]["reply"].endswith("x… (2002 more characters)")


def test_every_style_and_script_of_a_page_is_in_the_package() -> None:
    root = Path(__file__).parent.parent
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in (root / "condensegrpo").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(root).parts)
            assert any(path.match(pattern) for pattern in patterns.get(package, ())), path


def test_every_share_that_is_drawn_is_explained() -> None:
    assert all(explained(metric) for shares in SHARES for metric, _ in shares.lines)


def test_a_run_name_cannot_break_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<script>&"
    folder.mkdir()
    page = write_page(run_with(folder, {"step": 1, "success": 1.0}))
    assert page.read_text().count("<script") == 2  # the data and the program
    assert "<title>&lt;script&gt;&amp;</title>" in page.read_text()
    assert data_of(page)["name"] == "<script>&"


def test_a_run_that_measured_nothing_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no metrics yet"):
        write_page(tmp_path)


def test_a_series_is_in_order_and_has_one_value_a_step() -> None:
    lines = [{"step": 2, "a": 1.0}, {"step": 1, "a": 3.0}, {"step": 3, "b": 9.0}, {"step": 2, "a": 2.0}, {"a": 7.0}]
    assert series(lines, "a") == Series((1, 2), (3.0, 2.0))
    assert series(lines, "c") == Series((), ())


def test_a_gap_of_a_series_is_a_step_that_was_logged_without_the_metric() -> None:
    gap = math.nan
    lines = [{"step": step, "loss": 1.0, **({"a": 2.0} if step in (2, 3, 5) else {})} for step in range(1, 8)]
    lines += [{"step": step, "eval/success": 0.5, "eval/k2/success": 0.5} for step in (0, 4)]
    lines += [{"step": 8, "eval/success": 0.5, "eval/k2/success": 0.5, "eval/k2/turns": 1.0}]
    lines += [{"step": 12, "eval/success": 0.5, "eval/k2/success": 0.5}, {"step": 16, "eval/k2/turns": 2.0}]
    assert repr(series(lines, "a")) == repr(Series((2, 3, 4, 5), (2.0, 2.0, gap, 2.0)))  # NaN differs from NaN
    assert series(lines, "eval/success").steps == (0, 4, 8, 12)  # not the steps of the training
    assert repr(series(lines, "eval/k2/turns")) == repr(Series((8, 12, 16), (1.0, gap, 2.0)))


def test_neither_the_mean_nor_the_line_crosses_a_gap() -> None:
    gap = math.nan
    assert repr(smoothed([1.0, gap, 3.0, 5.0], 3)) == repr((1.0, gap, 2.0, 4.0))
    assert alone([1.0, gap, 3.0, 5.0, gap, 2.0]) == [0, 5]
    assert alone([1.0]) == [0]


def test_variants_are_named_once_in_order() -> None:
    lines = [
        {"eval/success": 1.0, "eval/k50/success": 1.0, "eval/k20/success": 1.0},
        {"eval/k50/success": 1.0, "a/b/success": 1},
    ]
    assert variants(lines) == ("k50", "k20")


def test_every_arm_has_a_colour_and_a_marker_of_its_own() -> None:
    styles = [arm_style(number) for number in range(72)]
    assert len({(style["color"], style["marker"]) for style in styles}) == 72
    for key in ("color", "marker"):
        assert len({style[key] for style in styles[:8]}) == 8


def test_smoothing_looks_back_only() -> None:
    assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == (1.0, 2.0, 4.0, 6.0)
    assert smoothed([1.0, 3.0], 1) == (1.0, 3.0)
