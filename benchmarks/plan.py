"""Compares the memory that `condensegrpo plan` predicts with what runs take; prints a table of docs/results.

    python benchmarks/plan.py [--only NAME ...]

Every case is a process of its own (one a rank under torchrun) with a model made on the spot, the real DeepSpeed learner
and, where the case samples, the real transformers sampler: load, sample, two optimiser steps, sampler update, save.

Measured is what planning/measured.py says. Before that each process runs a tiny model through the same code, so that
libraries which load on first use are not counted. glibc keeps freed blocks that are smaller than a
threshold, which it raises to 32 MB by itself; MALLOC_MMAP_THRESHOLD_ pins it, so that freed tensors go back at once.
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

from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.config.load import validate, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.learner import checkpoint
from condensegrpo.learner.engine import close_deepspeed
from condensegrpo.learner.model_folder import configuration, in_main_memory, write_policy
from condensegrpo.learner.new_model import new_tokenizer
from condensegrpo.learner.weights import gathered_weights
from condensegrpo.planning.architecture import architecture
from condensegrpo.planning.measured import Meter, learn, longest_row, rows_of_step
from condensegrpo.planning.plan import Plan, plan
from condensegrpo.planning.sampling import COLOCATED
from condensegrpo.planning.zero import Device

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


def measure_run(config: RunConfig, source: str, folder: Path) -> dict[str, int]:
    """Load, sample, learn twice and publish as a training run does; the peak of each phase in bytes, of this rank.

    Every rank must call it.

    Args:
        source: folder of the model; its weights are moved by two steps.
        folder: where checkpoint and policy are written.
    """
    meter = Meter()
    sampler = open_sampler(config, source) if config.sampler.name == COLOCATED else None
    learner = open_learner(config, source, config.learner.optimiser, lora=config.model.lora, total_steps=2)
    meter.ends("loading")
    vocabulary = configuration(source).vocab_size
    if sampler is not None:
        asyncio.run(_sample(sampler, config, vocabulary))
        meter.ends("rolling out")
    learn(config, source, learner, [longest_row(config, vocabulary)] * rows_of_step(config))
    meter.ends("learning")
    if sampler is not None:
        asyncio.run(_sample(sampler, config, vocabulary))
        meter.ends("rolling out")
        sampler.update_weights(gathered_weights(learner), 1)
    checkpoint.save(learner, folder / "checkpoints", step=1, state={})
    write_policy(
        folder / "policy",
        learner.module.policy.config,
        in_main_memory(gathered_weights(learner)),
        tokenizer=new_tokenizer(["any"], kind="words", vocab_size=64),
    )
    meter.ends("publishing")
    close_deepspeed(learner)
    if sampler is not None:
        sampler.close()
    return meter.peaks


async def _sample(sampler: Sampler, config: RunConfig, vocabulary: int) -> None:
    limits = config.rollout.limits
    prompt = [index % vocabulary for index in range(limits.max_context_tokens)]
    await asyncio.gather(
        *(
            sampler.sample(
                prompt[: len(prompt) - (seed == 0)],  # one is shorter: real prompts are padded to the longest
                SamplingParams(max_tokens=limits.max_output_tokens, temperature=1.0, seed=seed),
            )
            for seed in range(max(config.evaluate.problems, rows_of_step(config)))
        )
    )


def child(case: Case, folder: Path) -> None:
    """Run a tiny model for what loads on first use, then the case; the first rank prints its peaks."""
    from condensegrpo.learner import ranks

    torch.set_num_threads(1)
    ranks.join()
    few = ("rollout.limits.max_context_tokens=12", "rollout.limits.max_output_tokens=4", "evaluate.problems=4")
    measure_run(vary(configured(case, folder / "tiny"), few), str(folder / "tiny"), folder / "first")
    peaks = measure_run(configured(case, folder / "model"), str(folder / "model"), folder / "second")
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
    peak, most = predicted.peak, max(peaks.values())
    phases = ", ".join(
        f"{phase.name} {phase.bytes / MIB:.0f} / {peaks[phase.name] / MIB:.0f}"
        for phase in predicted.phases
        if phase.name in peaks and phase is not peak
    )
    parameters = predicted.run.weights.trainable
    return (
        f"| {name} | {parameters / 1e6:.0f} M | {predicted.run.batch.tokens} | {peak.name}: {peak.moment} | "
        f"{peak.bytes / MIB:.0f} | {most / MIB:.0f} | {peak.bytes / most - 1:+.1%} | {phases} |"
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
            print(line(case.name, plan(config, architecture(config.model), ranks=case.ranks, device=device), peaks))
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
