"""Runs of models that see, through the command line: sampler and learner agree, and checkpoints can be loaded."""

from pathlib import Path

import pytest
import torch
from command import ROOT, run, succeed
from runs import weights
from talk import tokenizer
from tiny import qwen3
from vision_models import vision_model

from condensegrpo.config.load import load_config
from condensegrpo.learner.model_folder import load_policy
from condensegrpo.learner.vision_tower import tower
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import read_metrics
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.vision.processor import load_picture_processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    vision_model("qwen3_vl", made / "model")
    (made / "run.yaml").write_text(f"""
model: {{path: {made / "model"}, dtype: float32}}
task: {{name: '{ROOT / "tests/picture_task.py"}:Pictures'}}
condenser: {{name: full}}
reward: {{name: '{ROOT / "tests/picture_task.py"}:Parity'}}
sampler: {{name: transformers}}
rollout: {{limits: {{max_turns: 3, max_context_tokens: 200, max_output_tokens: 6}}}}
algorithm: {{advantage: {{estimator: grpo}}}}
learner: {{tokens_per_micro_batch: 256, optimiser: {{lr: 0.001}}}}
train: {{steps: 2, problems_per_step: 2, samples_per_problem: 4, eval_every: 0, save_every: 2}}
evaluate: {{problems: 1}}
runs_dir: {made / "runs"}
""")
    return made


def test_a_run_trains_decoder_and_tower_on_pictures(folder: Path) -> None:
    warm = (
        "warm_start.steps=25",
        "warm_start.turns_per_step=4",
        "warm_start.optimiser={lr: 0.01, betas: [0.9, 0.95], schedule: constant}",
        "rollout.temperature=2.0",
        "warm_start.probe_target=null",
    )
    succeed("train", str(folder / "run.yaml"), "name=both", "model.vision=train", *warm)
    home = folder / "runs/both"
    ratios = [line["ratio_max"] for line in read_metrics(home / "metrics.jsonl") if line.get("tokens")]
    assert ratios
    assert all(ratio == pytest.approx(1, abs=1e-4) for ratio in ratios)  # sampler and learner agree
    read = read_trajectories(home / "trajectories/step_000001.parquet")
    turns = [turn for each in read for turn in each.trajectory.turns]
    assert {len(turn.media) for turn in turns} == {1, 2}
    model, before = home / "checkpoints/step_000002/model", load_policy(str(folder / "model"), dtype="float32")
    after = weights(home, 2)
    assert any(not torch.equal(after[name], tensor) for name, tensor in tower(before))
    processor = load_picture_processor(str(model), MediaFolder(home / "media"))
    assert processor is not None
    assert processor.picture_ids(turns[0].media[0])
    loaded = dict(load_policy(str(model), dtype="float32").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in after.items())


def test_a_frozen_tower_and_adapters_of_the_decoder_are_saved(folder: Path) -> None:
    lora = "model.lora={rank: 2, targets: all-linear}"
    succeed("train", str(folder / "run.yaml"), "name=adapters", lora, "train.steps=1", "train.save_every=1")
    before, after = load_policy(str(folder / "model"), dtype="float32"), weights(folder / "runs/adapters", 1)
    assert all(torch.equal(after[name], tensor) for name, tensor in tower(before))
    changed = [name for name, tensor in before.named_parameters() if not torch.equal(after[name], tensor)]
    assert changed
    assert all("language_model.layers" in name for name in changed)


def test_a_model_of_text_has_no_tower_to_train(folder: Path, tmp_path: Path) -> None:
    done = run("train", "configs/quickstart.yaml", "model.vision=train", "--dry-run")
    assert done.returncode == 2
    assert "vision is train, and a new model without pictures is one of text: set vision=frozen" in done.stderr
    text = qwen3()
    text.resize_token_embeddings(512)
    text.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    done = run("train", str(folder / "run.yaml"), f"model.path={tmp_path}", "model.vision=train", "--dry-run")
    assert done.returncode == 2
    assert f"checking model.vision: found train, and {tmp_path} has no vision tower" in done.stderr


def test_a_new_model_that_sees_may_train_its_tower() -> None:
    assert load_config(ROOT / "studies/configs/screens.yaml").model.vision == "train"
