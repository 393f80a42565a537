"""Training through the command line: real DeepSpeed, real models, real subprocesses."""

import json
import math
import os
import re
import shutil
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import TINY, run, start, succeed, succeed_on_two_ranks
from metrics_page import missing, unexplained
from runs import (
    TWO_RANKS,
    assert_equal_runs,
    first_update,
    from_the_start_of,
    one_step,
    sampled,
    undisturbed,
    wait_for,
    wait_for_error,
    wait_for_phase,
)
from waiting import eventually

from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.observer import Observer
from condensegrpo.learner import checkpoint
from condensegrpo.storage.evaluations import stored_evaluations
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_trajectories, write_trajectories
from condensegrpo.training.initial_policy import WarmStart


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps without interruption."""
    runs = tmp_path_factory.mktemp("runs")
    assert succeed("train", *TINY, f"runs_dir={runs}", "name=whole", "--quiet") == ""
    return runs / "whole"


def test_every_metric_of_a_run_is_explained(finished: Path) -> None:
    lines = read_metrics(finished / "metrics.jsonl")
    assert unexplained(lines) == set()
    assert [missing(line) for line in lines if "loss" in line] == [set()] * 4


def test_a_run_leaves_everything_that_its_folder_promises(finished: Path) -> None:
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "log.txt", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    steps = [line for line in read_metrics(finished / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {len(sampled(finished, step)) for step in (1, 2, 3, 4)} == {16}


def test_metrics_hold_evaluations_before_between_and_after(finished: Path) -> None:
    lines = [line for line in read_metrics(finished / "metrics.jsonl") if "eval/success" in line]
    assert [line["step"] for line in lines] == [0, 2, 4]


def test_the_sampler_took_the_learners_weights_after_every_step(finished: Path) -> None:
    """verl-tool and trl#3185: a sampler that never hears of the update samples from the base model for ever."""
    for step in (1, 2, 3, 4):
        read = read_trajectories(finished / f"trajectories/step_{step:06d}.parquet")
        assert {turn.policy_version for one in read for turn in one.trajectory.turns} == {step - 1}


def test_sampler_and_learner_agree_on_every_log_probability(finished: Path) -> None:
    ratios = [line["ratio_max"] for line in read_metrics(finished / "metrics.jsonl") if line.get("tokens")]
    assert ratios
    assert all(ratio == pytest.approx(1, abs=1e-4) for ratio in ratios)


def test_the_trajectories_of_a_run_keep_every_invariant(finished: Path) -> None:
    out = succeed("inspect-trajectory", str(finished), "--check")
    assert out.count("no breach") == 4 + 3  # every step and evaluation, not only the last


def test_a_breach_in_an_early_step_is_found(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "bent")
    file = tmp_path / "bent/trajectories/step_000001.parquet"
    write_trajectories(
        file,
        [replace(one, trajectory=replace(one.trajectory, answer=None)) for one in read_trajectories(file)],
    )
    done = run("inspect-trajectory", str(tmp_path / "bent"), "--check")
    assert done.returncode == 1
    assert "step_000001.parquet" in done.stdout


def test_a_killed_run_goes_on_as_if_it_had_not_been(finished: Path, tmp_path: Path) -> None:
    """Killed before its first checkpoint, which a script that is started again continues, and after it."""
    trackers = "trackers=[tensorboard, tests/failing_tracker.py:Failing]"
    line = ("train", *TINY, f"runs_dir={tmp_path}", "name=killed", "--continue")
    for step, more in ((1, ()), (3, (trackers,))):
        process = start(*line, *more)
        wait_for(tmp_path / f"killed/trajectories/step_{step:06d}.parquet", process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        refused = run(*line, *more, "condenser.options.keep_last=2")
        assert "condenser.options.keep_last  1 → 2" in refused.stderr
    assert not (tmp_path / "killed/checkpoints/step_000004").exists()
    out = succeed("train", "--resume", str(tmp_path / "killed"))
    assert "resumed after step 2" in out
    assert_equal_runs(finished, tmp_path / "killed")
    assert_tracked(tmp_path / "killed")


def assert_tracked(run_folder: Path) -> None:
    """Every step is in the event files of TensorBoard once, and a tracker that fails is shown once a start."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = (run_folder / "log.txt").read_text()
    failing = f"tracker {Path('tests/failing_tracker.py').resolve()}:Failing"
    assert log.count(f"{failing}: RuntimeError: no connection") == 2
    assert log.count(f"{failing} lost 4 of 4 records") == 1  # after the resume
    events = EventAccumulator(str(run_folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval/success")] == [0, 2, 4]
    assert {"config/text_summary", "trajectories/held-out/text_summary"} <= set(events.Tags()["tensors"])


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(finished: Path, tmp_path: Path) -> None:
    process = start("train", *TINY, "train.save_every=0", f"runs_dir={tmp_path}", "name=stopped")
    wait_for(tmp_path / "stopped/trajectories/step_000002.parquet", process)  # the step's evaluation must not be lost
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "finishing " in err
    assert ", then saving; press Ctrl-C again to quit now" in err
    assert f"condensegrpo train --resume {tmp_path / 'stopped'}" in out
    succeed("train", "--resume", str(tmp_path / "stopped"))
    assert_equal_runs(finished, tmp_path / "stopped")


def test_ctrl_c_twice_leaves_at_once(tmp_path: Path) -> None:
    long = ("warm_start.steps=1", "evaluate.problems=256", "evaluate.samples=100")  # an evaluation of minutes
    process = start("train", *TINY, *long, f"runs_dir={tmp_path}", "name=left")
    wait_for_phase(tmp_path / "left", "evaluating", process)
    process.send_signal(signal.SIGINT)
    wait_for_error("press Ctrl-C again to quit now", process)
    time.sleep(1.0)
    assert process.poll() is None  # still at it: once means to finish first
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=240) == -signal.SIGINT  # not at the end of the evaluation


def test_a_run_killed_in_its_last_evaluation_makes_that_again_and_no_step(finished: Path, tmp_path: Path) -> None:
    folder, long = tmp_path / "killed", ("evaluate.problems=256", "evaluate.samples=100")  # an evaluation of minutes
    only_at_the_end = ("train.eval_on_start=false", "train.eval_every=0", "train.save_every=0", "train.steps=1")
    process = start(*from_the_start_of(finished, folder, *only_at_the_end, *long))
    wait_for_phase(folder, "evaluating held-out", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    steps, credit = read_metrics(folder / "metrics.jsonl"), (folder / "credit/step_000001.parquet").stat().st_mtime_ns
    out = succeed("train", "--resume", str(folder), "evaluate.problems=1", "evaluate.samples=1")
    assert "no step is left to train" not in out
    lines = read_metrics(folder / "metrics.jsonl")
    assert lines[:-1] == steps
    assert lines[-1].keys() >= {"step", "eval/success"}
    assert (folder / "credit/step_000001.parquet").stat().st_mtime_ns == credit
    assert "no step is left to train: train.steps is 1" in succeed("train", "--resume", str(folder))


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("seed=9", "seed cannot change any more"),
        ("condenser.options.keep_lst=3", "keep_lst"),
    ],
)
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(finished: Path, override: str, wanted: str) -> None:
    before = (finished / "config.yaml").read_text()
    done = run("train", "--resume", str(finished), override)
    assert done.returncode in (1, 2)
    assert wanted in done.stderr.lower()
    assert (finished / "config.yaml").read_text() == before


def test_a_resume_that_changes_what_is_learned_needs_permission_and_is_marked_in_the_report(
    finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(finished, folder)
    overrides = ("condenser.options.keep_last=2", "train.steps=5", "evaluate.problems=3")
    refused = run("train", "--resume", str(folder), *overrides)
    assert refused.returncode == 2
    assert "condenser.options.keep_last  1 → 2  changes what is learned" in refused.stderr
    assert re.search(r"train.steps +4 → 5\n", refused.stderr)
    assert "Add --allow-changes" in refused.stderr
    out = succeed("train", "--resume", str(folder), "--allow-changes", *overrides)
    assert "condenser.options.keep_last  1 → 2  changes what is learned" in out.partition("resumed after")[0]
    assert "changed     from step 5 on, condenser.options.keep_last: 1 → 2" in out.partition("held-out problems")[2]
    change = '{"first_step":5,"text":"condenser.options.keep_last: 1 \\u2192 2","learned":true}'
    assert change in (folder / "report.html").read_text()
    assert "changed since" not in succeed("train", "--resume", str(folder))  # agreed to once


def test_a_resume_prints_what_changes_and_needs_no_permission_for_steps_or_evaluation(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "more")
    config = tmp_path / "more/config.yaml"
    config.write_text(config.read_text().replace("keep_checkpoints: 2", "keep_checkpoints: 3"))  # noticed as well
    overrides = ("train.steps=5", "evaluate.samples=2", "learner.zero_stage=2")
    out = succeed("train", "--resume", str(tmp_path / "more"), "--dry-run", *overrides)
    assert [line for line in out.splitlines() if "→" in line] == [
        "#   learner.zero_stage      0 → 2",
        "#   train.steps             4 → 5",
        "#   train.keep_checkpoints  2 → 3",
        "#   evaluate.samples        1 → 2",
    ]


def test_a_run_that_is_resumed_for_fewer_steps_keeps_its_checkpoints_and_makes_the_evaluations_that_it_lacks(
    finished: Path, tmp_path: Path
) -> None:
    """Saved as step 0, the trained weights would be those of no step, and all others be abandoned."""
    folder = tmp_path / "fewer"
    shutil.copytree(finished, folder)
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    variants = "evaluate.variants={short: [rollout.limits.max_turns=2]}"
    succeed("train", "--resume", str(folder), "train.steps=0", variants)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == checkpoints
    *_, trained, evaluated = read_metrics(folder / "metrics.jsonl")
    assert evaluated["step"] == trained["step"]
    assert {"eval/success", "eval/short/success"} <= evaluated.keys()
    assert "eval/short/success" not in trained


def test_a_run_of_no_steps_can_be_evaluated_and_shows_itself_to_programs(tmp_path: Path) -> None:
    out = succeed("train", *TINY, "warm_start.steps=2", "train.steps=0", f"runs_dir={tmp_path}", "name=none", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert {event["title"] for event in events if event["event"] == "phase"} >= {"evaluating held-out"}
    assert [event["step"] for event in events if event["event"] == "evaluation"] == [0]
    assert (events[-1]["event"], events[-1]["finished"]) == ("end", True)
    log = (tmp_path / "none/log.txt").read_text()
    assert "name=none --json\n" in log
    assert "  versions: Python 3." in log
    assert json.loads(succeed("eval", str(tmp_path / "none"), "--json"))["problems"] == 4


def test_the_schedule_of_a_resumed_run_counts_training_steps(finished: Path, tmp_path: Path) -> None:
    """It counted optimiser steps taken: with other updates a batch, or after steps without signal, it was elsewhere.

    Two updates a batch share one cosine: it must not reach 0 when half of the batches are still to come.
    """
    shutil.copytree(finished, tmp_path / "two")
    shutil.rmtree(tmp_path / "two/checkpoints/step_000004")
    changes = ("algorithm.updates_per_batch=2", "learner.optimiser.schedule=cosine", "train.eval_every=0")
    succeed("train", "--resume", str(tmp_path / "two"), "--allow-changes", *changes)
    rates = [line["lr"] for line in read_metrics(tmp_path / "two/metrics.jsonl") if "lr" in line][2:]
    assert rates == pytest.approx([1e-3 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in (5, 7)])


def test_without_an_evaluation_at_the_start_a_run_trains_equally_and_shows_no_figures_of_then(
    finished: Path, tmp_path: Path
) -> None:
    out = succeed(*from_the_start_of(finished, tmp_path / "late", "train.eval_on_start=false", "train.steps=2"))
    lines, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "late", finished))
    assert [line["step"] for line in lines if "eval/success" in line] == [2]
    trained, wanted = ([line["loss"] for line in each if "loss" in line] for each in (lines, theirs))
    assert trained == wanted[:2]
    assert len(trained) == 2
    assert "held-out problems, after 2 steps" in out
    assert "before" not in out


def test_the_warm_start_goes_another_round_while_its_probe_falls_short(tmp_path: Path) -> None:
    settings = ("warm_start.steps=2", "warm_start.probe_target=1.0", "warm_start.max_rounds=2", "train.steps=0")
    out = succeed("train", *TINY, *settings, f"runs_dir={tmp_path}", "name=short")
    assert out.count("single turns are sound (target: 100%)") == 2
    assert "ends after 2 rounds" in out
    assert sorted(path.name for path in (tmp_path / "short/origin").iterdir()) == ["new", "warm"]


def test_a_warm_start_that_was_stopped_in_a_later_round_probes_no_round_again(tmp_path: Path) -> None:
    rounds = "warm_start={steps: 40, turns_per_step: 64, probe_target: 1.0, max_rounds: 2}"
    process = start("train", *TINY, rounds, "train.steps=0", f"runs_dir={tmp_path}", "name=stopped")
    origin = tmp_path / "stopped/origin"
    while max(checkpoint.steps(origin / ".warm-checkpoints"), default=0) <= 40:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert (origin / ".round-1").is_dir()
    (tmp_path / "stopped/log.txt").unlink()
    out = succeed("train", "--resume", str(tmp_path / "stopped"))
    assert "of round 2" in out
    assert out.count("single turns are sound") == 1  # after the second round


def test_a_warm_start_of_more_rounds_than_are_wanted_now_ends_with_its_last(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "origin/warm"
    for folder in (source, target.with_name(".round-1"), target.with_name(".round-2")):
        folder.mkdir(parents=True)
        (folder / "name").write_text(folder.name)
    chosen = load_config(find_config("quickstart"), ["warm_start.max_rounds=1", "warm_start.probe_target=0.5"])
    unused: Any = None
    components: Any = SimpleNamespace(config=chosen)
    WarmStart(
        components=components, media=None, renderer=unused, demonstrations=unused, observer=Observer(), stopping=unused
    ).run(str(source), target)
    assert (target / "name").read_text() == ".round-2"
    assert source.is_dir()


def test_ctrl_c_in_the_warm_start_saves_it(tmp_path: Path) -> None:
    settings = ("warm_start={steps: 100, turns_per_step: 64}", "train.steps=0", "evaluate.problems=1")
    process = start("train", *TINY, *settings, f"runs_dir={tmp_path}", "name=stopped")
    saved = tmp_path / "stopped/origin/.warm-checkpoints"
    while not checkpoint.steps(saved):  # before the first step there is nothing to save, and Ctrl-C quits
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "of round 1 of the warm start" in out
    assert checkpoint.steps(saved)
    (tmp_path / "stopped/log.txt").unlink()  # of the first start
    change = "condenser.options.keep_last=2"
    changed = start("train", "--resume", str(tmp_path / "stopped"), "--allow-changes", change)
    wait_for_phase(tmp_path / "stopped", "warm start, round 1", changed)
    log = (tmp_path / "stopped/log.txt").read_text()
    assert "the warm start begins again: the configuration was changed" in log
    assert "continued after step" not in log
    while not checkpoint.steps(saved):  # the first ones were removed: this one is of the second warm start
        assert changed.poll() is None, changed.communicate()
        time.sleep(0.01)
    assert load_config(tmp_path / "stopped/config.yaml").condenser.options["keep_last"] == 2
    changed.kill()
    changed.communicate()


def test_a_condenser_that_fails_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from condensegrpo.core.condenser import Condenser\n"
        "class Broken(Condenser):\n    async def condense(self, history, budget):\n        raise KeyError('lost')\n"
    )
    (tmp_path / "late.py").write_text(
        "from pathlib import Path\nfrom mine import Broken\nfrom condensegrpo.condensers.whole_units import LastK\n"
        "class Late(Broken):\n    async def condense(self, history, budget):\n"
        "        run = Path(__file__).with_name('broken')\n"  # made after the rehearsal
        "        return await (super() if run.exists() else LastK()).condense(history, budget)\n"
    )
    broken = f"condenser={{name: '{tmp_path}/mine.py:Broken'}}"
    taught = run("train", *TINY, broken, f"runs_dir={tmp_path}", "name=taught")
    assert "playing as the expert of the task Ledger" in taught.stderr
    assert f"lost' ({tmp_path}/mine.py:4)" in taught.stderr.replace("\n", "")
    replies = "sampler={name: scripted, options: {replies: ['<note> 3 </note>']}}"
    late = f"condenser={{name: '{tmp_path}/late.py:Late'}}"
    done = run("train", *TINY, "warm_start.steps=0", replies, late, f"runs_dir={tmp_path}", "name=broken")
    assert "lost" in done.stdout + done.stderr
    assert "trajectories failed (environment_error): the condenser" in done.stdout + done.stderr


def test_a_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    process = start("train", *TINY, "warm_start.steps=100000", f"runs_dir={tmp_path}", "name=busy")
    wait_for(tmp_path / "busy/lock", process)
    time.sleep(0.5)
    second = run("train", "--resume", str(tmp_path / "busy"))
    process.kill()
    process.communicate()
    assert second.returncode == 1
    assert "in use by another process" in second.stderr
    assert f"pid {process.pid}" in second.stderr


def test_a_name_that_is_taken_is_refused_and_nothing_is_overwritten(finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    done = run("train", *TINY, "train.steps=0", f"runs_dir={finished.parent}", "name=whole")
    assert done.returncode == 1
    assert "the name is taken by a run after step 4. Give this run another name (name=whole-2)" in done.stderr
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in finished.parent.iterdir() if path.name.startswith((".", "whole-"))] == []


def test_two_ranks_under_zero_3_train_and_evaluate_and_one_rank_resumes(finished: Path, tmp_path: Path) -> None:
    changes = ("learner.zero_stage=3", "train.steps=2", "train.save_every=1", "evaluate.problems=2")
    passed = "--local_rank=0"  # by the deepspeed launcher, to every process
    succeed_on_two_ranks(passed, *from_the_start_of(finished, tmp_path / "two", *changes))
    lines = read_metrics(tmp_path / "two/metrics.jsonl")
    assert [line["trajectories"] for line in lines if "loss" in line] == [16, 16]
    assert all(line["ratio_max"] == pytest.approx(1, abs=1e-4) for line in lines if line.get("tokens"))
    assert len(sampled(tmp_path / "two", 2)) == 16
    shutil.rmtree(tmp_path / "two/checkpoints/step_000001")
    out = succeed("train", "--resume", str(tmp_path / "two"), "train.steps=3", "learner.zero_stage=0")  # on one rank
    assert "resumed after step 2" in out
    assert [line["step"] for line in read_metrics(tmp_path / "two/metrics.jsonl") if "loss" in line] == [1, 2, 3]


ADAPTERS = (
    *("model.lora.rank=4", "learner.zero_stage=3", "algorithm.kl.coefficient=0.1"),
    *("warm_start.steps=5", "train.steps=2", "evaluate.problems=2", "name=two"),
)


def assert_adapters_trained(run_folder: Path) -> None:
    lines = [line for line in read_metrics(run_folder / "metrics.jsonl") if "loss" in line]
    assert [line["trajectories"] for line in lines] == [16, 16]
    assert lines[0]["kl"] == lines[0]["kl_loss"] == 0.0
    for line in lines:  # the sampler's merged weights say what the learner's base and adapters say
        assert line["ratio_max"] == pytest.approx(1, abs=1e-4)


@pytest.mark.skipif("LONG_TESTS" not in os.environ, reason="starts three interpreters: LONG_TESTS=1 runs it")
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_the_launchers_start_two_ranks(launcher: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    deepspeed = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port, "--module")
    chosen = TWO_RANKS if launcher == "torchrun" else deepspeed
    process = start("train", *TINY, *ADAPTERS, f"runs_dir={tmp_path}", launcher=chosen)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out[-2000:] + err[-4000:]
    assert_adapters_trained(tmp_path / "two")


def test_what_dynamic_sampling_adds_does_not_depend_on_the_number_of_ranks(finished: Path, tmp_path: Path) -> None:
    """Ranks agree on how many groups are missing over all of them, and every metric is that of all trajectories."""
    algorithm = (
        "algorithm={advantage: {estimator: grpo, whiten: true}, resample_rounds: 2, "
        "stops: {handling: {turn_limit: mask}}}"
    )
    changes = ("reward={name: correct}", algorithm)  # hardly any trajectory is right yet
    one_step(finished, tmp_path / "one", *changes)
    one_step(finished, tmp_path / "two", *changes, ranks=2)
    assert sampled(tmp_path / "one", 1) == sampled(tmp_path / "two", 1)
    found = first_update(tmp_path / "one")
    assert found["groups_dropped"] > 0
    assert first_update(tmp_path / "two") == pytest.approx(found, rel=1e-4, abs=1e-6)


def test_eval_of_a_run_gives_the_figures_of_its_last_evaluation(finished: Path) -> None:
    result = json.loads(succeed("eval", str(finished), "--json"))
    last = [line for line in read_metrics(finished / "metrics.jsonl") if "eval/success" in line][-1]
    assert result["success"] == last["eval/success"]
    assert result["metrics"]["context_tokens"] == last["eval/context_tokens"]
    assert (result["problems"], result["samples"]) == (4, 1)
    assert result["name"] == "eval-1"
    (stored,) = stored_evaluations(RunFolder(finished))
    assert (stored.step, stored.metrics["success"]) == (4, last["eval/success"])
    assert " eval " in stored.command
    assert_known(finished, "--evaluation", "eval-1", step=4)
    compared = succeed("runs", "compare", str(finished))
    assert [line.split()[:2] for line in compared.splitlines() if " whole  " in line][-2:] == [
        ["held-out", "whole"], ["eval-1", "whole"]
    ]  # fmt: skip


def test_eval_shows_pass_at_k_and_saves_trajectories_that_can_be_inspected(finished: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    out = succeed("eval", str(finished), "--samples", "4", "--save", str(saved))
    assert "pass@4" in out
    assert "95 % interval" in out
    assert "after 4 steps" in out
    assert len(read_trajectories(saved / "held-out.parquet")) == 16
    shutil.copytree(saved, tmp_path / "elsewhere")
    assert_known(tmp_path / "elsewhere", step=4)


def assert_known(folder: Path, *arguments: str, step: int | None) -> None:
    """The inspector knows step, budget and texts of tokens of an evaluation, and that nothing is learned from it."""
    shown = succeed("inspect-trajectory", str(folder), *arguments, "--tokens")
    view = json.loads(succeed("inspect-trajectory", str(folder), *arguments, "--tokens", "--json"))
    assert (view["evaluation"], view["step"], view["budget"]) == (True, step, 64)
    assert view["trajectory"]["id"] == f"{step or 0}/0/0"
    assert {turn["policy_version"] for turn in view["turns"]} == {step}
    assert all(token["text"] for turn in view["turns"] for token in turn["tokens"])
    assert view["trajectory"]["question"] in shown
    assert view["trajectory"]["ground_truth"] in shown
    assert not [wrong for wrong in ("signal", "nothing is learned", "advantage") if wrong in shown]


def test_evaluations_of_a_run_are_kept_and_inspected(finished: Path) -> None:
    files = sorted(str(file.relative_to(finished / "evaluations")) for file in finished.glob("evaluations/*/held*"))
    assert files == [f"step_{step:06d}/held-out.parquet" for step in (0, 2, 4)]
    for step in (0, 2, 4):
        assert_known(finished, "--evaluation", "held-out", "--step", str(step), step=step)


def test_an_exported_model_knows_its_steps_and_another_model_has_none(finished: Path, tmp_path: Path) -> None:
    succeed("export", str(finished), str(tmp_path / "exported"), "--step", "2")
    succeed("eval", str(tmp_path / "exported"), *TINY, "--save", str(tmp_path / "saved"))
    assert_known(tmp_path / "saved", step=2)
    (tmp_path / "exported" / "condensegrpo.json").unlink()
    succeed("eval", str(tmp_path / "exported"), *TINY, "--save", str(tmp_path / "other"))
    assert_known(tmp_path / "other", step=None)


def test_a_checkpoint_is_evaluated_under_the_configuration_of_its_run(finished: Path) -> None:
    checkpoint = finished / "checkpoints" / "step_000002"
    result = json.loads(succeed("eval", str(checkpoint), "--json"))
    (line,) = [
        line for line in read_metrics(finished / "metrics.jsonl") if line["step"] == 2 and "eval/success" in line
    ]
    assert (result["model"], result["step"]) == (str(checkpoint / "model"), 2)
    assert (result["success"], result["success_low"]) == (line["eval/success"], line["eval/success_low"])


def test_eval_does_not_add_to_a_folder_that_is_there(finished: Path, tmp_path: Path) -> None:
    done = run("eval", str(finished), "--save", str(tmp_path))
    assert done.returncode == 1
    assert "File exists" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_eval_leaves_at_once_and_says_so(finished: Path, tmp_path: Path) -> None:
    long = ("evaluate.problems=256", "evaluate.samples=10")  # the first of 2,560 ends after a tenth of the work
    process = start("eval", str(finished), *long, "--save", str(tmp_path / "saved"))
    assert eventually((tmp_path / "saved/tokenizer.json").is_file)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "interrupted" in err


def test_doctor_plan_and_serve_take_the_folder_of_a_run(finished: Path) -> None:
    newest = finished / "checkpoints/step_000004/model"
    assert "estimator grpo" in succeed("doctor", str(finished))
    assert "Adam's moments" in succeed("plan", str(finished))
    assert f"--model {newest} " in succeed("serve", str(finished), "--dry-run")


def test_eval_of_a_model_folder_takes_a_configuration(finished: Path) -> None:
    model = finished / "checkpoints/step_000004/model"
    result = json.loads(succeed("eval", str(model), *TINY, "--json"))
    last = [line for line in read_metrics(finished / "metrics.jsonl") if "eval/success" in line][-1]
    shared = undisturbed(result["metrics"]).keys() & {key.removeprefix("eval/") for key in last}
    assert shared >= {"success", "context_tokens"}
    assert {key: result["metrics"][key] for key in shared} == {key: last[f"eval/{key}"] for key in shared}
