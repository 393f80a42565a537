"""`condensegrpo runs`: the list, the compare_runs, and evaluations that are stored in a run folder."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from builders import ledger_episode, scored
from command import ENVIRONMENT, run, succeed
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.config.load import dump_config, load_config
from condensegrpo.core.errors import RunError
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.inspection.batches import choose
from condensegrpo.reporting.plots import COLOURS
from condensegrpo.reporting.runs import RunStatus, compare_runs, find_runs, sparklines, summary
from condensegrpo.storage.evaluations import new_name, store_evaluation, stored_evaluations
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder
from condensegrpo.storage.trajectories import Provenance, start_file, write_trajectories

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
AFTER = Evaluation(
    name="eval-1", problems=2, samples=1, seed=0, success=0.5, success_low=0.2, success_high=0.8, pass_at={1: 0.5},
    metrics={"context_tokens": 20.0, "turns": 3.0}, information=(), seconds=1.0,
)  # fmt: skip


def finished(path: Path, correct: Sequence[float], *overrides: str) -> RunFolder:
    """A run of two steps, evaluated on as many problems as there are values of ``correct``."""
    run = RunFolder.create(path)
    run.config.write_text(dump_config(load_config(QUICKSTART, ["train.steps=2", *overrides])))
    metrics = JsonlTracker(run.metrics)
    metrics.log(
        0, {"eval/success": 0.0, "eval/success_low": 0.0, "eval/success_high": 0.4, "eval/context_tokens": 30.0}
    )
    for step in (1, 2):
        metrics.log(step, {"success": step / 4, "context_tokens": 30.0 - step})
    mean = sum(correct) / len(correct)
    bounds = {"eval/success_low": mean - 0.1, "eval/success_high": mean + 0.1}
    metrics.log(2, {"eval/success": mean, **bounds, "eval/context_tokens": 25.0})
    start_file(run.evaluation(2, "held-out"))
    write_trajectories(run.evaluation(2, "held-out"), answers(correct))
    return run


def answers(correct: Sequence[float]) -> list[ScoredTrajectory]:
    return [
        scored(
            ledger_episode(["<answer> 7 </answer>"], [], id=f"2/{place}/0", group=f"held-{place}"), value, correct=value
        )
        for place, value in enumerate(correct)
    ]


def test_the_list_says_how_far_every_run_is_also_those_of_sweeps(tmp_path: Path) -> None:
    done = finished(tmp_path / "done", [1.0, 0.0])
    stopped = finished(tmp_path / "study/arm-seed0", [1.0], "train.steps=5")
    failed = finished(tmp_path / "study/arm-seed1", [1.0], "train.steps=5")
    failed.log.write_text("2026  run folder x\n2026  error: reading rows.jsonl: no such file\n2026  more of it\n")
    finished(tmp_path / "broken", [1.0]).config.write_text("train: {stepz: 1}\n")
    paths = list(find_runs(tmp_path))
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "broken", "done", "study/arm-seed0", "study/arm-seed1"
    ]  # fmt: skip
    with stopped.locked():
        lines = [summary(path, tmp_path) for path in paths]
    assert [line.status for line in lines] == [
        RunStatus.UNREADABLE, RunStatus.FINISHED, RunStatus.RUNNING, RunStatus.FAILED
    ]  # fmt: skip
    assert summary(stopped.path, tmp_path).status is RunStatus.STOPPED
    assert (lines[1].name, lines[1].step, lines[1].steps) == ("done", 2, 2)
    assert lines[1].success is not None
    assert lines[1].success.mean == 0.5
    assert lines[1].bytes == sum(file.stat().st_size for file in done.path.rglob("*") if file.is_file())
    os.utime(done.metrics, (0, 0))
    os.utime(done.config, (0, 0))
    assert summary(done.path, tmp_path).age > 365 * 86400

    out = succeed("runs", "--runs-dir", str(tmp_path))
    assert "study/arm-seed1  failed" in out
    assert max(map(len, out.splitlines())) <= 100
    listed = json.loads(succeed("runs", "--runs-dir", str(tmp_path), "--json"))["runs"]
    assert {each["name"]: each["status"] for each in listed}["done"] == "finished"


def test_a_comparison_has_settings_that_differ_and_differences_paired_by_problem(tmp_path: Path) -> None:
    first = finished(tmp_path / "a", [1.0, 0.0, 1.0, 0.0])
    second = finished(tmp_path / "b", [1.0, 1.0, 1.0, 0.0, 0.0], "condenser.options.keep_last=2", "seed=3", "name=b")
    compared = compare_runs([first, second])
    assert compared.runs == ("a", "b")
    assert compared.settings == {"seed": (0, 3), "condenser.options.keep_last": (1, 2)}
    ours = compared.evaluations[1]
    assert (ours.run, ours.step, ours.pairs) == ("b", 2, 4)  # the fifth problem is of b alone
    assert ours.difference is not None
    assert ours.difference.mean == 0.25
    assert compared.evaluations[0].difference is None

    plot = tmp_path / "plot.svg"
    out = succeed("runs", "compare", str(first.path), str(second.path), "--plot", str(plot))
    assert "condenser.options.keep_last" in out
    assert "  a  ▁" in out
    assert "+0.250 [" in out
    assert max(map(len, out.splitlines()[:-1])) <= 100
    drawn = plot.read_text()
    assert "largest context" in drawn
    marks = re.findall(r'<use xlink:href="#(m\w+)"[^>]*style="fill: (#\w+)', drawn)
    mine, other = ({mark for mark, drawn_in in marks if drawn_in == colour.lower()} for colour in COLOURS[:2])
    assert mine
    assert other
    assert not mine & other  # each run has marks of its own
    assert "task.options\n" not in out  # a section is compared by its keys
    for width in ("80", "60"):
        printed = CliRunner(env={"COLUMNS": width}).invoke(
            app, ["runs", "compare", str(first.path), str(finished(tmp_path / width / ("long" * 9), [1.0, 0.0]).path)]
        )
        lines = printed.output.splitlines()
        assert max(map(len, lines)) <= int(width)
        assert "  success [95 %]     0.500 [0.400, 0.600]" in lines
        assert "held-out: " + "long" * 9 in lines
    alone = succeed("runs", "compare", str(first.path))
    assert "0.25 → 0.50" in alone
    assert "setting" not in alone
    lines = first.metrics.read_text().splitlines(keepends=True)
    first.metrics.write_text("".join(lines[1:]))  # of a run that was not evaluated at its start
    assert succeed("runs", "compare", str(first.path)).splitlines()[2].split() == ["a", "▁", "0.500"]


def test_the_metrics_of_a_variant_are_its_own(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", [1.0])
    names = ("eval/success", "eval/k2/success", "eval/k20/success")
    JsonlTracker(run.metrics).log(2, dict.fromkeys(names, 0.5))
    metrics = {each.evaluation: each.metrics for each in compare_runs([run]).evaluations}
    assert metrics["k2"] == {"success": 0.5}


def test_a_stored_evaluation_is_shown_with_the_training_and_rewound_with_it(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", [1.0, 0.0])
    with new_name(run, 2) as name, new_name(run, 2) as other:  # two evaluations at a time
        assert (name, other) == ("eval-1", "eval-2")
        assert stored_evaluations(run) == ()
        store_evaluation(run, 2, AFTER, "condensegrpo eval demo")
    (stored,) = stored_evaluations(run)
    assert (stored.step, stored.problems, stored.metrics["success_high"]) == (2, 2, 0.8)
    assert not (run.evaluation_folder / "step_000002/eval-2.json").exists()  # it failed
    shown = compare_runs([run]).evaluations
    assert [(each.evaluation, each.success.mean) for each in shown] == [("held-out", 0.5), ("eval-1", 0.5)]
    run.truncate_after(1)
    assert stored_evaluations(run) == ()


@pytest.mark.parametrize(("condensers", "mean"), [(("last_k", "last_k"), 0.5), (("last_k", "truncate"), None)])
def test_evaluations_of_one_name_are_paired_if_both_were_made_as_their_runs_are(
    tmp_path: Path, condensers: tuple[str, str], mean: float | None
) -> None:
    """``condensegrpo eval`` calls the first one of every run eval-1, whatever it evaluates."""
    runs = [finished(tmp_path / "a", [1.0, 0.0]), finished(tmp_path / "b", [1.0, 1.0])]
    for each, correct, condenser in zip(runs, ([1.0, 0.0], [1.0, 1.0]), condensers, strict=True):
        config = load_config(each.config)
        known = Provenance(
            evaluation="eval-1", step=2, model="", condenser=condenser, seed=0,
            max_context_tokens=config.rollout.limits.max_context_tokens, temperature=config.evaluate.temperature or 0.0,
        )  # fmt: skip
        with new_name(each, 2) as name:
            write_trajectories(each.evaluation(2, name), answers(correct), known)
            store_evaluation(each, 2, AFTER, "condensegrpo eval")
    difference = compare_runs(runs).evaluations[-1].difference
    assert (difference.mean if difference else None) == mean


def test_a_part_of_the_reward_that_is_called_success_is_no_evaluation(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", [1.0])
    JsonlTracker(run.metrics).log(2, {"eval/reward/success": 0.25, "eval/reward/brevity": 0.1})
    JsonlTracker(run.metrics).log(2, {"eval/K=20/reward/success": 0.25})
    assert [each.evaluation for each in compare_runs([run]).evaluations] == ["held-out"]
    JsonlTracker(run.metrics).log(2, {"eval/reward/success": 0.25, "eval/reward/success_low": 0.1})  # a variant's
    assert [each.evaluation for each in compare_runs([run]).evaluations] == ["held-out", "reward"]


def test_a_metric_that_is_infinite_leaves_a_gap() -> None:
    assert sparklines([[(0, 0.0), (1, float("inf")), (2, 1.0)]], 3) == ["▁ █"]


def test_a_name_of_an_evaluation_stands_for_one_in_the_whole_run(tmp_path: Path) -> None:
    """After an older checkpoint was evaluated, the printed command showed the results of the newer one."""
    run = finished(tmp_path / "a", [1.0, 0.0])
    with new_name(run, 2) as name:
        store_evaluation(run, 2, AFTER, "condensegrpo eval demo")
    with new_name(run, 1) as other:
        assert (name, other) == ("eval-1", "eval-2")
        run.evaluation(1, other).touch()
        assert choose(run.path, None, other) == run.evaluation(1, other)
    with new_name(run, 1) as again:
        assert again == "eval-2"  # nothing was stored
    assert not list((run.evaluation_folder / "step_000001").iterdir())
    with suppress(RunError), new_name(run, 1) as failed:
        run.evaluation(1, failed).write_text("{}")
        raise RunError("storing it: the disk is full")
    assert [path.name for path in (run.evaluation_folder / "step_000001").iterdir()] == ["eval-2.parquet"]  # sampled
    with new_name(run, 2) as next_one:
        assert next_one == "eval-3"


def test_what_an_evaluation_began_is_removed_where_it_is_ended_at_once(tmp_path: Path) -> None:
    """Ctrl-C left a part of an evaluation that looked like a whole one, and a folder in the way of the next."""
    finished(tmp_path / "a", [1.0, 0.0])
    (tmp_path / "saved").mkdir()
    program = (
        "from pathlib import Path\nfrom condensegrpo.cli.process import exit_immediately\n"
        "from condensegrpo.storage.evaluations import kept_if_begun, new_name\n"
        "from condensegrpo.storage.run_folder import RunFolder\nrun = RunFolder(Path('a'))\n"
        "with kept_if_begun(Path('saved')), new_name(run, 2) as name:\n"
        "    run.evaluation(2, name).write_text('{}')\n    exit_immediately(2, None)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert [file.name for file in (tmp_path / "a/evaluations/step_000002").iterdir()] == ["held-out.parquet"]
    assert not (tmp_path / "saved").exists()


def test_links_to_runs_are_followed_and_every_run_has_its_own_name(tmp_path: Path) -> None:
    finished(tmp_path / "far" / "one", [1.0])
    finished(tmp_path / "runs" / "two", [1.0])
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "far")
    (tmp_path / "runs" / "latest").symlink_to("two")
    (tmp_path / "runs" / "round").symlink_to(tmp_path / "runs")
    found = [str(path.relative_to(tmp_path / "runs")) for path in find_runs(tmp_path / "runs")]
    assert found == ["two", "linked/one"]
    (tmp_path / "runs" / "a_study").mkdir()
    (tmp_path / "runs" / "a_study" / "base").symlink_to("../two")
    assert [path.name for path in find_runs(tmp_path / "runs")] == ["two", "one"]


def test_a_run_that_is_named_by_a_dot_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        finished(tmp_path / name, [1.0, 0.0])
    monkeypatch.chdir(tmp_path / "one")
    assert compare_runs([RunFolder(Path()), RunFolder(Path("../two"))]).runs == ("one", "two")


def test_curves_and_pictures_are_drawn_where_there_is_room_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        finished(tmp_path / name, [1.0, 0.0])
    monkeypatch.setitem(ENVIRONMENT, "COLUMNS", "30")  # type: ignore[arg-type]  # a dict
    assert "success" in succeed("runs", "compare", str(tmp_path / "one"), str(tmp_path / "two"))
    for plot, wanted in (("curves", "ends in .png or .svg"), ("none/x.png", "there is no folder none")):
        refused = run("runs", "compare", str(tmp_path / "one"), "--plot", plot)
        assert refused.returncode == 2
        assert wanted in " ".join(refused.stderr.split())


def test_curves_share_their_scale_and_their_steps() -> None:
    assert sparklines([[(0, 0.0), (1, 1.0)], [(0, 1.0), (2, 1.0)]], 3) == ["▁█ ", "█ █"]
    assert sparklines([[], [(5, 2.0)]], 2) == ["  ", "▁ "]
    assert sparklines([[], []], 2) == ["", ""]


def test_a_folder_without_runs_says_what_to_do(tmp_path: Path) -> None:
    assert "condensegrpo train quickstart" in succeed("runs", "--runs-dir", str(tmp_path))
    missing = run("runs", "--runs-dir", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "there is no such folder. Give one with --runs-dir." in missing.stderr
