"""Measures what ``plan.py`` predicts of the learner: its peak memory with this configuration, on this device.

The learner is the real one under DeepSpeed. Contexts and outputs are as long as they may be. A peak is what the process
held above its first state: on a GPU torch's ``max_memory_allocated``, on a CPU the peak resident memory (VmHWM, reset
between the phases).
"""

import ctypes
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from condensegrpo.algorithms.packing import lay_out, pack
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.trajectory import Segment, TrainedTurn
from condensegrpo.learner import ranks
from condensegrpo.learner.devices import synchronize
from condensegrpo.learner.engine import (
    DeepSpeedEngine,
    against_base,
    against_copy,
    close_deepspeed,
    measure_logprobs,
    open_reference,
    optimizer_step,
)
from condensegrpo.learner.model_folder import configuration


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


class Learned(NamedTuple):
    """What a rank measured of its steps."""

    peaks: dict[str, int]  # of ``loading`` and ``learning``, in bytes
    reserved: int  # most bytes that torch held on the GPU while learning, gaps between tensors included
    compiled: bool  # whether the decoder's layers are
    rows: int  # of a step: two full micro-batches of the longest rows, or as many as a step has
    seconds: tuple[float, float] | None  # of an optimiser step on so many rows, and on twice as many; None: no memory


def measure_learning(config: RunConfig, source: str) -> Learned:
    """Load the learner and take steps on the longest rows. Every rank must call it."""
    row = longest_row(config, configuration(source).get_text_config().vocab_size)
    rows = min(rows_of_step(config), 2 * max(1, config.learner.tokens_per_micro_batch // len(row.token_ids)))
    meter = Meter()
    learner = open_learner(config, source, config.learner.optimiser, lora=config.model.lora, total_steps=2)
    meter.ends("loading")
    try:
        once = learn(config, source, learner, [row] * rows)
        reserved = torch.cuda.max_memory_reserved()
        meter.ends("learning")
        try:
            seconds = once, learn(config, source, learner, [row] * 2 * rows)
        except torch.OutOfMemoryError:  # a run may have fewer rows in a step
            seconds = None
        return Learned(meter.peaks, reserved, learner.module.compiled, rows, seconds)
    finally:
        close_deepspeed(learner)


def learn(config: RunConfig, source: str, learner: DeepSpeedEngine, rows: Sequence[Segment]) -> float:
    """Two optimiser steps, with the reference and the old log-probabilities that a run needs.

    Returns the seconds of the second one, when kernels are compiled.
    """
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
        synchronize()
        began = time.monotonic()
        optimizer_step(learner, batches, objective(algorithm))
    synchronize()  # its figures are on the host before a GPU has updated the weights
    return time.monotonic() - began


def rows_of_step(config: RunConfig) -> int:
    """As many as this rank has trajectories in a step."""
    return config.train.problems_per_step // ranks.world_size() * config.train.samples_per_problem


def longest_row(config: RunConfig, vocabulary: int) -> Segment:
    """A full context and a full output."""
    context, outputs = config.rollout.limits.max_context_tokens, config.rollout.limits.max_output_tokens
    turn = TrainedTurn(turn=0, start=context, logprobs=(-1.0,) * outputs, advantage=1.0, weight=1e-3)
    token_ids = tuple(index % vocabulary for index in range(context + outputs))
    return Segment(token_ids=token_ids, turns=(turn,), trajectory="row", first_turn=0)
