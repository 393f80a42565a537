"""A run with adapters through the command line, and what it gives away: Hugging Face and PEFT folders."""

import hashlib
import json
import pickle
import re
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import TINY, on_a_full_disk, run, succeed
from peft import PeftModel
from safetensors.torch import load_file
from stand_in_hub import stand_in_hub
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from condensegrpo.assembly.exported import open_engine
from condensegrpo.cli.app import app
from condensegrpo.config.load import dump_config, find_config, load_config
from condensegrpo.core.errors import CheckpointError, CondenseError, RunError
from condensegrpo.learner.checkpoint import FORMAT, Manifest
from condensegrpo.learner.export import export_checkpoint
from condensegrpo.learner.model_folder import end_ids
from condensegrpo.storage.hub import upload_to_hub
from condensegrpo.storage.run_folder import RunFolder, read_metrics

LORA = (
    *TINY,
    "model.lora={rank: 4, alpha: 8, dropout: 0.05}",
    "algorithm.kl.coefficient=0.01",
    "train.steps=3",
    "train.eval_every=0",
    "train.save_every=1",
    "train.keep_checkpoints=3",
    "learner.optimiser.lr=0.02",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that trained adapters against a KL term."""
    runs = tmp_path_factory.mktemp("runs")
    succeed("train", *LORA, f"runs_dir={runs}", "name=lora")
    return runs / "lora"


def logits(folder: Path, adapter: Path | None = None) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(5, 25)[None]).logits
    return found


def refused(*arguments: str) -> str:
    """The message of a command that must fail."""
    done = run("export", *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.replace("\n", " ")


def test_with_lora_the_divergence_from_the_start_is_0_before_the_first_step_and_grows(finished: Path) -> None:
    steps = [line for line in read_metrics(finished / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[0]["kl"] == 0.0  # dropout of an adapter that is still 0 changes nothing
    assert steps[2]["kl"] > 1e-3


def test_training_adapters_leaves_the_rest_of_the_weights_as_they_were(finished: Path) -> None:
    start = load_file(finished / "origin/warm/model.safetensors")
    end = load_file(finished / "checkpoints/step_000003/model/model.safetensors")
    assert start.keys() == end.keys()
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {name for name in start if "_proj" in name}


def test_the_warm_start_of_a_new_model_trains_all_its_weights(finished: Path) -> None:
    new, warm = (load_file(finished / f"origin/{name}/model.safetensors") for name in ("new", "warm"))
    assert [name for name in new if torch.equal(new[name], warm[name])] == []


def test_the_warm_start_of_a_model_that_was_there_trains_adapters(finished: Path, tmp_path: Path) -> None:
    there = finished / "origin/warm"
    changes = ("model.new=null", f"model.path={there}", "warm_start.steps=2", "train.steps=0")
    succeed("train", *LORA, *changes, f"runs_dir={tmp_path}", "name=there")
    before, warm = load_file(there / "model.safetensors"), load_file(tmp_path / "there/origin/warm/model.safetensors")
    assert {name for name in warm if not torch.equal(before[name], warm[name])} == {
        name for name in warm if "_proj" in name
    }


def test_an_exported_model_is_the_newest_checkpoints(finished: Path, tmp_path: Path) -> None:
    out = succeed("export", str(finished), str(tmp_path / "made/model"))
    assert out.strip().endswith(f"→ {tmp_path / 'made/model'}")
    newest = finished / "checkpoints/step_000003/model"
    assert torch.equal(logits(tmp_path / "made/model"), logits(newest))
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model"]


def test_an_exported_model_has_a_tokenizer_with_template_and_what_ends_a_reply(finished: Path, exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "3"}], tokenize=False)
    wanted = end_ids(str(finished / "origin/warm"))
    if wanted:
        found = GenerationConfig.from_pretrained(exported).eos_token_id
        assert (found if isinstance(found, list) else [found]) == list(wanted)


def test_a_step_or_a_checkpoint_can_be_named(finished: Path, tmp_path: Path) -> None:
    succeed("export", str(finished), str(tmp_path / "by_step"), "--step", "1")
    succeed("export", str(finished / "checkpoints/step_000001"), str(tmp_path / "by_folder"))
    wanted = load_file(finished / "checkpoints/step_000001/model/model.safetensors")
    for name in ("by_step", "by_folder"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    last = load_file(finished / "checkpoints/step_000003/model/model.safetensors")
    assert not all(torch.equal(last[key], tensor) for key, tensor in wanted.items())


def test_an_exported_adapter_on_the_policy_that_grpo_started_from_is_the_exported_model_and_its_card_says_so(
    finished: Path, tmp_path: Path
) -> None:
    succeed("export", str(finished), str(tmp_path / "adapter"), "--adapter")
    assert (tmp_path / "adapter/adapter_config.json").is_file()
    together = logits(finished / "origin/warm", tmp_path / "adapter")
    merged = logits(finished / "checkpoints/step_000003/model")
    torch.testing.assert_close(together, merged, rtol=0, atol=1e-4)
    assert not torch.allclose(together, logits(finished / "origin/warm"), atol=1e-2)
    card = (tmp_path / "adapter/README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "peft"
    assert "the folder `origin/warm` of the run" in card
    assert (tmp_path / "adapter/condenser.yaml").is_file()


def test_nothing_is_overwritten(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("kept")
    assert "it is there already, and nothing is overwritten" in refused(str(finished), str(tmp_path / "mine"))
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The merged model with its card."""
    folder = tmp_path_factory.mktemp("exported") / "policy"
    succeed("export", str(finished), str(folder), "--license", "apache-2.0")
    return folder


def test_the_card_of_a_model_says_what_it_was_trained_with_and_what_it_can_do(exported: Path, finished: Path) -> None:
    _, front, text = (exported / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(front)
    last = [line for line in read_metrics(finished / "metrics.jsonl") if "eval/success" in line][-1]
    assert (metadata["license"], metadata["library_name"]) == ("apache-2.0", "transformers")
    assert "condenser-last_k" in metadata["tags"]
    (result,) = metadata["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == pytest.approx(last["eval/success"], rel=1e-3)
    interval = f"{last['eval/success']:.4g} [{last['eval/success_low']:.3g}, {last['eval/success_high']:.3g}]"
    assert f"| held-out | 3 | {interval} |" in text
    assert "| weights | LoRA, rank 4 |" in text
    assert "| steps | 3 of 4 problems × 4 trajectories |" in text
    assert str(finished.parent) not in text  # no path of the machine


def test_the_condenser_of_a_model_is_the_one_that_its_step_was_trained_under(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    line = json.loads((tmp_path / "run/configurations.jsonl").read_text().splitlines()[0])
    line["config"]["condenser"]["options"]["keep_last"] = 9
    with (tmp_path / "run/configurations.jsonl").open("a") as file:
        file.write(json.dumps({**line, "first_step": 3}) + "\n")
    for step, keep_last in ((2, 1), (3, 9)):
        succeed("export", str(tmp_path / "run"), str(tmp_path / f"at_{step}"), "--step", str(step))
        settings = yaml.safe_load((tmp_path / f"at_{step}/condenser.yaml").read_text())
        assert settings["condenser"]["options"]["keep_last"] == keep_last
    card = (tmp_path / "at_3/README.md").read_text()
    assert "Changed while it was trained: condenser.options.keep_last: 1 → 9" in card


def test_the_program_in_the_card_plays_an_episode_under_the_condenser(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(exported)
    played: dict[str, Any] = {"__name__": "program"}
    exec(compile(program[0], "README.md", "exec"), played)
    trajectory = played["trajectory"]
    limits = yaml.safe_load((exported / "condenser.yaml").read_text())["rollout"]["limits"]
    assert trajectory.failure is None
    unknown = json.loads((exported / "tokenizer.json").read_text())["model"]["vocab"]["[UNK]"]
    assert all(unknown not in turn.prompt_ids for turn in trajectory.turns)
    assert 0 < len(trajectory.turns) <= limits["max_turns"]
    assert max(len(turn.prompt_ids) for turn in trajectory.turns) <= limits["max_context_tokens"]
    assert any(turn.condensation for turn in trajectory.turns)
    assert trajectory.turns[0].reply.content in capsys.readouterr().out


def test_a_context_longer_than_a_learner_takes_by_default_is_played(exported: Path) -> None:
    with open_engine(exported, ["rollout.limits.max_context_tokens=40000"]) as engine:
        assert engine.limits.max_context_tokens == 40_000


def test_a_condenser_in_a_file_of_the_exported_folder_is_found(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "exported")
    (folder / "mine.py").write_text(
        "from condensegrpo.condensers.whole_units import Full\n\nclass Mine(Full):\n    pass\n"
    )
    (folder / "condenser.yaml").write_text("condenser: {name: 'mine.py:Mine'}\n")
    with open_engine(folder) as engine:
        assert type(engine.condenser).__name__ == "Mine"


def test_a_dry_run_lists_what_would_be_uploaded_and_sends_nothing(finished: Path, tmp_path: Path) -> None:
    out = succeed("export", str(finished), str(tmp_path / "model"), "--push-to-hub", "ana/policy", "--dry-run")
    assert "to ana/policy (private if it is new):" in out
    assert {line.split()[-1] for line in out.splitlines()} >= {"README.md", "condenser.yaml", "model.safetensors"}
    assert "Add --push-to-hub REPO" in refused(str(finished), str(tmp_path / "other"), "--dry-run")
    assert not (tmp_path / "other").exists()


def test_an_upload_creates_a_private_repository_with_every_file(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_shown")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # another test may have found no network
    with stand_in_hub() as hub:
        address = upload_to_hub(exported, "ana/policy", public=False, message="export", endpoint=hub.url)
        assert address.endswith("/ana/policy")
        assert hub.created["visibility"] == "private"
        assert hub.tokens == {"Bearer hf_not_to_be_shown"}
        assert hub.files == {str(file.relative_to(exported)): file.read_bytes() for file in exported.rglob("*")}
        hub.refuses = True
        with pytest.raises(RunError, match="The folder is complete") as caught:
            upload_to_hub(exported, "ana/policy", public=False, message="export", endpoint=hub.url)
    assert "hf_not_to_be_shown" not in str(caught.value)


def test_an_upload_without_a_network_says_that_the_folder_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_shown")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # another test may have found no network
    with pytest.raises(RunError, match=r"refused.*The folder is complete; .* hf upload ana/policy "):
        upload_to_hub(tmp_path, "ana/policy", public=False, message="export", endpoint="http://127.0.0.1:9")


def test_a_checkpoint_of_another_name_is_exported_with_the_figures_of_its_own_step(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text(dump_config(load_config(find_config("quickstart"))))
    run.metrics.write_text('{"step": 0, "eval/success": 0.125}\n{"step": 7, "loss": 0.5}\n')
    (run.checkpoints / "best/model").mkdir(parents=True)
    (run.checkpoints / "best/model/weights").write_text("w")
    digest = hashlib.sha256(b"w").hexdigest()
    manifest = Manifest(
        format=FORMAT,
        step=7,
        world_size=1,
        zero_stage=0,
        policy="",
        sizes={"model/weights": 1},
        hashes={"model/weights": digest},
    )
    (run.checkpoints / "best/manifest.json").write_text(json.dumps(asdict(manifest)))
    arguments = ["export", str(run.checkpoints / "best"), str(tmp_path / "policy")]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    _, front, text = (tmp_path / "policy/README.md").read_text().split("---\n", 2)
    assert "model-index" not in yaml.safe_load(front)  # 0.125 is the success before training
    assert "| held-out | 0 | 0.125 |" in text
    assert "The policy of this step was not evaluated." in text
    assert "A policy after 7 optimiser steps" in text
    with pytest.raises(CheckpointError, match="Make sure that the folder is writable"):
        CliRunner().invoke(app, [*arguments[:2], str(run.metrics / "policy")], catch_exceptions=False)


def test_a_step_that_is_not_there_is_told_with_those_that_are(finished: Path, tmp_path: Path) -> None:
    message = refused(str(finished), str(tmp_path / "model"), "--step", "7")
    assert "it has no such checkpoint. It has 1, 2, 3." in message
    message = refused(str(finished / "checkpoints/step_000002"), str(tmp_path / "model"), "--step", "2")
    assert "it is one checkpoint already" in message


def test_what_is_neither_a_run_nor_a_checkpoint_is_refused(tmp_path: Path) -> None:
    message = refused(str(tmp_path), str(tmp_path / "model"))
    assert "neither a checkpoint (no manifest.json) nor a run that has one" in message
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "checkpoints/step_000002", tmp_path / "step_000002")
    file = tmp_path / "step_000002/model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    message = refused(str(tmp_path / "step_000002"), str(tmp_path / "model"))
    assert "model/model.safetensors its SHA-256 begins" in message
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "a weights file is damaged or cut off"),
        ("pytorch_model.bin", r"model/pytorch_model\.bin may hold code, and weights are in safetensors files"),
        ("beside.json", r"model/ has beside\.json, which its manifest does not name"),
    ],
)
def test_no_pickle_is_exported_even_if_the_manifest_vouches_for_it(
    finished: Path, tmp_path: Path, name: str, message: str
) -> None:
    checkpoint = tmp_path / "step_000002"
    shutil.copytree(finished / "checkpoints/step_000002", checkpoint)
    file = checkpoint / "model" / name
    file.write_bytes(pickle.dumps(Path("/")))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    if name != "beside.json":
        manifest["sizes"][f"model/{name}"] = file.stat().st_size
        manifest["hashes"][f"model/{name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CondenseError, match=message):
        export_checkpoint(checkpoint, tmp_path / "model", "model")
    assert not (tmp_path / "model").exists()


def test_a_full_disk_names_the_file_and_what_to_do(finished: Path, tmp_path: Path) -> None:
    """``copytree`` collects such errors in a list of tuples."""
    done = run("export", str(finished), str(tmp_path / "model"), program=partial(on_a_full_disk, 4096))
    assert done.returncode == 1
    message = done.stderr.replace("\n", " ")
    assert re.search(r"model\.safetensors: .*File too large.*The disk or quota is full: free some space", message)
    assert "[(" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_not_evaluated(finished: Path, tmp_path: Path) -> None:
    """The sizes are right: only the hashes can tell. Run, checkpoint and model folder name the same policy."""
    shutil.copytree(finished, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step_000003"
    file = checkpoint / "model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    evaluations = sorted((tmp_path / "run").rglob("evaluations/*/*"))
    for policy in (tmp_path / "run", checkpoint, checkpoint / "model"):
        result = CliRunner().invoke(app, ["eval", str(policy)])
        assert isinstance(result.exception, CheckpointError)
        assert "model/model.safetensors its SHA-256 begins" in str(result.exception)
    assert sorted((tmp_path / "run").rglob("evaluations/*/*")) == evaluations


def test_a_run_that_trained_all_weights_has_no_adapter(finished: Path, tmp_path: Path) -> None:
    short = ("train.steps=0", "warm_start.steps=0", "evaluate.problems=1")
    succeed("train", *TINY, *short, f"runs_dir={tmp_path}", "name=full")
    message = refused(str(tmp_path / "full"), str(tmp_path / "adapter"), "--adapter")
    assert "it has no adapter/. It trained all weights: leave --adapter out." in message


def test_a_run_with_adapters_and_dropout_resumes_bit_equal(finished: Path, tmp_path: Path) -> None:
    """From its second checkpoint, as if it had been killed in its third step."""
    shutil.copytree(finished, tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step_000003")
    succeed("train", "--resume", str(tmp_path / "again"))
    wanted = load_file(finished / "checkpoints/step_000003/model/model.safetensors")
    found = load_file(tmp_path / "again/checkpoints/step_000003/model/model.safetensors")
    assert [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name])] == []
    lines = [
        [line["loss"] for line in read_metrics(path / "metrics.jsonl") if "loss" in line]
        for path in (finished, tmp_path / "again")
    ]
    assert lines[0] == lines[1]


def test_targets_that_match_nothing_stop_the_run_before_it_trains(tmp_path: Path) -> None:
    done = run("train", *TINY, "model.lora.targets=[c_attn]", f"runs_dir={tmp_path}", "name=none")
    assert done.returncode == 2
    message = done.stderr.replace("\n", " ")
    assert "model.lora.targets names 'c_attn', which is no linear layer of Qwen3ForCausalLM" in message
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in message
    assert not (tmp_path / "none/origin/warm").exists()


def test_a_resume_with_other_adapters_is_refused(finished: Path) -> None:
    done = run("train", "--resume", str(finished), "model.lora.rank=8")
    assert done.returncode == 2
    assert "model.lora.rank cannot change any more" in done.stderr.replace("\n", " ")
