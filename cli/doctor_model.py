"""Whether a configuration's model is there and how much memory on how many devices it needs. Reads headers of files."""

import json
import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_machine import GIB, free_memory, hub_cache, offline
from condensegrpo.cli.findings import Finding, ok, problem, warning
from condensegrpo.storage.placeholder import placeholder_in

if TYPE_CHECKING:
    from condensegrpo.config.schema import NewModel, RunConfig

TRAINED_BYTES = 16  # of a weight that trains, in the learner: fp32 weight and gradient, two Adam moments
BYTES = {"float32": 4, "bfloat16": 2}  # of a weight in the sampler, and of a frozen one in the learner
LARGE = 400e6  # parameters beyond which a CPU takes hours for what a GPU does in minutes
USUAL = 80 * GIB  # of a data-centre GPU
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)


def model_findings(config: "RunConfig") -> list[Finding]:
    """Whether the model is there, and whether it fits this machine."""
    if config.model.new is not None:
        count = parameters_of_new(config.model.new, config.model.new.vocab_size)
        return [
            ok("model", f"new, about {count / 1e6:.1f} M parameters"),
            memory_finding(config, count, devices(), free_memory()),
        ]
    place = config.model.path or ""
    folder = Path(place)
    if not folder.is_dir():
        named = parameters_of_name(place)
        return [_hub_model(place), *([memory_finding(config, named, devices(), free_memory())] if named else [])]
    findings = _model_folder(folder)
    try:
        known = parameters_of_files(folder)
    except (OSError, ValueError, KeyError, struct.error) as error:
        cure = "copy the model's files again: they are damaged or cut off"
        return [*findings, problem("weights", f"{folder}: a safetensors file cannot be read ({error})", cure)]
    return [*findings, *([memory_finding(config, known, devices(), free_memory())] if known else [])]


def _model_folder(folder: Path) -> list[Finding]:
    findings = []
    for file in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
        instead = placeholder_in(file)
        if instead is not None:
            findings.append(problem("model", f"{file}: {instead}", "copy the model's files again"))
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


def parameters_of_name(name: str) -> int | None:
    """How many parameters a model has by its name; None if that does not say.

    >>> parameters_of_name("Qwen/Qwen2.5-Coder-0.5B-Instruct"), parameters_of_name("gpt2")
    (500000000, None)
    """
    found = _SIZE.findall(name.rpartition("/")[2])
    return int(float(found[-1][0]) * {"b": 1e9, "m": 1e6}[found[-1][1].lower()]) if found else None


def devices() -> tuple[int, ...]:
    """Bytes free on each GPU; () on a machine without one."""
    import torch

    return tuple(int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count()))


def memory_finding(config: "RunConfig", parameters: int, gpus: tuple[int, ...], memory: int | None) -> Finding:
    """Learner and sampler on each device, activations left out, which ``condensegrpo plan`` counts.

    ZeRO 3 shares what the learner holds among the devices; the sampler's weights are whole on each.

    Args:
        parameters: of the model.
        gpus: bytes free on each; (): all is in main memory.
        memory: bytes free there; None: nobody knows.
    """
    learner = parameters * (TRAINED_BYTES if config.model.lora is None else BYTES[config.model.dtype])
    sampler = parameters * BYTES[config.model.dtype]
    shared = config.learner.zero_stage == 3 and len(gpus) > 1
    here = learner / (len(gpus) if shared else 1) + sampler
    kept = "optimiser state included" if config.model.lora is None else "the base frozen, adapters left out"
    text = f"about {(learner + sampler) / GIB:.1f} GiB for {parameters / 1e6:.1f} M parameters, {kept}"
    room = min(gpus) if gpus else memory
    if shared:
        text += f"; shared among {len(gpus)} GPUs {here / GIB:.1f} GiB on each"
    if room is not None and here > room:
        size, of_size = (room, "of this size") if gpus else (USUAL, f"of {USUAL // GIB} GiB")
        spread = (
            f"over {math.ceil(learner / (size - sampler))} GPUs {of_size}" if size > sampler else "over larger GPUs"
        )
        cure = f"take a smaller model (model.path=…), or spread it: learner.zero_stage=3 {spread}"
        return problem("model memory", f"{text}; {room / GIB:.1f} GiB are free", cure)
    if not gpus and parameters > LARGE:
        return warning("model memory", f"{text}; no GPU here", "take a machine with one, or a smaller model.path=…")
    return ok("model memory", text)
