"""The policy as a Hugging Face folder: load its tokenizer, model and configuration, and write it.

Torch is imported with the weights: an episode that a person plays, or a proxy, needs the tokenizer alone.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from condensegrpo.core.errors import ConfigError, ModelMissing
from condensegrpo.learner.atomic_folder import published_folder
from condensegrpo.learner.settings import TREE_KERNELS, Dtype
from condensegrpo.storage.files import placeholder_in, write_atomically
from condensegrpo.storage.hub import hub_fault
from condensegrpo.vision.processor import family_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
# files of the picture processor, in the folder of a model that sees
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
STEPS_FILE = "condensegrpo.json"  # {"step": 60}: the optimiser steps of GRPO that the weights of a folder have taken


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local folder or Hub id, with its chat template."""
    tokenizer = tokenizer_of(path)
    if tokenizer.chat_template is None:
        installed = ", or pip install mistral-common" if (Path(path) / "tekken.json").is_file() else ""
        raise ConfigError(
            f"loading the tokenizer of {path}: it has no chat template, which turns messages into a prompt. Use a chat "
            f"or instruct model, or put a chat_template.jinja into the folder{installed}."
        )
    return tokenizer


def tokenizer_of(path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local folder or Hub id, with or without a chat template."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = _source(path, "tokenizer")
    if Path(source).is_dir() and not any(Path(source).glob("*token*")) and not (Path(source) / "tekken.json").is_file():
        raise ConfigError(
            f"loading the tokenizer of {source}: the folder has no tokenizer (no tokenizer.json, "
            f"tokenizer_config.json or tekken.json). Save one there with tokenizer.save_pretrained, or name another "
            f"folder."
        )
    tekken = Path(source) / "tekken.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):  # of mistral-common
            tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
        if tokenizer.chat_template is None and tekken.is_file():  # mistral-common knows the file's own
            from transformers.integrations.mistral import convert_tekken_tokenizer

            tokenizer = convert_tekken_tokenizer(str(tekken))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(_not_found("tokenizer", path, error)) from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def save_tokenizer(path: str, folder: Path) -> None:
    """Write ``tokenizer.json`` of a local folder or Hub id, which gives the texts of token ids, into a folder.

    A tokenizer that is not of the ``tokenizers`` library is not written.
    """
    tokenizer = load_tokenizer(path)
    if tokenizer.is_fast:
        write_atomically(folder / "tokenizer.json", tokenizer.backend_tokenizer.to_str())


def processor_files(path: str) -> tuple[Path, ...]:
    """The files of the picture processor of a local folder or Hub id; () for a model of text.

    The files of a Hub id are in its cache, since its processor was loaded.
    """
    from huggingface_hub import try_to_load_from_cache

    source = _source(path, "picture processor")
    if Path(source).is_dir():
        return tuple(file for name in PROCESSOR_FILES if (file := Path(source) / name).is_file())
    files = (try_to_load_from_cache(source, name) for name in PROCESSOR_FILES)
    return tuple(Path(file) for file in files if isinstance(file, str))


def trained_steps(path: str) -> int | None:
    """Optimiser steps of GRPO that the weights of a local folder have taken; None: not known, as of any other model."""
    file = Path(path).expanduser() / STEPS_FILE
    step = json.loads(file.read_text(encoding="utf-8")).get("step") if file.is_file() else None
    return step if isinstance(step, int) else None


def local_source(path: str) -> str | None:
    """The folder with the configuration and tokenizer of a local folder or Hub id; None: it must be downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    source = _source(path, "model")
    if Path(source).is_dir():
        return source
    try:
        config, tokenizer = (try_to_load_from_cache(source, file) for file in ("config.json", "tokenizer_config.json"))
    except HFValidationError:
        return None
    return str(Path(config).parent) if isinstance(config, str) and isinstance(tokenizer, str) else None


def sees(config: "PretrainedConfig") -> bool:
    """Whether a model of this configuration is of one of the families that see (``vision/processor.py``)."""
    return family_of(config.model_type) is not None


def composite(config: "PretrainedConfig") -> bool:
    """Whether a model is more than a decoder with its head, as one that sees or hears."""
    return config.get_text_config() is not config


def auto_class(config: "PretrainedConfig") -> "type[AutoModelForCausalLM]":
    """The class of transformers that loads models of this configuration: some that see are no causal LM to it.

    Where it knows both, as for Qwen3.5, it is the one that the configuration names: that has the published weights.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    seeing = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    named = seeing is not None and seeing.__name__ in (config.architectures or ())
    whole = named or (seeing is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING)
    return cast("type[AutoModelForCausalLM]", AutoModelForImageTextToText if whole else AutoModelForCausalLM)


def load_policy(path: str, *, dtype: Dtype, attention: str = "auto") -> "PreTrainedModel":
    """The causal LM of a local folder or Hub id, which may see, in evaluation mode on the CPU.

    Args:
        path: a folder with ``config.json``, or a Hub id.
        dtype: of the weights.
        attention: ``model.attention``. Kernels of this package begin as transformers' sdpa.
    """
    from transformers import AutoConfig

    from condensegrpo.learner.devices import DTYPES

    source = _source(path, "model")
    try:
        config = AutoConfig.from_pretrained(source)
        implementation = attention_of(config, attention)
        model = auto_class(config).from_pretrained(source, dtype=DTYPES[dtype], attn_implementation=implementation)
    except SafetensorError as error:
        raise _damaged(path, error) from error
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(_not_found("model", path, error)) from error
    _check_finite(path, model.named_parameters())
    return cast("PreTrainedModel", model.eval())


def attention_of(config: "PretrainedConfig", attention: str) -> str:
    """The attention of transformers that a model begins with for ``model.attention``.

    That is sdpa, or eager for ``auto`` where the model has no sdpa, as gpt-oss with its sinks and Mamba.
    """
    if attention not in TREE_KERNELS:
        return attention
    model_class = auto_class(config)._model_mapping.get(type(config), None)
    if getattr(model_class, "_supports_sdpa", True):
        return "sdpa"
    if attention == "auto":
        return "eager"
    raise ConfigError(
        f"checking model.attention: found {attention}, and {model_class.__name__} has no such attention. Set "
        f"model.attention=auto."
    )


def check_weights(folder: Path) -> None:
    """Check that the weights in a model folder are finite, for servers that load it themselves."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                _check_finite(str(folder), ((name, stored.get_tensor(name)) for name in stored.keys()))  # noqa: SIM118  no mapping
        except SafetensorError as error:
            raise _damaged(str(folder), error) from error


def _check_finite(path: str, named_tensors: "Iterable[tuple[str, Tensor]]") -> None:
    import torch

    from condensegrpo.learner.devices import DTYPES

    for name, tensor in named_tensors:
        known = tensor.dtype in DTYPES.values() and tensor.numel()  # not a packed one
        if known and not all(map(torch.isfinite, tensor.aminmax())):  # a sum in float32 would copy bf16
            raise ConfigError(
                f"loading the model of {path}: its weight {name} holds NaN or infinite numbers, wanted finite ones. "
                f"The training that made it has diverged: use an earlier checkpoint, or another model."
            )


def _damaged(path: str, error: SafetensorError) -> ConfigError:
    return ConfigError(
        f"loading the model of {path}: a weights file is damaged or cut off ({error}). Copy the model's files again."
    )


def end_ids(path: str) -> tuple[int, ...]:
    """Token ids that end a reply, as the ``generation_config`` of a local folder or Hub id says; () if it has none.

    Qwen2.5-Instruct names two, (151645, 151643), where its tokenizer names one.
    """
    from transformers import GenerationConfig

    source = _source(path, "generation configuration")
    local = Path(source).is_dir()
    if local and not (Path(source) / GENERATION_CONFIG).is_file():
        return ()
    try:
        eos: int | list[int] | None = GenerationConfig.from_pretrained(source).eos_token_id
    except (OSError, ValueError) as error:
        if not local and isinstance(error, OSError):
            return ()  # the Hub has none; that it is out of reach shows when the model is loaded
        raise ConfigError(
            f"loading the generation configuration of {path}: {GENERATION_CONFIG} cannot be used: {error} Correct that "
            f"file, or remove it; replies then end with the tokenizer's eos_token."
        ) from error
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def configuration(path: str) -> "PretrainedConfig":
    """The configuration in ``config.json`` of a local folder or Hub id, to be read only. Loads no weights."""
    from transformers import AutoConfig

    source = _source(path, "configuration")
    file = Path(source) / "config.json"
    try:
        if file.is_file():
            written = file.stat()
            return _configuration(source, written.st_mtime_ns, written.st_size)
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(_not_found("configuration", path, error)) from error


@lru_cache(maxsize=8)
def _configuration(folder: str, written: int, size: int) -> "PretrainedConfig":
    """The configuration of a folder; transformers takes 20 ms for it, and a start of a run reads it a dozen times."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def max_positions(path: str) -> int | None:
    """Tokens that the model of a local folder or Hub id has positions for, prompt and reply together.

    That is ``max_position_embeddings`` of its text configuration; None if that is missing, as in models without
    position embeddings.
    """
    config = configuration(path).get_text_config()
    try:
        known: int | None = config.max_position_embeddings  # an attribute: GPT-2's file calls it n_positions
    except AttributeError:
        return None
    return known


def check_vocabulary(path: str) -> None:
    """Check that the model of a local folder or Hub id has an embedding for every id of its tokenizer."""
    largest, rows = max(load_tokenizer(path).get_vocab().values()), configuration(path).get_text_config().vocab_size
    if largest >= rows:
        raise ConfigError(
            f"checking the tokenizer of {path}: it has ids up to {largest}, and the model has embeddings for {rows} "
            f"ids (vocab_size). Use the tokenizer that the model was trained with, or give the model more embeddings: "
            f"model.resize_token_embeddings({largest + 1}), then save_pretrained."
        )


def check_heads(path: str, ranks: int) -> None:
    """Check that the attention heads of a model divide over the ranks that compute its rows together."""
    if ranks == 1:
        return
    config = configuration(path).get_text_config()
    heads: int = config.num_attention_heads
    check_divided(path, heads, config.to_dict().get("num_key_value_heads") or heads, ranks)  # some have no such key


def check_divided(model: str, heads: int, keys: int, ranks: int) -> None:
    """Check that query and key heads of a model divide over the ranks that compute its rows together."""
    # key heads divide over the ranks, or each of them goes to several
    able = [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
    if ranks not in able:
        raise ConfigError(
            f"checking learner.sequence_parallel: found {ranks}, and {model} has {heads} attention heads and {keys} "
            f"key heads, which do not divide over so many ranks. Set one of {', '.join(map(str, able))}."
        )


def in_main_memory(named_tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
    """Copies of weights on the first rank, none on others. Every rank must call it: they may be gathered from all."""
    from condensegrpo.learner.ranks import rank

    tensors = {}
    for name, tensor in named_tensors:
        if rank() == 0:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return tensors


def write_policy(
    folder: Path,
    model_config: "PretrainedConfig",
    tensors: "Mapping[str, Tensor]",
    *,
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: Sequence[int] = (),
    steps: int | None = None,
    extra_files: Sequence[Path] = (),
) -> None:
    """Write a plain Hugging Face folder that transformers and vLLM load; it appears whole or not at all.

    Args:
        folder: is replaced if it holds a model.
        model_config: of the policy; its architecture and data type are filled in.
        tensors: the weights in main memory.
        tokenizer: is written beside them.
        stop_ids: what ends a reply beside the tokenizer's eos; ``end_ids`` finds them again.
        steps: of GRPO that the weights have taken; ``trained_steps`` finds them again. None: not known.
        extra_files: files to copy there, see ``processor_files``.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ConfigError(
            f"writing the model to {folder}: the folder holds something else. Give a new or empty folder."
        )
    config = copy.deepcopy(model_config)
    config.architectures = [auto_class(config)._model_mapping[type(config)].__name__]
    config.dtype = next(iter(tensors.values())).dtype
    with published_folder(folder) as temporary:
        save_file(dict(tensors), temporary / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for file in extra_files:
            shutil.copy(file, temporary / file.name)
        if stop_ids:
            GenerationConfig(eos_token_id=list(stop_ids)).save_pretrained(temporary)
        if steps is not None:
            (temporary / STEPS_FILE).write_text(json.dumps({"step": steps}), encoding="utf-8")


def _source(path: str, part: str) -> str:
    """The folder that ``path`` means, or the Hub id that it may be."""
    folder = Path(os.path.expanduser(path))  # that of Path fails for a user who is not known
    if folder.is_dir():
        for file in (*folder.glob("*.json"), *folder.glob("*.safetensors")):
            placeholder = placeholder_in(file)
            if placeholder is not None:
                raise ConfigError(f"loading the {part} of {folder}: {file.name}: {placeholder}.")
        return str(folder)
    inside = folder.parent != Path() and folder.parent.is_dir()  # runs/modle, where there is a folder runs
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or inside:
        raise ModelMissing(
            f"loading the {part} of {path}: there is no folder {folder.absolute()}. Set model.path to a folder with "
            f"config.json and a tokenizer, or to a Hub id such as Qwen/Qwen2.5-0.5B-Instruct."
        )
    hub_fault()  # without network the libraries read their caches only, and need no minute to say what is not there
    return path


def _not_found(part: str, path: str, error: Exception) -> str:
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return (
        f"loading the {part} of {path}: looked for a folder {Path(path).expanduser().absolute()} and for {path} in the "
        f"local Hub cache and on the Hub: {first_line} Set model.path to a Hugging Face folder, or download it first."
    )
