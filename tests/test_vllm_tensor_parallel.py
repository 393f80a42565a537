"""Tensor parallel in process: two real ranks, each with half of a model in vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from needs_vllm import needs_vllm
from transformers import Qwen3Config, Qwen3ForCausalLM

from condensegrpo.assembly.plugins import build_plugin
from condensegrpo.core.errors import SamplerError

pytestmark = needs_vllm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_two_ranks_share_a_model_and_each_gets_exact_replies_to_its_own_requests(folder: Path) -> None:
    """The probabilities are those of a plain forward pass, also after new weights, and where one rank asks alone."""
    script = str(Path(__file__).parent / "two_ranks_vllm.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]
    done = subprocess.run(
        [*command, str(folder)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((folder / f"gaps_{rank}.json").read_text()) for rank in (0, 1))
    assert (len(first), len(second)) == (3, 2)
    assert max(first + second) < 1e-4


def test_ranks_that_do_not_divide_into_groups_are_refused(folder: Path) -> None:
    with pytest.raises(SamplerError, match=r"tensor_parallel_size=2: found 1 rank on 1 machine, wanted groups of 2"):
        build_plugin("samplers", "vllm", {"model_path": str(folder), "engine": {"tensor_parallel_size": 2}})
