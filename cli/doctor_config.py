"""What one configuration needs of this machine. Loads the plug-ins and reads headers of files; loads no model."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_machine import GIB, disk_finding, free_memory, hub_cache, offline
from condensegrpo.cli.doctor_sandbox import sandbox_finding
from condensegrpo.cli.findings import Finding, ok, problem, warning
from condensegrpo.errors import CondenseError

if TYPE_CHECKING:
    from condensegrpo.config import NewModel, Plugin, RunConfig

BYTES_A_PARAMETER = 16  # learner: fp32 weights, gradient and two Adam moments
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
SAMPLER_BYTES = {"float32": 4, "bfloat16": 2}


def config_findings(name: str, overrides: Sequence[str]) -> list[Finding]:
    """Whether a configuration can be read and what it names is there."""
    from condensegrpo.config import find_config, load_config

    try:
        config = load_config(find_config(name), overrides)
    except CondenseError as error:
        return [problem("configuration", str(error), "correct the file or the overrides")]
    return [
        ok("configuration", f"{name} is valid"),
        *_data(config),
        _plugins(config),
        *_model(config),
        disk_finding(Path(config.runs_dir)),
        *([sandbox_finding(config.sandbox.rung)] if config.sandbox.rung != "auto" else []),
    ]


def parameters_of_files(folder: Path) -> int | None:
    """Weights in a folder's safetensors files, counted from their headers; None without such files."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(_parameters_of_file(file) for file in files) if files else None


def parameters_of_new(new: "NewModel", vocabulary: int) -> int:
    """Weights of a new Qwen3 model with tied embeddings: attention 4·h², MLP 3·h·f a layer, norms left out."""
    layer = 4 * new.hidden_size**2 + 3 * new.hidden_size * new.ffn_size
    return new.layers * layer + vocabulary * new.hidden_size


def _parameters_of_file(file: Path) -> int:
    """The header: its length as 8 bytes, little-endian, then JSON of name → dtype, shape, data_offsets."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"its header claims {length} bytes, the file has {file.stat().st_size}")
        header: dict[str, dict[str, list[int]]] = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {type(header).__name__}, wanted an object")
    count = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for dimension in tensor["shape"]:
                size *= dimension
            count += size
    return count


def _data(config: "RunConfig") -> list[Finding]:
    named = (("task.data", config.task.data), ("task.eval_data", config.task.eval_data))
    return [_data_file(key, place) for key, place in named if place is not None]


def _data_file(key: str, place: str) -> Finding:
    path = Path(place)
    if path.exists():
        return ok(key, str(path))
    looks_like_file = path.suffix in (".jsonl", ".json", ".parquet") or place.startswith((".", "/", "~"))
    if looks_like_file:
        return problem(key, f"{place} does not exist", f"give the path of a file or folder: {key}=…")
    if offline():
        return problem(key, f"{place} is no file, and HF_HUB_OFFLINE is set", f"give the path of a file: {key}=…")
    return warning(key, f"{place} is no file here", "it will be looked for on the Hub")


def _plugins(config: "RunConfig") -> Finding:
    from condensegrpo.assemble import check

    try:
        check(config)
    except CondenseError as error:
        return problem("plug-ins", str(error), "see condensegrpo plugins for what is installed")
    named = (
        config.task.name,
        config.condenser.name,
        config.reward.name,
        config.sampler.name,
        *map(_tool_name, config.rollout.tools),
    )
    return ok("plug-ins", f"{', '.join(named)}: all load")


def _tool_name(tool: "str | Plugin") -> str:
    return tool if isinstance(tool, str) else tool.name


def _model(config: "RunConfig") -> list[Finding]:
    if config.model.new is not None:
        count = parameters_of_new(config.model.new, config.model.new.vocab_size)
        return [ok("model", f"new, about {count / 1e6:.1f} M parameters"), *_memory(count, config.model.dtype)]
    place = config.model.path or ""
    folder = Path(place)
    if not folder.is_dir():
        return [_hub_model(place)]
    findings = _model_folder(folder)
    try:
        known = parameters_of_files(folder)
    except (OSError, ValueError, KeyError, struct.error) as error:
        cure = "copy the model's files again: they are damaged or cut off"
        return [*findings, problem("weights", f"{folder}: a safetensors file cannot be read ({error})", cure)]
    return [*findings, *(_memory(known, config.model.dtype) if known else [])]


def _model_folder(folder: Path) -> list[Finding]:
    findings = []
    if not (folder / "config.json").is_file():
        cure = "give a Hugging Face model folder: model.path=…"
        findings.append(problem("model", f"{folder} has no config.json", cure))
    if not any((folder / name).is_file() for name in TOKENIZERS):
        cure = "copy the tokenizer's files there, or save it with tokenizer.save_pretrained"
        findings.append(problem("tokenizer", f"{folder} has none of {', '.join(TOKENIZERS)}", cure))
    elif not _has_template(folder):
        cure = "take the instruct model, or put a chat_template.jinja into the folder"
        findings.append(problem("chat template", f"{folder} has none", cure))
    return findings or [ok("model", f"{folder}: weights' configuration, tokenizer and chat template are there")]


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and '"chat_template"' in file.read_text(encoding="utf-8", errors="replace")


def _hub_model(place: str) -> Finding:
    if place.startswith((".", "/", "~")) or place.count("/") > 1:
        return problem("model", f"{place} is no folder", "give a Hugging Face model folder or a Hub id: model.path=…")
    cached = hub_cache() / f"models--{place.replace('/', '--')}"
    if cached.is_dir():
        return ok("model", f"{place} is in the Hub cache")
    if offline():
        return problem("model", f"{place} is not in {hub_cache()}, and HF_HUB_OFFLINE is set", "download it first")
    return warning("model", f"{place} is not in the Hub cache", "it will be downloaded")


def _memory(parameters: int, dtype: str) -> list[Finding]:
    """Learner and sampler of a colocated run without ZeRO, activations left out."""
    needed = parameters * (BYTES_A_PARAMETER + SAMPLER_BYTES[dtype])
    text = f"about {needed / GIB:.1f} GiB for {parameters / 1e6:.1f} M parameters, optimiser state included"
    room = _room()
    if room is not None and needed > room:
        cure = "take a smaller model, or spread it: learner.zero_stage=3 over several GPUs"
        return [problem("model memory", f"{text}; {room / GIB:.1f} GiB are free", cure)]
    return [ok("model memory", text)]


def _room() -> int | None:
    """Bytes free on the first GPU, or in main memory where there is none."""
    import torch

    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(0)
        return int(free)
    return free_memory()
