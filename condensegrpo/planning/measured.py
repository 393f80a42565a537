"""Measures what ``plan.py`` predicts: the peak memory of each phase of a run with this configuration, on this device.

The learner is the real one under DeepSpeed, the sampler that of transformers if the configuration names it. Contexts
and outputs are as long as they may be. A peak is what the process held above its first state: on a GPU torch's
``max_memory_allocated``, on a CPU the peak resident memory (VmHWM, reset between the phases).
"""

import asyncio
import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path

import torch

from condensegrpo.algorithms.packing import lay_out, pack
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.protocols import Sampler
from condensegrpo.core.trajectory import SamplingParams, Segment, TrainedTurn
from condensegrpo.learner import checkpoint, ranks
from condensegrpo.learner.engine import DeepSpeedEngine, close_deepspeed, measure_logprobs, optimizer_step
from condensegrpo.learner.new_model import new_tokenizer
from condensegrpo.learner.policy import configuration, save_policy
from condensegrpo.learner.reference import against_base, against_copy, open_reference
from condensegrpo.learner.weights import gathered_weights
from condensegrpo.planning.plan import COLOCATED


class Meter:
    """The peak of each phase above what was there at first."""

    def __init__(self) -> None:
        self._gpu = torch.cuda.is_available()
        gc.collect()
        if not self._gpu:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._reset()
        self._first = self._peak()
        self.peaks: dict[str, int] = {}

    def ends(self, phase: str) -> None:
        """What was taken since the last phase ended belongs to this one."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._peak() - self._first)
        self._reset()

    def _reset(self) -> None:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def _peak(self) -> int:
        if self._gpu:
            return int(torch.cuda.max_memory_allocated())
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in status if line.startswith("VmHWM:"))) * 1024


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
    _learn(config, source, learner, [_row(config, vocabulary)] * _rows(config))
    meter.ends("learning")
    if sampler is not None:
        asyncio.run(_sample(sampler, config, vocabulary))
        meter.ends("rolling out")
        sampler.update_weights(gathered_weights(learner), 1)
    checkpoint.save(learner, folder / "checkpoints", step=1, state={})
    save_policy(
        folder / "policy",
        model_config=learner.module.policy.config,
        named_tensors=gathered_weights(learner),
        tokenizer=new_tokenizer(["any"], kind="words", vocab_size=64),
    )
    meter.ends("publishing")
    close_deepspeed(learner)
    if sampler is not None:
        sampler.close()
    return meter.peaks


def measure_learning(config: RunConfig, source: str) -> dict[str, int]:
    """Load the learner and take two steps on two full micro-batches of the longest rows, or as many as a step has.

    Every rank must call it. Returns the peaks of ``loading`` and ``learning`` in bytes, of this rank.
    """
    row = _row(config, configuration(source).vocab_size)
    rows = min(_rows(config), 2 * max(1, config.learner.tokens_per_micro_batch // len(row.token_ids)))
    meter = Meter()
    learner = open_learner(config, source, config.learner.optimiser, lora=config.model.lora, total_steps=2)
    meter.ends("loading")
    try:
        _learn(config, source, learner, [row] * rows)
        meter.ends("learning")
    finally:
        close_deepspeed(learner)
    return meter.peaks


def _learn(config: RunConfig, source: str, learner: DeepSpeedEngine, rows: Sequence[Segment]) -> None:
    """Two optimiser steps, with the reference and the old log-probabilities that a run needs."""
    algorithm = config.algorithm
    packed = pack([len(row.token_ids) for row in rows], config.learner.tokens_per_micro_batch)
    batches = [lay_out([(rows[index],) for index in batch]) for batch in packed]
    if algorithm.kl.coefficient:
        model, device = config.model, learner.device
        if model.lora is not None:
            batches = against_base(learner, batches, 1.0)
        else:
            reference = open_reference(source, dtype=model.dtype, attention=model.attention, device=device)
            batches = against_copy(reference, device, batches, 1.0)
    if algorithm.importance.cap and algorithm.updates_per_batch > 1:
        measure_logprobs(learner, batches)
    for _ in range(2):
        optimizer_step(learner, batches, objective(algorithm))


def _rows(config: RunConfig) -> int:
    return config.train.problems_per_step // ranks.world_size() * config.train.samples_per_problem


def _row(config: RunConfig, vocabulary: int) -> Segment:
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
            for seed in range(max(config.evaluate.problems, _rows(config)))
        )
    )
