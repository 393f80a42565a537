"""A new model that sees: its folder loads, prompts show pictures, and a run learns with it under image_mask."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command import ROOT
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

import condensegrpo as cg
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.messages import MediaPart, Message
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.new_model import (
    IMAGE,
    new_model,
    new_tokenizer,
    save_image_processor,
    save_new,
    seeing_tokenizer,
)
from condensegrpo.learner.settings import NewModel, NewPictures
from condensegrpo.reporting.model_card import write_card
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.studies.tasks.screens import Screens
from condensegrpo.vision.features import picture_features
from condensegrpo.vision.processor import load_picture_processor

TASK = Screens(apps=1, grid=6, cell=8, scrolled=0.0, eval_problems=2)
NEW = NewModel(hidden_size=16, layers=1, heads=2, ffn_size=16, pictures=NewPictures(size=48, patch=8))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return seeing_tokenizer(new_tokenizer(TASK.corpus(), kind="words", vocab_size=2048))


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("new") / "model"
    save_new(made, tokenizer, new_model(tokenizer, NEW, seed=3))
    return made


def screen(number: int) -> Message:
    problem = TASK.problems("train")[number]
    desktop = TASK.environment(problem).desktop
    return Message(role="user", content=(MediaPart.of(desktop.picture(), "image/png"),))


def test_a_picture_is_a_token_for_each_patch_and_three_around_them(folder: Path, tmp_path: Path) -> None:
    pictures = load_picture_processor(str(folder), MediaFolder(tmp_path))
    assert pictures is not None
    renderer = Renderer(AutoTokenizer.from_pretrained(folder), pictures=pictures)
    (shown,) = renderer.store_media([screen(0)])
    (part,) = shown.media
    assert pictures.picture_tokens(part.sha256) == 36 + 3
    ids = renderer.prompt([shown])
    assert list(ids).count(pictures.placeholder_id) == 36
    assert len(ids) == 39 + 5  # two for the role, the end, and two for the reply


def test_texts_are_rendered_as_those_of_a_new_model_without_pictures(tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [{"role": "user", "content": "look()"}, {"role": "assistant", "content": "click(4, 12)"}]
    plain = new_tokenizer(TASK.corpus(), kind="words", vocab_size=2048)
    assert tokenizer.apply_chat_template(talk, tokenize=False) == plain.apply_chat_template(talk, tokenize=False)
    assert len(tokenizer) == len(plain) + 3
    assert tokenizer("look()")["input_ids"] == plain("look()")["input_ids"]


def test_a_template_that_shows_no_content_is_noticed() -> None:
    plain = new_tokenizer(TASK.corpus(), kind="words", vocab_size=2048)
    plain.chat_template = "{{ messages }}"
    with pytest.raises(AssertionError, match="writes no content"):
        seeing_tokenizer(plain)


def test_the_folder_loads_and_its_tower_tells_pictures_apart(
    folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids(IMAGE) == len(tokenizer) - 1
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    pictures = load_picture_processor(str(folder), MediaFolder(tmp_path))
    assert pictures is not None
    renderer = Renderer(tokenizer, pictures=pictures)
    with torch.no_grad():
        first, second = (
            picture_features(model, pictures.pixels(message.media[0].sha256)).embeddings
            for message in renderer.store_media([screen(0), screen(1)])
        )
    assert first.shape == (36, 16)
    assert not torch.allclose(first, second)


def test_weights_depend_on_the_seed_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    first, again, other = (new_model(tokenizer, NEW, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_patches_that_do_not_fill_the_square_are_refused() -> None:
    with pytest.raises(ValueError, match=r"size=50 is no multiple of patch=8"):
        NewPictures(size=50, patch=8)


def test_an_older_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.smolvlm.image_processing_pil_smolvlm", None)
    with pytest.raises(ConfigError, match=r"pip install 'transformers>=5\.4,<6', or leave out model\.new\.pictures"):
        save_image_processor(tmp_path, size=32, patch=8)


def test_a_run_learns_from_pictures_and_notes(tmp_path: Path) -> None:
    tree = {
        "name": "seeing",
        "runs_dir": str(tmp_path),
        "model": {
            "new": {
                "hidden_size": 16,
                "layers": 1,
                "heads": 2,
                "ffn_size": 16,
                "max_positions": 512,
                "pictures": {"size": 48, "patch": 8},
            },
            "vision": "train",
        },
        "task": {
            "name": f"{ROOT}/studies/tasks/screens.py:Screens",
            "options": {"apps": 1, "grid": 6, "cell": 8, "scrolled": 0},
        },
        "condenser": {"name": "image_mask", "options": {"keep": 1}},
        "rollout": {"limits": {"max_turns": 6, "max_context_tokens": 300, "max_output_tokens": 10}},
        "algorithm": {"advantage": {"estimator": "grpo"}},
        "warm_start": {"steps": 6, "turns_per_step": 8, "probe_target": None},
        "train": {"steps": 1, "problems_per_step": 2, "samples_per_problem": 2, "eval_every": 1, "save_every": 1},
        "learner": {"threads": 1, "optimiser": {"lr": 1.0e-3}},
        "evaluate": {"problems": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    run = cg.train(tmp_path / "run.yaml")
    media = {file.name for file in (run.path / "media").iterdir()}
    assert media
    turns = [turn for rollout in run.rollouts(1) for turn in rollout.trajectory.turns]
    assert {sha256 for turn in turns for sha256 in turn.media} <= media
    assert all(len(turn.media) <= 1 for turn in turns)
    write_card(RunFolder(run.path), tmp_path, 1, part="adapter", name="eyes", licence=None)
    card = (tmp_path / "README.md").read_text()
    shutil.rmtree(run.path / "checkpoints")
    write_card(RunFolder(run.path), tmp_path, 1, part="adapter", name="eyes", licence=None)  # where it is left alone
    assert "base = AutoModelForImageTextToText.from_pretrained(" in card
    assert "pipeline_tag: image-text-to-text" in card


def test_positions_begin_as_a_row_plus_a_column(tokenizer: PreTrainedTokenizerFast) -> None:
    weight = new_model(tokenizer, NEW, seed=3).model.vision_model.embeddings.position_embedding.weight.detach()
    positions = weight.view(6, 6, 16)
    steps_right = positions[:, 1:] - positions[:, :-1]
    assert torch.allclose(steps_right, steps_right[:1].expand_as(steps_right), atol=1e-6)
    assert not torch.allclose(positions[1], positions[0])
