"""`condensegrpo sweep`: runs of a study in processes of their own, stopped and killed and continued."""

import json
import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from command import run, succeed
from runs import sampled
from swept import start_sweep

from condensegrpo.config.load import find_config, load_config
from condensegrpo.config.resumed import store_configuration
from condensegrpo.config.study import load_study
from condensegrpo.core.errors import ConfigError
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.studies.lab.results import markdown, study_figures, write_results
from condensegrpo.studies.lab.study import load_lab_study, write_pilots
from condensegrpo.training.sweep import StudyRun, adopt_warm_start, results_table, runs_of

STUDY = """
name: two_by_two
question: Does it matter?
config: quickstart
seeds: [0, 1]
overrides:
  - model.new.layers=1
  - "warm_start={steps: 2, turns_per_step: 4, probe_target: null}"
  - "train={steps: 2, problems_per_step: 2, samples_per_problem: 2, eval_every: 1, save_every: 1}"
  - evaluate.problems=4
  - "evaluate.variants={K=9: [task.options.min_ops=9, task.options.max_ops=9, rollout.limits.max_turns=11]}"
arms:
  outcome: [algorithm.advantage.estimator=grpo, algorithm.advantage.context_anchors=null]
  efficient: []
report: {metrics: [turns]}
predictions:
  - {claim: efficient is never right without training, arm: efficient, figure: success, above: 0.99}
  - {claim: contexts fit, arm: efficient, minus: outcome, times: 2, figure: context_tokens, evaluation: K=9, below: 0}
  - {claim: an episode ends, arm: outcome, figure: calls, below: 1000}
pilots: {seeds: [7], overrides: [evaluate.skip=4]}
"""
RUNS = ("outcome-seed0", "efficient-seed0", "outcome-seed1", "efficient-seed1")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(STUDY)
    return path


@pytest.fixture(scope="module")
def finished(study: Path) -> Path:
    out = study.parent / "uninterrupted"
    end(start_sweep(study, out, parallel=1), 0)
    write_results(load_lab_study(study), out)
    return out


def end(process: BaseProcess, code: int) -> None:
    process.join(120)
    assert process.exitcode == code


def appears(path: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert process.exitcode is None
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_sweep_writes_a_table_of_success_and_context_by_arm_and_evaluation(finished: Path) -> None:
    head, _, *rows = (finished / "summary.md").read_text().splitlines()
    assert head == "| arm | evaluation | seeds | success [95 %] | largest context, tokens [95 %] |"
    cells = [row.strip("| ").split(" | ") for row in rows]
    names = [(arm, evaluation) for arm in ("outcome", "efficient") for evaluation in ("held-out", "K=9")]
    assert [(arm, evaluation, seeds) for arm, evaluation, seeds, *_ in cells] == [(*each, "2") for each in names]
    arms = json.loads((finished / "results.json").read_text())["evaluations"][0]["arms"]
    assert float(cells[0][3].split()[0]) == pytest.approx(arms[0]["success"][0], abs=1e-3)
    tokens = arms[0]["by_seed"]["context_tokens"]
    half = 12.706 * abs(tokens["0"] - tokens["1"]) / 2  # t(1) times the standard error of two values
    mean, low, high = (float(part.strip("[],")) for part in cells[0][4].split())
    assert (mean - low, high - mean) == pytest.approx((half, half), abs=0.11)


def test_the_results_of_a_study_are_a_table_a_plot_and_figures_of_every_arm(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert [evaluation["name"] for evaluation in results["evaluations"]] == ["held-out", "K=9"]
    for evaluation in results["evaluations"]:
        assert [(arm["arm"], arm["seeds"]) for arm in evaluation["arms"]] == [
            ("outcome", [0, 1]),
            ("efficient", [0, 1]),
        ]
        assert [comparison["arm"] for comparison in evaluation["comparisons"]] == ["efficient"]
        figures = evaluation["arms"][0]["by_seed"]
        assert {"success", "context_tokens", "calls", "prompt_tokens", "prompt_tokens_uncached", "turns"} <= set(
            figures
        )
        assert all(set(values) == {"0", "1"} for values in figures.values())
        assert evaluation["comparisons"][0]["paired"]  # the arms share their warm starts
    wrong, fits, few = results["predictions"]
    assert wrong["verdict"] in ("fails", "undecided")  # four problems
    assert (fits["predicted"], fits["paired"]) == ("efficient − 2 × outcome in context_tokens < 0", True)
    assert fits["found"][0] == pytest.approx(sum(fits["by_seed"].values()) / 2)
    assert few["verdict"] == "holds"
    assert fits["found"][0] == pytest.approx(sum(fits["by_seed"].values()) / 2)
    assert [point["step"] for point in results["curves"][0]["points"]] == [0, 1, 2]
    table = (finished / "results.md").read_text()
    assert "## K=9: 4 problems" in table
    assert "**Fewer than 10 seeds** (2 of an arm)" in table
    assert "| contexts fit | efficient − 2 × outcome in context_tokens < 0 (K=9) | -" in table
    assert "| arm | by seed |" in table
    assert "| efficient | 2 | " in table
    assert (finished / "results.png").stat().st_size > 10_000


def test_a_prediction_has_no_verdict_before_all_runs_of_its_arms_are_done(finished: Path, study: Path) -> None:
    lab = load_lab_study(study)
    runs = runs_of(lab, finished)[:3]  # of efficient the second seed is missing
    figures = study_figures(lab, [run.config for run in runs], [run.arm for run in runs])
    assert [each.verdict is None for each in figures.predictions] == [True, True, False]
    page = markdown(figures)
    assert "(held-out) | – | 1 of 2 runs: no verdict before all seeds are done | – | – |" in page
    assert "(K=9) | – | 3 of 4 runs: no verdict before all seeds are done | – | – |" in page


def test_arms_with_the_same_warm_start_make_it_once_and_sample_what_they_sample_alone(
    finished: Path, tmp_path: Path
) -> None:
    warm_starts = {name: "warm start, round 1" in (finished / name / "log.txt").read_text() for name in RUNS}
    assert warm_starts == {RUNS[0]: True, RUNS[1]: False, RUNS[2]: True, RUNS[3]: False}
    alone = tmp_path / "study.yaml"
    outcome = next(line for line in STUDY.splitlines(keepends=True) if line.startswith("  outcome:"))
    one_arm = STUDY.partition("predictions:")[0].replace(outcome, "")
    alone.write_text(one_arm.replace("seeds: [0, 1]", "seeds: [1]"))
    end(start_sweep(alone, tmp_path / "out", parallel=1), 0)
    assert sampled(tmp_path / "out/efficient-seed1", 2) == sampled(finished / "efficient-seed1", 2)


def test_a_warm_start_is_adopted_without_the_checkpoints_that_its_run_is_still_removing(tmp_path: Path) -> None:
    config = load_config(find_config("quickstart"), [f"runs_dir={tmp_path}"])
    warm = RunFolder.create(tmp_path / "warm")
    for name in ("new", "warm", ".round-1", ".warm-checkpoints"):
        (warm.path / "origin" / name).mkdir(parents=True)
    (warm.path / "origin/.warm-checkpoints/model.pt").symlink_to("vanished")  # listed, and gone when it is copied
    assert adopt_warm_start(RunFolder(tmp_path / "other"), config, [(warm, config)])
    assert sorted(path.name for path in (tmp_path / "other/origin").iterdir()) == ["new", "warm"]


def test_a_killed_sweep_takes_its_runs_with_it_and_continues_to_the_same_results(finished: Path, study: Path) -> None:
    out = study.parent / "killed"
    for name in RUNS[2:]:  # as if the sweep had come that far: the order of the runs does not matter
        shutil.copytree(finished / name, out / name)
    log = (out / RUNS[2] / "log.txt").stat().st_mtime_ns
    process = start_sweep(study, out, parallel=2)
    appears(out / "efficient-seed0/checkpoints/step_000001/manifest.json", process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    time.sleep(0.2)  # the kernel ends the runs with the sweep
    metrics = [(out / name / "metrics.jsonl").read_bytes() for name in RUNS[:2]]
    time.sleep(0.5)
    assert [(out / name / "metrics.jsonl").read_bytes() for name in RUNS[:2]] == metrics
    assert (out / "efficient-seed0/report.html").is_file()  # written while it trained

    end(start_sweep(study, out, parallel=2), 0)
    write_results(load_lab_study(study), out)
    assert (out / "summary.md").read_bytes() == (finished / "summary.md").read_bytes()
    assert (out / "results.json").read_bytes() == (finished / "results.json").read_bytes()
    assert (out / "results.md").read_bytes() == (finished / "results.md").read_bytes()
    assert all(sampled(out / name, 2) == sampled(finished / name, 2) for name in RUNS)
    assert (out / RUNS[2] / "log.txt").stat().st_mtime_ns == log  # skipped: it was finished
    assert sorted(path.name for path in out.glob("*-seed*") if path.is_dir()) == sorted(RUNS)


def test_ctrl_c_lets_a_run_save_so_that_the_sweep_can_continue(study: Path, tmp_path: Path) -> None:
    one = tmp_path / "study.yaml"
    one.write_text(STUDY.replace("seeds: [0, 1]", "seeds: [0]").replace("train={steps: 2,", "train={steps: 30,"))
    out = tmp_path / "out"
    process = start_sweep(one, out, parallel=1)
    appears(out / "outcome-seed0/checkpoints/step_000001/manifest.json", process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    end(process, 130)
    assert "stopped. To continue" in (out / "outcome-seed0.1").read_text()
    assert not (out / "efficient-seed0").exists()


def test_a_dry_run_lists_what_would_run(finished: Path, study: Path, tmp_path: Path) -> None:
    new = succeed("sweep", str(study), "--out", str(tmp_path), "--dry-run")
    assert "outcome-seed0            waiting   condensegrpo train " in new
    assert "4 runs; 8 steps left" in new
    assert f"studies.lab check {study}" in new  # it has predictions
    assert list(tmp_path.iterdir()) == []
    metrics = finished / "efficient-seed1/metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text("".join(whole.splitlines(keepends=True)[:-1]))  # as if it ended before its last evaluation
    try:
        done = succeed("sweep", str(study), "--out", str(finished), "--dry-run", "--parallel", "2")
    finally:
        metrics.write_text(whole)
    assert f"efficient-seed1          stopped   condensegrpo train --resume {finished}/efficient-seed1" in done
    assert "4 runs; 0 steps left" in done


def test_a_plug_in_or_writer_that_was_edited_since_is_named_with_its_runs(
    finished: Path, study: Path, tmp_path: Path
) -> None:
    plugin, environment = tmp_path / "brief.py", finished / "efficient-seed1/environment.json"
    plugin.write_text("length = 3\n")
    writer, removed = tmp_path / "writer", finished / "efficient-seed1/checkpoints/step_000000"
    writer.mkdir()
    (writer / "config.json").write_text("{}")
    before = environment.read_text()
    inputs = {
        "plugins": {str(plugin): "the hash of what it was"},
        "writers": {str(writer): "the hash of what it was", str(removed): "the hash of what is not there"},
    }
    environment.write_text(json.dumps({**json.loads(before), **inputs}))
    try:
        done = run("sweep", str(study), "--out", str(finished), "--dry-run")
    finally:
        environment.write_text(before)
    said = "".join(done.stderr.split())  # wrapped
    for edited in (plugin, writer):
        assert f"{edited}waseditedsincetheserunswerestarted:efficient-seed1.Removetheirfolders" in said
    assert removed.name not in said


def test_pilots_have_the_arms_of_the_study_and_other_seeds(study: Path, tmp_path: Path) -> None:
    file = write_pilots(load_lab_study(study), tmp_path / "pilots")
    listed = succeed("sweep", str(file), "--out", str(tmp_path), "--dry-run")
    assert [line.split()[0] for line in listed.splitlines()[:-1]] == ["outcome-seed7", "efficient-seed7"]
    assert "evaluate.skip=4" in listed


def test_a_run_with_a_file_of_another_folder_is_not_continued(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condenser = "condenser={name: summary, options: {template: note.txt}}"
    variant = "evaluate.variants.again=[condenser.options.template=note.txt]"
    with_file, out = Path("study.yaml"), tmp_path / "out"
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        Path("note.txt").write_text(f"What do you know {folder}?")
        with_file.write_text(STUDY.replace("arms:\n", f'  - "{condenser}"\n  - "{variant}"\narms:\n', 1))
    monkeypatch.chdir(tmp_path / "before")
    loaded, run = load_study(with_file), RunFolder(out / RUNS[0])
    run.path.mkdir(parents=True)
    store_configuration(run, loaded.config_of("outcome", 0, out), first_step=0)
    assert [run.name for run in runs_of(loaded, out)] == list(RUNS)
    monkeypatch.chdir(tmp_path / "after")
    with pytest.raises(ConfigError, match=r"condenser\.options\.template .*before/note\.txt.* → .*after/note\.txt"):
        runs_of(load_study(with_file), out)


def test_a_run_of_another_configuration_is_not_continued(finished: Path, study: Path, tmp_path: Path) -> None:
    other = tmp_path / "study.yaml"
    other.write_text(STUDY.replace("samples_per_problem: 2", "samples_per_problem: 3"))
    done = run("sweep", str(other), "--out", str(finished), "--dry-run")
    assert done.returncode == 2
    assert "outcome-seed0 was started with another configuration:" in done.stderr
    assert "train.samples_per_problem  2 → 3" in done.stderr


def test_results_over_few_seeds(tmp_path: Path) -> None:
    """Success stays inside [0, 1], tokens above 0, and one seed shows no interval."""
    runs = []
    for arm, seed, success, tokens in (("two", 0, 0.5, 60.0), ("two", 1, 0.75, 40.0), ("one", 0, 0.25, 50.0)):
        config = load_config(find_config("quickstart"), [f"runs_dir={tmp_path}", f"name={arm}-{seed}"])
        runs.append(StudyRun(arm=arm, seed=seed, config=config, arguments=()))
        folder = RunFolder.create(runs[-1].folder.path)
        line = {"step": 60, "eval/success": success, "eval/context_tokens": tokens}
        folder.metrics.write_text(json.dumps(line) + "\n")
    # the t interval of two seeds reaches 12.706 times half their difference: 1.588 and 127.1
    assert results_table(runs).splitlines()[2:] == [
        "| two | held-out | 2 | 0.625 [0.000, 1.000] | 50.0 [0.0, 177.1] |",
        "| one | held-out | 1 | 0.250 | 50.0 |",
    ]
