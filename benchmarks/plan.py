"""Compares the memory that `condensegrpo plan` predicts with what runs take; prints a table of docs/results.

    python benchmarks/plan.py [--only NAME ...]

Every case is a process of its own (one a rank under torchrun) with a model made on the spot, the real DeepSpeed learner
and, where the case samples, the real transformers sampler: load, sample, two optimiser steps, sample again.

Measured is a peak above the first state of the process (benchmarks/meter.py). Before that each process runs a tiny
model through the same code, so that libraries which load on first use are not counted. glibc keeps freed blocks that
are smaller than a threshold, which it raises to 32 MB by itself; MALLOC_MMAP_THRESHOLD_ pins it, so that freed tensors
go back at once.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from meter import Meter

from condensegrpo.assembly.learning_signal import objective
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.config.load import validate, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import SamplingParams, Segment, TrainedTurn
from condensegrpo.learner.engine import (
    DeepSpeedEngine,
    against_base,
    against_copy,
    close_deepspeed,
    measure_logprobs,
    open_reference,
    optimizer_step,
)
from condensegrpo.learner.micro_batches import pack_rows
from condensegrpo.learner.model_folder import configuration
from condensegrpo.planning.plan import COLOCATED, Device, Plan, architecture

MIB = 1 << 20
SECONDS = 600  # of a case
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_key_value_heads": 4}
BASE = {"num_attention_heads": 8, "head_dim": 64, "max_position_embeddings": 4096}
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 99}
LEARNER_ONLY = ("sampler.name=scripted", "evaluate.problems=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration that is planned and run."""

    name: str
    kind: str = "qwen3"
    sizes: dict[str, int | bool]  # of the model's configuration
    overrides: tuple[str, ...]
    ranks: int = 1


def _case(name: str, *overrides: str, kind: str = "qwen3", ranks: int = 1, **sizes: int | bool) -> Case:
    full: dict[str, int | bool] = {**BASE, **SMALL, "vocab_size": 50_000, "tie_word_embeddings": True, **sizes}
    return Case(name=name, kind=kind, sizes=full, overrides=overrides, ranks=ranks)


CASES = (
    _case("ZeRO 0", *LEARNER_ONLY, "learner.tokens_per_micro_batch=2048"),
    _case("ZeRO 1, untied head", *LEARNER_ONLY, "learner.zero_stage=1", kind="llama", tie_word_embeddings=False),
    _case("ZeRO 2, vocabulary 152k", *LEARNER_ONLY, "learner.zero_stage=2", vocab_size=151_936),
    _case("ZeRO 3", *LEARNER_ONLY, "learner.zero_stage=3", hidden_size=768, intermediate_size=2048),
    _case("bfloat16, ZeRO 1", *LEARNER_ONLY, "model.dtype=bfloat16", "learner.zero_stage=1"),
    _case("bfloat16, ZeRO 2, few tokens", *LEARNER_ONLY, "model.dtype=bfloat16", "learner.zero_stage=2",
          "learner.tokens_per_micro_batch=512", hidden_size=768, intermediate_size=2048),
    _case("ZeRO 2, 2 ranks", *LEARNER_ONLY, "learner.zero_stage=2", "train.problems_per_step=8", ranks=2),
    _case("bfloat16, ZeRO 3, 2 ranks", *LEARNER_ONLY, "model.dtype=bfloat16", "learner.zero_stage=3",
          "learner.tokens_per_micro_batch=512", "train.problems_per_step=8", ranks=2),
    _case("sampler, KL, 2 updates", "algorithm.kl.coefficient=0.1", "algorithm.updates_per_batch=2",
          "algorithm.importance.cap=2", "evaluate.problems=16"),
    _case("sampler, 64 requests", "evaluate.problems=64", "learner.tokens_per_micro_batch=456",
          "rollout.limits.max_output_tokens=8", num_key_value_heads=8),
    _case("grouped queries, wide MLP", *LEARNER_ONLY, kind="qwen2", hidden_size=1024, intermediate_size=4096,
          num_attention_heads=16, num_key_value_heads=2, num_hidden_layers=4, vocab_size=20_000),
    _case("LoRA, KL", *LEARNER_ONLY, "model.lora.rank=16", "algorithm.kl.coefficient=0.1"),
    _case("bfloat16, LoRA, ZeRO 2", *LEARNER_ONLY, "model.dtype=bfloat16", "model.lora.rank=16",
          "learner.zero_stage=2", kind="llama"),
    _case("whole turns (gspo)", *LEARNER_ONLY, "algorithm.loss.name=gspo", "learner.tokens_per_micro_batch=512"),
)  # fmt: skip


def configured(case: Case, model: Path) -> RunConfig:
    """The configuration of a case, with rows of 448 + 64 tokens unless it says otherwise."""
    tree = {
        "model": {"path": str(model)},
        "task": {"name": "ledger"},
        "rollout": {"limits": {"max_turns": 1, "max_context_tokens": 448, "max_output_tokens": 64}},
        "train": {"problems_per_step": 4, "samples_per_problem": 2, "steps": 2},
        "learner": {"tokens_per_micro_batch": 1024, "optimiser": {"lr": 1e-4}},
    }
    return vary(validate(tree, source=case.name), case.overrides)


def write_model(folder: Path, kind: str, sizes: dict[str, int | bool], dtype: torch.dtype) -> None:
    """A model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=dtype).save_pretrained(folder)


# --- one run, in a process of its own


def measure_run(config: RunConfig, source: str) -> dict[str, int]:
    """Load, sample, learn twice and sample as a training run does; the peak of each phase in bytes, of this rank.

    Every rank must call it.

    Args:
        source: folder of the model.
    """
    meter = Meter()
    sampler = open_sampler(config, source) if config.sampler.name == COLOCATED else None
    learner = open_learner(config, source, config.learner.optimiser, lora=config.model.lora, total_steps=2)
    meter.ends("loading")
    vocabulary = configuration(source).vocab_size
    for phase in ("sampling", "learning", "sampling"):
        if phase == "learning":
            _learn(config, source, learner, [_longest_row(config, vocabulary)] * _rows_of_step(config))
        elif sampler is not None:
            asyncio.run(_sample(sampler, config, vocabulary))
        meter.ends(phase)
    close_deepspeed(learner)
    if sampler is not None:
        sampler.close()
    return meter.peaks


def _learn(config: RunConfig, source: str, learner: DeepSpeedEngine, rows: Sequence[Segment]) -> None:
    """Two optimiser steps, with the reference and the old log-probabilities that a run needs."""
    algorithm, model = config.algorithm, config.model
    batches = pack_rows(rows, max_tokens=config.learner.tokens_per_micro_batch, share=False)
    if algorithm.kl.coefficient and model.lora is not None:
        batches = against_base(learner, batches, 1.0)
    elif algorithm.kl.coefficient:
        reference = open_reference(source, dtype=model.dtype, attention=model.attention, device=learner.device)
        batches = against_copy(reference, learner.device, batches, 1.0)
    if algorithm.importance.cap and algorithm.updates_per_batch > 1:
        measure_logprobs(learner, batches)
    for _ in range(2):
        optimizer_step(learner, batches, objective(algorithm))


def _rows_of_step(config: RunConfig) -> int:
    """As many as this rank has trajectories in a step."""
    from condensegrpo.learner import ranks

    return config.train.problems_per_step // ranks.world_size() * config.train.samples_per_problem


def _longest_row(config: RunConfig, vocabulary: int) -> Segment:
    """A full context and a full output."""
    context, outputs = config.rollout.limits.max_context_tokens, config.rollout.limits.max_output_tokens
    turn = TrainedTurn(turn=0, start=context, logprobs=(-1.0,) * outputs, advantage=1.0, weight=1e-3)
    token_ids = tuple(index % vocabulary for index in range(context + outputs))
    return Segment(token_ids=token_ids, turns=(turn,), trajectory="row", first_turn=0)


async def _sample(sampler: Sampler, config: RunConfig, vocabulary: int) -> None:
    limits = config.rollout.limits
    prompt = [index % vocabulary for index in range(limits.max_context_tokens)]
    await asyncio.gather(
        *(
            sampler.sample(
                prompt[: len(prompt) - (seed == 0)],  # one is shorter: real prompts are padded to the longest
                SamplingParams(max_tokens=limits.max_output_tokens, temperature=1.0, seed=seed),
            )
            for seed in range(max(config.evaluate.problems, _rows_of_step(config)))
        )
    )


def child(case: Case, folder: Path) -> None:
    """Run a tiny model for what loads on first use, then the case; the first rank prints its peaks."""
    from condensegrpo.learner import ranks

    torch.set_num_threads(1)
    ranks.join()
    few = ("rollout.limits.max_context_tokens=12", "rollout.limits.max_output_tokens=4", "evaluate.problems=4")
    measure_run(vary(configured(case, folder / "tiny"), few), str(folder / "tiny"))
    peaks = measure_run(configured(case, folder / "model"), str(folder / "model"))
    if ranks.rank() == 0:
        print("PEAKS " + json.dumps(peaks), flush=True)
    ranks.leave()
    os._exit(0)  # torch and DeepSpeed take seconds to leave


# --- all of them


def measured(case: Case, folder: Path) -> dict[str, float]:
    """The peaks of a case's phases, from processes of its own."""
    dtype = torch.bfloat16 if "model.dtype=bfloat16" in case.overrides else torch.float32
    write_model(folder / "model", case.kind, case.sizes, dtype)
    write_model(folder / "tiny", case.kind, {**case.sizes, **TINY}, dtype)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}")
    command = [sys.executable, *(launcher if case.ranks > 1 else ()), __file__, "--child", case.name, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEAKS ")]
    if not lines:
        raise SystemExit(f"{case.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    peaks: dict[str, float] = json.loads(lines[0].removeprefix("PEAKS "))
    return peaks


def line(name: str, predicted: Plan, peaks: dict[str, float]) -> str:
    """A row of the table."""
    most = max(peaks.values())
    others = ", ".join(
        f"{phase} {predicted.total(phase) / MIB:.0f} / {peaks[phase] / MIB:.0f}"
        for phase in predicted.phases
        if phase in peaks and phase != predicted.peak
    )
    return (
        f"| {name} | {predicted.trainable / 1e6:.0f} M | {predicted.batch.tokens} | {predicted.peak} | "
        f"{predicted.bytes / MIB:.0f} | {most / MIB:.0f} | {predicted.bytes / most - 1:+.1%} | {others} |"
    )


def main(names: Sequence[str]) -> None:
    """Run the cases one after another and print the table."""
    device: Device = "gpu" if torch.cuda.is_available() else "cpu"
    print("| case | parameters | tokens | peak in | predicted MiB | measured MiB | off by | other phases |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            peaks = measured(case, folder)
            config = configured(case, folder / "model")
            print(
                line(
                    case.name,
                    Plan(config, architecture(config.model), ranks=case.ranks, device=device),
                    peaks,
                )
            )
            sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(next(case for case in CASES if case.name == arguments.child[0]), Path(arguments.child[1]))
    else:
        main(arguments.only)
