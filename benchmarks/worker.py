"""A process that computes one pass over and over when it is told to, so that its memory is nobody else's.

    parent ─ True ─▶ worker: computes once ─▶ Reading ─▶ parent            False ends it

All workers of a workload live at the same time and take turns, so that whatever disturbs the machine disturbs all.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from passes import Budget, ModelSize, Prepare, Step
from torch import nn

from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.dtypes import DTYPES

Clock = Literal["cpu", "wall"]


class Reading(NamedTuple):
    """What one computation of a pass took."""

    seconds: float
    peak: int  # bytes above the loaded model, the largest so far
    norm: float | None  # of the gradient, where the pass leaves none behind


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


class Worker:
    """The parent's end of a worker."""

    def __init__(self, job: Job) -> None:
        # A fork is ready at once; CUDA does not survive one.
        on_cpu = job.budget.device == "cpu"
        context = multiprocessing.get_context("fork") if on_cpu else multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(job, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def compute(self) -> Reading:
        """Have the pass computed once."""
        self.pipe.send(True)
        try:
            reading: Reading = self.pipe.recv()
        except EOFError as error:
            self.process.join()
            code = self.process.exitcode
            raise RuntimeError(
                f"computing a pass: its process ended with exit code {code}, wanted a reading. What it printed says "
                f"why; -9 is a lack of memory: leave that pass out with --workloads, or use fewer --questions."
            ) from error
        return reading

    def close(self) -> None:
        """End the process."""
        self.pipe.send(False)  # a closed pipe would not do: workers forked later hold its end as well
        self.process.join()


def serve(job: Job, pipe: Connection) -> None:
    """Load, compute once on a small part to warm up, then once for each message."""
    torch.set_num_threads(job.threads)
    torch.set_num_interop_threads(1)
    on_cpu = job.budget.device == "cpu"
    model = job.size.build(seed=job.seed, dtype=DTYPES[job.budget.dtype])
    model.to(device=job.budget.device)
    step = job.prepare(model, job.budget, job.rows)
    step([min(job.rows, key=lambda row: len(row.token_ids))])
    model.zero_grad()
    loaded = resident(on_cpu)
    forget_peak(on_cpu)
    largest = 0
    for count in _messages(pipe):
        seconds, norm = _timed(job, step)
        largest = max(largest, peak(on_cpu) - loaded)
        if count == 0 and norm is None:
            _write_gradient(model, job.gradient)
        model.zero_grad()
        pipe.send(Reading(seconds, largest, norm))


def resident(on_cpu: bool) -> int:
    """Bytes that the process holds: of memory on a CPU, of the GPU's otherwise."""
    if not on_cpu:
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak(on_cpu: bool) -> int:
    """The most bytes that the process held since ``forget_peak``."""
    if not on_cpu:
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak(on_cpu: bool) -> None:
    """Count the peak anew from here."""
    if on_cpu:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
    else:
        torch.cuda.reset_peak_memory_stats()


def _messages(pipe: Connection) -> Iterator[int]:
    """Counts the messages until one says that it is enough; also where the parent is gone."""
    count = 0
    with suppress(EOFError):
        while pipe.recv():
            yield count
            count += 1


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
