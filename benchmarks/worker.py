"""Computes one pass over and over in a process of its own, so that its memory is nobody else's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from meter import Meter
from passes import Budget, ModelSize, Prepare, Step
from torch import nn

from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.devices import DTYPES

Clock = Literal["cpu", "wall"]


class Reading(NamedTuple):
    """What one computation of a pass took."""

    seconds: float
    peak: int  # bytes above the loaded model, the largest so far
    norm: float | None  # of the gradient, where the pass frees it


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker computes."""

    prepare: Prepare
    rows: Sequence[Segment]
    size: ModelSize
    budget: Budget
    threads: int
    clock: Clock  # cpu: time that the process computed, which other processes do not add to
    seed: int
    gradient: Path  # where the first gradient is written


def prepared(job: Job) -> Callable[[object], Reading]:
    """Load, and compute once on a small part to warm up. Returns what computes the pass once."""
    torch.set_num_threads(job.threads)
    torch.set_num_interop_threads(1)
    model = job.size.build(seed=job.seed, dtype=DTYPES[job.budget.dtype])
    model.to(device=job.budget.device)
    step = job.prepare(model, job.budget, job.rows)
    step([min(job.rows, key=lambda row: len(row.token_ids))])
    model.zero_grad()
    meter = Meter()

    def compute(_: object) -> Reading:
        seconds, norm = _timed(job, step)
        meter.ends("pass")
        reading = Reading(seconds, meter.peaks["pass"], norm)
        if norm is None and not job.gradient.exists():
            _write_gradient(model, job.gradient)
        model.zero_grad()
        return reading

    return compute


def _timed(job: Job, step: Step) -> tuple[float, float | None]:
    now = time.process_time if job.clock == "cpu" else time.perf_counter
    began = now()
    norm = step(job.rows)
    if job.budget.device != "cpu":
        torch.cuda.synchronize()
    return now() - began, norm


def _write_gradient(model: nn.Module, path: Path) -> None:
    grads = [weight.grad.detach().float().cpu() for weight in model.parameters() if weight.grad is not None]
    torch.save(grads, path)
