"""Sampling beside the learner: real runs, killed and resumed, on one rank and on two ranks."""

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import leaving
import pytest
import torch
from chaos import PREFETCHING, disturbed, kill_at
from command import TINY, start, succeed, succeed_on_two_ranks
from metrics_page import missing, unexplained
from runs import assert_equal_runs, first_update, from_the_start_of, one_step, sampled, wait_for

from condensegrpo.algorithms.advantages import Estimate
from condensegrpo.algorithms.credit import Scores
from condensegrpo.assembly.build import build
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.assembly.workers import GroupPlayer, PlayerSettings, local_player
from condensegrpo.config.load import find_config, load_config, vary
from condensegrpo.config.resumed import changes_between
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import PluginError, RunError
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.group import ProblemGroup
from condensegrpo.episodes.player import LocalPlayer
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.training.checkpoints import read_batches, restored_batches, rollout_settings, write_batches
from condensegrpo.training.rollout import BatchRollout, RolloutPrefetcher, StepBatch

ONE = (
    *TINY,
    "rollout.staleness=1",
    "algorithm={advantage: {estimator: grpo}, importance: {cap: 2}}",
    "sampler.name=tests/watching_sampler.py:WatchingSampler",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, each batch but the first sampled while the learner worked; nobody disturbed it."""
    runs = tmp_path_factory.mktemp("runs")
    succeed("train", *ONE, f"runs_dir={runs}", "name=ahead")
    return runs / "ahead"


@pytest.fixture
def begun(finished: Path, tmp_path: Path) -> Path:
    """A run that is to take the same four steps from the same policy."""
    from_the_start_of(finished, tmp_path / "begun")
    return tmp_path / "begun"


def versions(run_folder: Path, step: int) -> set[int]:
    read = read_trajectories(run_folder / f"trajectories/step_{step:06d}.parquet")
    return {turn.policy_version for one in read for turn in one.trajectory.turns}


def test_a_batch_is_sampled_under_the_weights_before_the_step_that_runs_beside_it(finished: Path) -> None:
    """Nor did the weights ever change while a request was under way: the sampler of these runs would have refused."""
    assert [versions(finished, step) for step in (1, 2, 3, 4)] == [{0}, {0}, {1}, {2}]


def test_staleness_is_logged_and_explained(finished: Path) -> None:
    lines = [line for line in read_metrics(finished / "metrics.jsonl") if "loss" in line]
    assert [(line["staleness"], line["staleness_max"]) for line in lines] == [(0, 0), (1, 1), (1, 1), (1, 1)]
    assert unexplained(lines) == set()
    assert [missing(line) for line in lines] == [set()] * 4


def test_what_is_stale_is_corrected(finished: Path) -> None:
    """On the policy's own batch the learner's probabilities are the sampler's, on an older one they are others."""
    fresh, *stale = (line["importance_max"] for line in read_metrics(finished / "metrics.jsonl") if line.get("tokens"))
    assert fresh == pytest.approx(1, abs=1e-4)
    assert all(ratio > 1.001 for ratio in stale)


def test_trajectories_keep_every_invariant(finished: Path) -> None:
    assert succeed("inspect-trajectory", str(finished), "--check").count("no breach") == 4 + 3  # steps, evaluations


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="watching writes needs inotify (Linux)")
def test_a_run_stopped_and_killed_goes_on_with_the_batch_that_was_sampled_ahead(finished: Path, begun: Path) -> None:
    """Sampled anew it would be of newer weights: the run would go another way. `make chaos` kills in all writes."""
    process = start("train", "--resume", str(begun), "train.save_in_background=true")
    wait_for(begun / "trajectories/step_000001.parquet", process)  # while step 1 is learned and batch 2 sampled
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    draw = random.Random(0)
    assert disturbed(PREFETCHING, begun, kill_at("prefetched batches", draw))
    process = start("train", "--resume", str(begun), "train.save_in_background=false")
    wait_for(begun / "trajectories/step_000003.parquet", process)  # taken after the checkpoint of step 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert disturbed(PREFETCHING, begun, kill_at("report", draw))
    succeed("train", "--resume", str(begun))
    assert "resumed after step 2" in (begun / "log.txt").read_text(encoding="utf-8")
    assert_equal_runs(finished, begun)
    assert versions(begun, 3) == {1}
    assert (begun / "report.html").is_file()


def test_two_ranks_sample_ahead_what_one_does_and_go_on(finished: Path, tmp_path: Path) -> None:
    saving = ("train.save_every=1", "train.save_in_background=true")
    one_step(finished, tmp_path / "two", "train.steps=2", *saving, ranks=2)
    for step in (1, 2):
        assert sampled(tmp_path / "two", step) == sampled(finished, step)
    assert first_update(tmp_path / "two") == pytest.approx(first_update(finished), rel=1e-4, abs=1e-6)
    shutil.rmtree(tmp_path / "two/checkpoints/step_000002")
    ahead = read_batches(tmp_path / "two/checkpoints/step_000001")[2]  # of the first rank
    assert len(ahead.trajectories) == 8
    before = json.dumps(read_metrics(tmp_path / "two/metrics.jsonl")[-2]["loss"])
    succeed_on_two_ranks("train", "--resume", str(tmp_path / "two"), program=leaving.command)
    lines = [line for line in read_metrics(tmp_path / "two/metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert json.dumps(lines[-1]["loss"]) == before
    assert len(sampled(tmp_path / "two", 2)) == 16


# --- the thread -------------------------------------------------------------------------------------------------------

STALENESS = 2
FEW = ("train.problems_per_step=2", "train.samples_per_problem=2")


@dataclass(frozen=True)
class Parts:
    """What a prefetcher is made of, without a learner."""

    config: RunConfig
    folder: RunFolder
    rollout: BatchRollout

    def prefetcher(self, batches: Mapping[int, StepBatch] | None = None) -> RolloutPrefetcher:
        return RolloutPrefetcher(self.rollout, Observer(), batches=batches or {})


@pytest.fixture
def parts(finished: Path, tmp_path: Path) -> Iterator[Parts]:
    config = load_config(find_config("quickstart"), [*ONE[1:-1], f"rollout.staleness={STALENESS}", *FEW])
    folder, source = RunFolder.create(tmp_path / "run"), str(finished / "origin/warm")
    components, sampler = build(config), open_sampler(config, source)
    settings = PlayerSettings(config=config, source=source, temperature=config.rollout.temperature)
    player = local_player(components, settings, sampler)
    rollout = BatchRollout(
        config=config,
        problems=components.problems("train"),
        estimator=components.estimator,
        player=player,
        folder=folder,
        source=source,
    )
    yield Parts(config=config, folder=folder, rollout=rollout)
    sampler.close()


def test_an_estimator_that_raises_while_groups_are_dropped_is_one_line(parts: Parts) -> None:
    def estimator(scores: Scores) -> Estimate:
        raise LookupError("no baseline")

    dropping = replace(parts.rollout, estimator=estimator, config=vary(parts.config, ["algorithm.resample_rounds=1"]))
    with pytest.raises(PluginError, match=r"computing the advantages of a step: LookupError: no baseline \("):
        dropping.split([])


def test_weights_that_a_sampler_does_not_read_are_gathered_all_the_same(parts: Parts) -> None:
    """As a sampler of one's own that sends them from one rank: the others made no gather, and it waited for them."""

    class Careless(ScriptedSampler):
        def update(self, named_tensors: NamedTensors, version: int) -> None:
            self.version = version

    taken = list[str]()
    tensors = ((taken.append(name) or name, torch.zeros(1)) for name in ("a", "b"))
    with parts.prefetcher() as prefetcher:
        prefetcher.update_sampler(Careless(lambda ids: [1]), tensors, 1)
    assert taken == ["a", "b"]


def test_sampling_goes_on_while_no_batch_is_taken(parts: Parts) -> None:
    scored = Counter[int]()

    @dataclass(frozen=True)
    class Counting:
        player: GroupPlayer

        async def play(self, groups: Sequence[ProblemGroup], *, step: int, **given: Any) -> Sequence[ScoredTrajectory]:
            count = given.pop("on_scored")

            def counted(each: ScoredTrajectory) -> None:
                scored[step] += 1
                count(each)

            return await self.player.play(groups, step=step, on_scored=counted, **given)

    counting = replace(parts.rollout, player=cast(GroupPlayer, Counting(parts.rollout.player)))
    with replace(parts, rollout=counting).prefetcher() as prefetcher:
        assert len(prefetcher.take(1).kept) == 4
        deadline = time.monotonic() + 60
        while scored != {1: 4, 2: 4, 3: 4}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(read_trajectories(parts.folder.trajectories(1))) == 4
        assert not parts.folder.trajectories(2).exists()  # no step has taken it
        assert sorted(prefetcher.finish()) == [2, 3]  # no further than rollout.staleness


def test_batches_are_read_from_a_checkpoint_as_they_were_written(parts: Parts, tmp_path: Path) -> None:
    with parts.prefetcher() as prefetcher:
        prefetcher.take(1)
        kept = prefetcher.finish()
    write_batches(tmp_path, kept)
    batches = read_batches(tmp_path)
    assert batches == kept
    assert read_batches(tmp_path / "none") == {}
    with parts.prefetcher(batches) as prefetcher:
        assert prefetcher.take(2) == kept[2]
        assert sorted(prefetcher.finish()) == [3]  # the weights are those of before step 1: nothing is begun beside it


def test_a_batch_that_cannot_be_written_is_an_error(parts: Parts) -> None:
    parts.folder.trajectories(1).mkdir()
    with parts.prefetcher() as prefetcher, pytest.raises(RunError, match=r"step_000001\.parquet: Is a directory"):
        prefetcher.take(1)


def test_leaving_cancels_what_is_being_sampled(parts: Parts) -> None:
    first = parts.folder.trajectories(1)
    sampler = ScriptedSampler(lambda ids: [1], seconds=lambda ids: 600 if first.is_file() else 0)
    player = cast(LocalPlayer, parts.rollout.player)
    slow = replace(parts.rollout, player=replace(player, engine=replace(player.engine, sampler=sampler)))
    began = time.monotonic()
    with replace(parts, rollout=slow).prefetcher() as prefetcher:
        prefetcher.take(1)
    assert time.monotonic() - began < 60
    assert not parts.folder.trajectories(2).exists()


class Notices(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


def test_batches_of_a_checkpoint_are_discarded_if_the_rollout_settings_changed(parts: Parts, finished: Path) -> None:
    checkpoint, config = finished / "checkpoints/step_000002", load_config(finished / "config.yaml")
    same, notices = rollout_settings(config), Notices()

    def restored(config: RunConfig, sampled_by: Mapping[str, object] = same) -> list[int]:
        return sorted(restored_batches(checkpoint, config, sampled_by, notices))

    assert restored(config) == [3]
    assert restored(load_config(finished / "config.yaml", ["train.steps=2"])) == []
    assert notices.texts == []
    assert restored(parts.config) == []  # rollout.staleness is another
    assert restored(config, {**same, "ranks": 2}) == []
    assert len(notices.texts) == 2


@pytest.mark.parametrize(
    "elsewhere",
    [
        ["rollout.workers.processes=3"],
        ["sampler.options.urls=[http://10.0.0.6:8000]"],
        ["sampler.options={urls_file: /shared/servers}"],
    ],
)
def test_batches_of_a_checkpoint_stay_if_they_are_sampled_elsewhere(elsewhere: list[str]) -> None:
    """A resume may change these keys without --allow-changes: they say where trajectories are sampled."""
    before = ["sampler.name=vllm_server", "sampler.options={urls: [http://10.0.0.5:8000]}"]
    config, changed = (load_config(find_config("quickstart"), [*before, *more]) for more in ([], elsewhere))
    changes = changes_between(config, changed)
    assert changes
    assert not any(change.learned for change in changes)
    assert rollout_settings(changed) == rollout_settings(config)


def test_weights_that_never_arrive_are_an_error(parts: Parts) -> None:
    """A sampler whose version stands still samples from the base model for ever."""
    with parts.prefetcher() as prefetcher:
        prefetcher.take(1)
        prefetcher.finish()
        with pytest.raises(RunError, match=r"sampled 3 optimiser steps ago, and rollout\.staleness is 2"):
            prefetcher.take(4)
