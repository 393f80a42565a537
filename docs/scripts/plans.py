"""Runs the ``condensegrpo plan`` commands of a page and writes what they print into it:

python docs/scripts/plans.py docs/how-to/first-gpu-run.md

A block of text that begins with ``$ condensegrpo plan`` is such a command with its output. The first block of YAML is
the file ``my.yaml``. Of the models, only sizes are needed; they are those of the Hub's ``config.json``.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

COLUMNS = "120"  # of the output
BLOCK = re.compile(r"(```text\n\$ condensegrpo (plan [^\n]*)\n)(.*?)(```\n)", re.DOTALL)
SIZES: Mapping[str, Mapping[str, int | bool]] = {
    "Qwen2.5-1.5B-Instruct": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B-Instruct": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


def write_files(page: str, folder: Path) -> None:
    """Write what the commands of a page read: ``my.yaml`` and the models' configurations."""
    (folder / "my.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    for name, sizes in SIZES.items():
        model = folder / "Qwen" / name
        model.mkdir(parents=True)
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
        (model / "config.json").write_text(json.dumps({**config, **sizes}), encoding="utf-8")


def rewritten(page: str, run: Callable[[Sequence[str]], str]) -> str:
    """The page with what its commands print; ``run`` takes the arguments of ``condensegrpo``."""

    def block(match: re.Match[str]) -> str:
        lines = run(match[2].split()).splitlines()
        return match[1] + "".join(f"{line.rstrip()}\n" for line in lines) + match[4]

    return BLOCK.sub(block, page)


def main(path: Path) -> None:
    """Rewrite a page."""
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        write_files(page, Path(folder))

        def run(arguments: Sequence[str]) -> str:
            command = [sys.executable, "-m", "condensegrpo.cli", *arguments]
            environment = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode > 1:  # 1: it does not fit
                sys.exit(done.stderr)
            return done.stdout

        path.write_text(rewritten(page, run), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
