"""vLLM's engine as it runs on a GPU, for one rank, and for two real ranks of which each has half of a model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from needs_vllm import needs_vllm
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm_as_on_a_gpu import ENVIRONMENT

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import SamplerError
from condensegrpo.samplers.vllm.engine import PLAN

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


def facts(folder: Path, *launcher: str, ranks: int, threads: int = 1) -> list[dict[str, Any]]:
    """What ranks that share vLLM's copy of a model write."""
    done = subprocess.run(
        [sys.executable, *launcher, str(Path(__file__).parent / "ranks_vllm.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=400,
        # without the choice of an engine that another test opened in this process
        env={name: value for name, value in os.environ.items() if name != PLAN}
        | {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = [json.loads((folder / f"facts_{rank}.json").read_text()) for rank in range(ranks)]
    for rank in written:
        assert rank["v2, asynchronous, compiled"] == [True, True, True]
        assert max(rank["gaps"]) < 1e-4
        assert rank["threads"] == 1  # which creates, steps and loads: vLLM keeps its stream
        assert rank["takes the plan of an earlier start"] == (ranks == 1)  # which the ranks may not agree on
        assert not rank["decoder remains"]  # else no engine that sleeps could follow in the process
    return written


@pytest.mark.skipif("LONG_TESTS" not in os.environ, reason="compiles on a CPU, of seconds there: LONG_TESTS=1 runs it")
def test_an_engine_as_on_a_gpu_gives_exact_replies_in_one_thread_and_leaves_nothing(folder: Path) -> None:
    """With the threads and batches that were set, where OpenMP would use two threads by default."""
    (one,) = facts(folder, ranks=1, threads=2)
    assert len(one["gaps"]) == 4
    assert one["described"] == "vLLM: up to 4 requests and 96 tokens in a step, 64 tokens a prompt with its reply"


@pytest.mark.skipif(
    "LONG_TESTS" not in os.environ, reason="test_doctor_gpu.py shares a model too: LONG_TESTS=1 runs it"
)
def test_two_ranks_share_a_model_and_each_gets_exact_replies_to_its_own_requests(folder: Path) -> None:
    """The probabilities are those of a plain forward pass, also after new weights, and where one rank asks alone."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    first, second = facts(folder, *launcher, ranks=2)
    assert (len(first["gaps"]), len(second["gaps"])) == (3, 2)


def test_ranks_that_do_not_divide_into_groups_are_refused(folder: Path) -> None:
    with pytest.raises(SamplerError, match=r"tensor_parallel_size=2: found 1 rank on 1 machine, wanted groups of 2"):
        build_plugin("samplers", "vllm", {"model_path": str(folder), "engine": {"tensor_parallel_size": 2}})
