"""Checks of a configuration's model: its files, and the memory that it needs. Reads headers of files only."""

import json
import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_machine import GIB, free_memory
from condensegrpo.cli.findings import Finding, ok, problem, warning
from condensegrpo.storage.hub import hub_fault
from condensegrpo.storage.placeholder import placeholder_in

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.learner.settings import NewModel

TRAINED_BYTES = 16  # per trained weight in the learner: fp32 weight and gradient, two Adam moments
BYTES = {"float32": 4, "bfloat16": 2}  # per weight in the sampler, and per frozen weight in the learner
LARGE = 400e6  # parameters above which training on a CPU takes hours instead of minutes
USUAL = 80 * GIB  # memory of a data-centre GPU
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)


def model_findings(config: "RunConfig") -> list[Finding]:
    """Check that the model exists and that it fits this machine."""
    count: int | None
    if config.model.new is not None:
        count = parameters_of_new(config.model.new, config.model.new.vocab_size)
        findings = [ok("model", f"new model, about {count / 1e6:.1f} M parameters")]
    elif (folder := Path(config.model.path or "")).is_dir():
        findings = _model_folder(folder)
        try:
            count = parameters_of_files(folder)
        except (OSError, ValueError, KeyError, struct.error) as error:
            cure = "copy the model's files again: they are damaged or cut off"
            return [*findings, problem("weights", f"{folder}: a safetensors file cannot be read ({error})", cure)]
    else:
        findings, count = [_hub_model(str(config.model.path))], parameters_of_name(str(config.model.path))
    return [*findings, memory_finding(config, count, devices(), free_memory())] if count else findings


def _model_folder(folder: Path) -> list[Finding]:
    findings = []
    for file in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
        fault = placeholder_in(file)
        if fault is not None:
            findings.append(problem("model", f"{file}: {fault}", "copy the model's files again"))
    if not (folder / "config.json").is_file():
        cure = "set model.path to a Hugging Face model folder"
        findings.append(problem("model", f"{folder} has no config.json", cure))
    if not any((folder / name).is_file() for name in TOKENIZERS):
        cure = "copy the tokenizer's files into the folder, or save it with tokenizer.save_pretrained"
        findings.append(problem("tokenizer", f"{folder} has none of {', '.join(TOKENIZERS)}", cure))
    elif not _has_template(folder):
        cure = "use the instruct model, or put a chat_template.jinja into the folder"
        findings.append(problem("chat template", f"{folder} has none", cure))
    return findings or [ok("model", f"{folder}: found config.json, tokenizer and chat template")]


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and '"chat_template"' in file.read_text(encoding="utf-8", errors="replace")


def _hub_model(place: str) -> Finding:
    from huggingface_hub import constants, try_to_load_from_cache

    if place.startswith((".", "/", "~")) or place.count("/") > 1:
        return problem(
            "model", f"there is no folder {place}", "set model.path to a Hugging Face model folder or Hub id"
        )
    if isinstance(try_to_load_from_cache(place, "config.json"), str):
        return ok("model", f"{place} is in the Hub cache")
    fault = hub_fault()
    if fault is not None:
        text = f"{place} is not in {constants.HF_HUB_CACHE}, and {fault}"
        return problem("model", text, f"download it first: hf download {place}")
    return warning("model", f"{place} is not in the Hub cache", "it will be downloaded")


def parameters_of_files(folder: Path) -> int | None:
    """Number of weights in a folder's safetensors files, from their headers; None without such files."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(_parameters_of_file(file) for file in files) if files else None


def parameters_of_new(new: "NewModel", vocabulary: int) -> int:
    """Number of weights of a new Qwen3 model with tied embeddings: 4·h² + 3·h·f per layer, norms not counted."""
    layer = 4 * new.hidden_size**2 + 3 * new.hidden_size * new.ffn_size
    return new.layers * layer + vocabulary * new.hidden_size


def _parameters_of_file(file: Path) -> int:
    """The format: length of the header in 8 bytes, little-endian, then JSON of name → dtype, shape, data_offsets."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"its header claims {length} bytes, the file has {file.stat().st_size}")
        header: dict[str, dict[str, list[int]]] = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {type(header).__name__}, wanted an object")
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def parameters_of_name(name: str) -> int | None:
    """The number of parameters that a model's name states; None if it states none.

    >>> parameters_of_name("Qwen/Qwen2.5-Coder-0.5B-Instruct"), parameters_of_name("gpt2")
    (500000000, None)
    """
    sizes = _SIZE.findall(name.rpartition("/")[2])
    return int(float(sizes[-1][0]) * {"b": 1e9, "m": 1e6}[sizes[-1][1].lower()]) if sizes else None


def devices() -> tuple[int, ...]:
    """Free memory of each GPU in bytes; () on a machine without GPUs."""
    import torch

    return tuple(int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count()))


def memory_finding(config: "RunConfig", parameters: int, gpus: tuple[int, ...], memory: int | None) -> Finding:
    """Check that learner and sampler fit each device, without activations, which ``condensegrpo plan`` counts.

    ZeRO 3 shards the learner over the devices; every device holds all of the sampler's weights.

    Args:
        parameters: number of weights of the model.
        gpus: free bytes of each; (): everything is in main memory.
        memory: free bytes of main memory; None if unknown.
    """
    learner = parameters * (TRAINED_BYTES if config.model.lora is None else BYTES[config.model.dtype])
    sampler = parameters * BYTES[config.model.dtype]
    shared = config.learner.zero_stage == 3 and len(gpus) > 1
    needed = learner / (len(gpus) if shared else 1) + sampler  # on each device
    counted = "with optimiser state" if config.model.lora is None else "frozen base, without adapters"
    text = f"about {(learner + sampler) / GIB:.1f} GiB for {parameters / 1e6:.1f} M parameters, {counted}"
    free = min(gpus) if gpus else memory
    if shared:
        text += f"; shared among {len(gpus)} GPUs {needed / GIB:.1f} GiB on each"
    if free is not None and needed > free:
        size, of_size = (free, "of this size") if gpus else (USUAL, f"of {USUAL // GIB} GiB")
        spread = (
            f"over {math.ceil(learner / (size - sampler))} GPUs {of_size}" if size > sampler else "over larger GPUs"
        )
        shard = f"shard it: learner.zero_stage=3 {spread}"
        if not gpus and size >= needed:
            shard = f"use a machine with a GPU {of_size}"
        cure = f"use a smaller model (model.path=…), or {shard}"
        return problem("model memory", f"{text}; {free / GIB:.1f} GiB are free", cure)
    if not gpus and parameters > LARGE:
        return warning(
            "model memory",
            f"{text}; this machine has no GPU",
            "use a machine with a GPU, or a smaller model: model.path=…",
        )
    return ok("model memory", text)
