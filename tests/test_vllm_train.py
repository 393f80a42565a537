"""Training that samples with vLLM, through the command line: what vLLM says is what the learner says, step by step."""

from pathlib import Path

import pytest
from command import TINY, run, succeed
from metrics_page import unexplained
from needs_vllm import needs_vllm

from condensegrpo.storage.run_folder import read_metrics
from condensegrpo.storage.trajectories import read_trajectories

pytestmark = needs_vllm

LEARNS = ("model.new.layers=2", "warm_start={steps: 60, turns_per_step: 64, probe_target: null}")  # in every step
VLLM = ("sampler.name=vllm", "train.eval_every=0", *LEARNS)


def test_every_step_is_sampled_with_the_learners_weights_also_the_first_after_a_resume(tmp_path: Path) -> None:
    """Pitfall 25: a sampler that skips the first synchronisation answers with the weights of its model's folder.

    The step before the resume is sampled by transformers, so that vLLM starts once.
    """
    settings = (*LEARNS, "train.eval_every=0", "learner.optimiser.lr=0.003")
    succeed("train", *TINY, *settings, f"runs_dir={tmp_path}", "name=run", "train.steps=1")
    more = ("sampler.name=vllm", "train.steps=3")
    succeed("train", "--resume", str(tmp_path / "run"), "--allow-changes", *more)
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["gap_max"] < 1e-4 for line in lines)
    assert all(line["ratio"] == pytest.approx(1, abs=1e-3) for line in lines)
    assert all(line["seconds/sync"] < 60 for line in lines)  # it is milliseconds; a loaded machine may take its time
    assert unexplained(lines) == set()
    for step in (1, 2, 3):
        read = read_trajectories(tmp_path / f"run/trajectories/step_{step:06d}.parquet")
        assert {turn.policy_version for one in read for turn in one.trajectory.turns} == {step - 1}


def test_a_configuration_that_vllm_cannot_sample_for_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    done = run("train", *TINY, *VLLM, f"runs_dir={tmp_path}", "name=run", "sampler.options.top_p=0.9")
    assert done.returncode == 2
    assert "every importance ratio is wrong" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()
