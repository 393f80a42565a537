"""Writes the plans of the runs in ``RUNS`` into the table of a page:

python docs/scripts/plans.py docs/how-to/first-gpu-run.md

The page's first block of YAML is the file ``my.yaml``. Of the models, only sizes are needed; they are those of the
Hub's ``config.json``.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from condensegrpo.config.checks import check_values
from condensegrpo.config.load import config_on
from condensegrpo.config.schema import ModelSettings
from condensegrpo.planning.plan import Architecture, Plan, architecture

GIB = 1 << 30
TABLE = re.compile(r"(<!-- runs -->\n).*?(<!-- end of runs -->)", re.DOTALL)
KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
SIZES: Mapping[str, tuple[int, ...]] = {
    "Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-32B-Instruct": (5120, 27648, 64, 40, 8, 152064, False),
}
ENGINE = "sampler.options.engine"
OFFLOADED = "learner.zero_stage=3 learner.offload.training=optimiser_and_weights"
RUNS = (  # billions of parameters, GPUs, GiB of each, keys beside those of ``my.yaml``
    ("1.5", 1, 24, "learner.zero_stage=2 learner.offload.training=optimiser"),
    ("1.5", 1, 24, "model.lora={}"),
    ("1.5", 1, 80, ""),
    ("7", 1, 24, f"{ENGINE}.gpu_memory_utilization=0.7 {OFFLOADED} model.lora={{}}"),
    ("7", 1, 80, "learner.zero_stage=2 learner.offload.training=optimiser"),
    ("7", 1, 80, "model.lora={}"),
    ("7", 8, 80, "learner.zero_stage=2"),
    ("32", 1, 80, f"{ENGINE}.gpu_memory_utilization=0.9 {OFFLOADED} model.lora={{}}"),
    ("32", 8, 80, f"{ENGINE}.tensor_parallel_size=8 learner.zero_stage=3 model.lora={{}}"),
)


def write_files(page: str, folder: Path) -> None:
    """Write what the commands of a page read: ``my.yaml`` and the models' configurations."""
    (folder / "my.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    for name, sizes in SIZES.items():
        model = folder / "Qwen" / name
        model.mkdir(parents=True)
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
        (model / "config.json").write_text(
            json.dumps({**config, **dict(zip(KEYS, sizes, strict=True))}), encoding="utf-8"
        )


def table(folder: Path) -> Iterator[str]:
    """The lines of the table of ``RUNS``: the tensors of each phase, in GiB."""
    size_of: Callable[[ModelSettings], Architecture] = cache(architecture)
    yield "| model | GPUs | keys | loading | sampling | learning | layers computed again | fits |"
    yield "|---|---|---|---|---|---|---|---|"
    for size, ranks, memory, keys in RUNS:
        path = folder / "Qwen" / f"Qwen2.5-{size}B-Instruct"
        config = config_on("gpu", str(folder / "my.yaml"), [f"model.path={path}", *keys.split()])
        check_values(config)
        planned = Plan(config, size_of(config.model), ranks=ranks, device="gpu", memory=memory * GIB)
        phases = " | ".join(f"{planned.total(phase) / GIB:.1f}" for phase in planned.phases)
        written = " ".join(f"`{key}`" for key in keys.split()) or "none"
        again = f"{planned.checkpointed} of {planned.model.layers}"
        fits = "yes" if planned.fits(memory * GIB) else "no"
        yield f"| {size} B | {ranks} × {memory} GiB | {written} | {phases} | {again} | {fits} |"


def rewritten(page: str, folder: Path) -> str:
    """The page with its table."""
    lines = "".join(f"{line}\n" for line in table(folder))
    return TABLE.sub(lambda match: match[1] + lines + match[2], page)


def main(path: Path) -> None:
    """Rewrite a page."""
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        write_files(page, Path(folder))
        path.write_text(rewritten(page, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
