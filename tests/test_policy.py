import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import llama, qwen3, tokenizer
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GenerationConfig,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from two_ranks import OPTIMISER

from condensegrpo.core.errors import CheckpointError, ConfigError, SamplerError
from condensegrpo.learner.checkpoint import verify_model
from condensegrpo.learner.engine import close_deepspeed, open_deepspeed
from condensegrpo.learner.model_folder import (
    end_ids,
    in_main_memory,
    load_policy,
    load_tokenizer,
    max_positions,
    write_policy,
)
from condensegrpo.learner.weights import gathered_weights
from condensegrpo.samplers.transformers import TransformersSampler


def written(folder: Path, model: PreTrainedModel) -> Path:
    write_policy(folder, model.config, in_main_memory(model.named_parameters()), tokenizer=tokenizer())
    return folder


@pytest.mark.parametrize("make", [qwen3, llama])
def test_a_written_folder_loads_with_the_same_logits(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    model, folder = make(), written(tmp_path / "model", make())
    ids = torch.arange(6)[None]
    wanted = model(input_ids=ids).logits
    assert torch.equal(load_policy(str(folder), dtype="float32")(input_ids=ids).logits, wanted)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits, wanted)


def test_tied_embeddings_are_written_once_and_tied_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", qwen3())
    names = load_file(folder / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    loaded = load_policy(str(folder), dtype="float32")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_a_written_folder_names_what_vllm_needs(tmp_path: Path) -> None:
    config = json.loads((written(tmp_path / "model", qwen3().bfloat16()) / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3ForCausalLM"], "bfloat16")
    assert config["tie_word_embeddings"] is True


def test_an_engine_writes_what_it_would_gather(tmp_path: Path) -> None:
    engine = open_deepspeed(llama(), zero_stage=3, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    write_policy(
        tmp_path / "model",
        engine.module.config,
        in_main_memory(gathered_weights(engine)),
        tokenizer=tokenizer(),
    )
    close_deepspeed(engine)
    found, wanted = load_file(tmp_path / "model" / "model.safetensors"), llama().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_the_data_type_is_the_one_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", qwen3())
    assert load_policy(str(folder), dtype="bfloat16").dtype == torch.bfloat16
    assert load_policy(str(folder), dtype="float32", attention="eager").dtype == torch.float32


def test_the_tokenizer_comes_back_with_its_chat_template(tmp_path: Path) -> None:
    loaded = load_tokenizer(str(written(tmp_path / "model", qwen3())))
    messages = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": " w7"}]
    assert loaded.apply_chat_template(messages, return_dict=False) == [5, 6, 7]


def test_writing_again_replaces_a_model_and_leaves_nothing_aside(tmp_path: Path) -> None:
    written(tmp_path / "model", qwen3())
    (tmp_path / "model" / "old.txt").touch()
    folder = written(tmp_path / "model", qwen3(seed=3))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (folder / "old.txt").exists()
    loaded = load_policy(str(folder), dtype="float32").state_dict()
    assert torch.equal(loaded["model.embed_tokens.weight"], qwen3(seed=3).state_dict()["model.embed_tokens.weight"])


def test_what_a_process_of_the_same_id_left_does_not_get_into_a_model(tmp_path: Path) -> None:
    written(tmp_path / "model", qwen3())
    for stale in (f"model.tmp-{os.getpid()}", f"model.tmp-old-{os.getpid()}"):
        (tmp_path / stale).mkdir()
        (tmp_path / stale / "stale.txt").touch()
    folder = written(tmp_path / "model", qwen3(seed=3))
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_with_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="the folder holds something else"):
        written(tmp_path, qwen3())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_write_that_breaks_off_leaves_the_old_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", qwen3())
    before = (folder / "model.safetensors").read_bytes()
    doubled = {name: 2 * tensor for name, tensor in in_main_memory(qwen3().named_parameters()).items()}
    with pytest.raises(CheckpointError, match=r"writing .*model\.tmp-\d+: FileNotFoundError"):
        write_policy(folder, qwen3().config, doubled, tokenizer=tokenizer(), extra_files=[tmp_path / "gone.json"])
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"writing .*file/model.tmp-\d+: NotADirectoryError.*Make sure that"):
        written(tmp_path / "file" / "model", qwen3())


def test_a_missing_folder_is_named_with_what_to_do(tmp_path: Path) -> None:
    missing = tmp_path / "nothing" / "here"
    for load in (load_tokenizer, lambda path: load_policy(path, dtype="float32")):
        with pytest.raises(ConfigError, match=f"there is no folder {missing}. Set model.path to a folder"):
            load(str(missing))


def test_a_misspelt_folder_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"there is no folder {tmp_path}/runs/modle"):
        load_tokenizer("runs/modle")


def test_a_folder_without_a_model_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"loading the model of {tmp_path}: .*Set model.path"):
        load_policy(str(tmp_path), dtype="float32")


def test_a_folder_without_tokenizer_is_named_with_what_to_do(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the folder has no tokenizer.*save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_chat_template_is_named_with_what_to_do(tmp_path: Path) -> None:
    plain = tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"it has no chat template.*chat_template.jinja"):
        load_tokenizer(str(tmp_path))


def test_attention_that_is_not_installed_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", qwen3())
    with pytest.raises(ConfigError, match=r"loading the model of .*no_such_attention"):
        load_policy(str(folder), dtype="float32", attention="no_such_attention")


# --- what a folder says of itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eos", "wanted"), [(5, (5,)), (0, (0,)), ([7, 5], (7, 5)), (None, ())])
def test_the_end_ids_are_those_of_the_generation_config(
    tmp_path: Path, eos: int | list[int] | None, wanted: tuple[int, ...]
) -> None:
    folder = written(tmp_path / "model", qwen3())
    GenerationConfig(eos_token_id=eos).save_pretrained(folder)
    assert end_ids(str(folder)) == wanted


def test_without_generation_config_there_are_no_end_ids(tmp_path: Path) -> None:
    assert end_ids(str(written(tmp_path / "model", qwen3()))) == ()


def test_a_generation_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", qwen3())
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be used: .*Correct that file, or remove it"):
        end_ids(str(folder))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (Qwen3Config(max_position_embeddings=2048), 2048),
        (GPT2Config(n_positions=96), 96),
        (BloomConfig(), None),  # ALiBi: no position embeddings
    ],
)
def test_the_positions_are_those_of_the_text_configuration(
    tmp_path: Path, config: PretrainedConfig, wanted: int | None
) -> None:
    config.save_pretrained(tmp_path)
    assert max_positions(str(tmp_path)) == wanted


def test_positions_and_end_ids_of_a_missing_folder_name_it(tmp_path: Path) -> None:
    for read in (max_positions, end_ids):
        with pytest.raises(ConfigError, match=f"there is no folder {tmp_path}/nothing/here. Set model.path"):
            read(str(tmp_path / "nothing" / "here"))
    with pytest.raises(ConfigError, match=f"loading the configuration of {tmp_path}: .*Set model.path"):
        max_positions(str(tmp_path))


def test_a_saved_policy_keeps_what_ends_its_replies(tmp_path: Path) -> None:
    model = qwen3()
    write_policy(
        tmp_path / "saved",
        model.config,
        in_main_memory(model.named_parameters()),
        tokenizer=load_tokenizer(str(written(tmp_path / "model", model))),
        stop_ids=(7, 3),
    )
    assert end_ids(str(tmp_path / "saved")) == (7, 3)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, number: float) -> None:
    model = qwen3()
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[1, 2] = number
    folder = written(tmp_path / "model", model)
    for check in (lambda: load_policy(str(folder), dtype="float32"), lambda: verify_model(folder)):  # serve, eval
        with pytest.raises(
            ConfigError, match=r"its weight model\.layers\.0\.mlp\.up_proj\.weight holds NaN or infinite"
        ):
            check()


def test_a_weights_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", qwen3())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"damaged or cut off .*Copy the model's files again"):
        load_policy(str(folder), dtype="float32")
    with pytest.raises(SamplerError, match="loading the sampler's model"):
        TransformersSampler(str(folder))
