"""Published sizes of the models that recipes name (their config.json), so that a plan needs no network."""

from pathlib import Path

from transformers import AutoConfig

# hidden, layers, heads, key heads, intermediate, vocabulary, tied, parameters as published with the weights
SIZES = {
    "Qwen/Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True, 494_032_768),
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True, 1_543_714_304),
    "Qwen/Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True, 3_085_938_688),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False, 7_615_616_512),
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 8, 3072, 151936, True, 596_049_920),
    "Qwen/Qwen3-1.7B": (2048, 28, 16, 8, 6144, 151936, True, 1_720_574_976),
    "Qwen/Qwen3-4B": (2560, 36, 32, 8, 9728, 151936, True, 4_022_468_096),
    "Qwen/Qwen3-8B": (4096, 36, 32, 8, 12288, 151936, False, 8_190_735_360),
    "Qwen/Qwen2.5-VL-7B": (3584, 28, 28, 4, 18944, 152064, False, 8_292_166_656),
    "models/smollm2": (576, 30, 9, 3, 1536, 49152, True, 134_515_008),
    "meta-llama/Llama-3.2-1B": (2048, 16, 32, 8, 8192, 128256, True, 1_235_814_400),
    "meta-llama/Llama-3.1-8B": (4096, 32, 32, 8, 14336, 128256, False, 8_030_261_248),
}
TOWER = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584}


def base_name(model: str) -> str:
    """The model whose sizes a variant has: ``Qwen/Qwen2.5-Math-7B-Instruct`` is a ``Qwen/Qwen2.5-7B``."""
    return model.replace("-Math", "").replace("-Coder", "").removesuffix("-Instruct")


def write_config(model: str, folder: Path) -> Path:
    """A folder with the ``config.json`` of a model of the Hub, and nothing else."""
    name = base_name(model)
    hidden, layers, heads, kv_heads, ffn, vocabulary, tied, _ = SIZES[name]
    kind = "qwen3" if "Qwen3" in name else "qwen2_5_vl" if "VL" in name else "qwen2" if "Qwen" in name else "llama"
    target = folder / model.replace("/", "_")
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        **({"head_dim": 128} if kind == "qwen3" else {}),
    }
    sizes = {"text_config": text, "vision_config": TOWER} if kind == "qwen2_5_vl" else text
    AutoConfig.for_model(kind, **sizes, tie_word_embeddings=tied).save_pretrained(target)
    return target
