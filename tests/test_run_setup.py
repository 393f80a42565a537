"""The set-up of a run that the command line and Python share: what is refused, and what becomes of the folder."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from condensegrpo.config.load import dump_config, find_config, load_config
from condensegrpo.config.resumed import store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, LearnerError, RunError
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder, read_metrics
from condensegrpo.training.run_setup import prepare_run


def config(runs: Path, *overrides: str) -> RunConfig:
    return load_config(find_config("quickstart"), [f"runs_dir={runs}", "name=one", "evaluate.variants={}", *overrides])


@pytest.fixture
def trained(tmp_path: Path) -> RunFolder:
    """A run of which metrics of step 3 are recorded."""
    run = RunFolder.create(tmp_path / "one")
    store_configuration(run, config(tmp_path), first_step=0)
    JsonlTracker(run.metrics).log(3, {"success": 0.5})
    return run


def test_a_new_run_has_its_configuration_and_leaves_no_folder_if_nothing_was_learned(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with prepare_run(settings).folder() as folder:
        assert folder.path == tmp_path / "one"
        assert folder.config.read_text() == dump_config(settings)
        assert folder.in_use
    assert not folder.path.exists()


def test_the_name_of_a_run_is_taken_unless_it_is_overwritten_or_nothing_is_written(
    trained: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="the name is taken by a run after step 3"):
        prepare_run(config(tmp_path))
    assert prepare_run(config(tmp_path), dry_run=True).continued is None
    with prepare_run(config(tmp_path), overwrite=True).folder() as folder:
        assert not folder.has_results
    assert not trained.path.exists()  # the old one is deleted, and the new one learned nothing


def test_a_continued_run_notes_what_changed_and_refuses_what_must_not(trained: RunFolder, tmp_path: Path) -> None:
    prepared = prepare_run(config(tmp_path, "train.steps=7"), continued=trained)
    assert prepared.notes[0].startswith("changed since the run was last started:\n  train.steps ")
    with prepared.folder() as folder:
        assert folder == trained
    assert trained.has_results
    rate = config(tmp_path, "learner.optimiser.lr=0.5")
    with pytest.raises(ConfigError, match="Add --allow-changes"):
        prepare_run(rate, continued=trained)
    assert re.search(
        r"learner\.optimiser\.lr .*changes what is learned",
        prepare_run(rate, continued=trained, allow_changes=True).notes[0],
    )


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_over_its_metrics(
    trained: RunFolder, tmp_path: Path
) -> None:
    assert prepare_run(config(tmp_path), continued=trained)  # stopped before its first checkpoint
    often = config(tmp_path, "train.save_every=2")
    store_configuration(trained, often, first_step=0)
    message = "its metrics end at step 3, and .*/checkpoints has no checkpoint.*--overwrite"
    with pytest.raises(RunError, match=message):
        prepare_run(often, continued=trained)
    (trained.checkpoints / "step_000002").mkdir()
    assert prepare_run(often, continued=trained)
    store_configuration(trained, config(tmp_path), first_step=0)
    shutil.rmtree(trained.checkpoints)
    with pytest.raises(RunError, match=message):
        prepare_run(config(tmp_path), continued=trained)
    assert len(read_metrics(trained.metrics)) == 1


def test_another_rank_gets_the_path_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with prepare_run(config(tmp_path)).folder() as folder:
        assert folder == RunFolder(tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


class Full(ScriptedSampler):
    """A sampler for whose new weights the device has no memory."""

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")


def test_a_device_without_enough_memory_ends_a_run_with_what_to_set(tmp_path: Path) -> None:
    settings = config(tmp_path, "warm_start.steps=0", "sampler={name: full}")
    prepared = prepare_run(settings, objects={"full": Full([])})
    with (
        prepared.folder() as folder,
        pytest.raises(
            LearnerError, match=r"allocate 1\.50 GiB\. To need less memory: learner\.tokens_per_micro_batch="
        ),
    ):
        prepared.train(folder, observer=Observer(), stopping=lambda: False)
