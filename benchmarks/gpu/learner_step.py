"""Where a learner's step spends its time, its MFU, and the same rows in TRL's trainer.

    cd benchmarks && python -m gpu.learner_step --out OUT                 4 minutes: three shapes, two workloads
    … --set learner.checkpoint_activations=off --set learner.compile_layers=off       one setting after another

OUT/learner_step.jsonl has a line for every step, OUT/profile_*.txt the kernels of one. Rows are those of
``workloads.py``: condensed, a row a turn, and append, a row a trajectory. Ours is what ``train`` opens and calls:
packing, loss, clipping and AdamW are in the time. MFU counts every token once that must be computed (``flops.py``).
``busy`` is the time in which the GPU computes, over that of the step; the rest are gaps, which the host leaves.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from devices import peak_of, utilisation
from flops import useful_flops
from sides import Run, Side
from torch.profiler import ProfilerActivity
from workloads import LENGTHS, QUICK_LENGTHS, Kind, Workload, workload

from condensegrpo.assembly.learning_signal import objective
from condensegrpo.assembly.open_learner import choices, open_learner
from condensegrpo.config.load import load_config
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import ranks
from condensegrpo.learner.devices import synchronize
from condensegrpo.planning.plan import config_on_devices
from condensegrpo.training.learn_step import update
from gpu.policy import SHAPES, random_policy
from gpu.record import Record, device, dtype, parser, recording, side
from gpu.trl_learner import MISSING, trl_learner

RAND = Path(__file__).parent / "rand.yaml"
LISTED = 12  # kernels of a profile that are noted


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a learner is opened with."""

    policy: Path
    overrides: Sequence[str]  # of the configuration
    profile: Path  # of the table of kernels


def our_learner(job: Job) -> Run:
    """The learner of ``train``; a run takes one step with some rows, or profiles one."""
    config = load_config(RAND, [f"model.path={job.policy}", *job.overrides])
    ranks.join(config.learner.timeout_minutes)
    began = time.monotonic()
    fitted = config_on_devices(config, ranks=1, memory=ranks.least_device_memory())
    learner = open_learner(fitted, str(job.policy), config.learner.optimiser, lora=None, total_steps=1000)
    opened = {"opened_seconds": time.monotonic() - began, "chosen": choices(fitted, learner)}
    step = partial(
        update,
        learner,
        objective=objective(config.algorithm),
        reference=None,
        updates=1,
        measure_old=False,
        temperature=1.0,
    )

    def run(request: tuple[Sequence[Segment], int | None, bool]) -> dict[str, object]:
        rows, most, profiled = request
        most = most or config.learner.tokens_per_micro_batch
        if profiled:
            return profile(lambda: step(rows=rows, max_tokens=most), job.profile)
        taken = timed(lambda: step(rows=rows, max_tokens=most))
        found = taken.pop("found")
        return {
            **opened,
            **taken,
            "micro_batch": most,
            "computed": found["tokens/computed"],
            "norm": found["grad_norm"],
        }

    return run


def timed(step: Any) -> dict[str, Any]:  # noqa: ANN401  a function
    """Seconds of a step, its peak memory on a GPU, and what it returns."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    began = time.perf_counter()
    found = step()
    synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {"seconds": time.perf_counter() - began, "peak_gib": peak, "found": found}


def profile(step: Any, file: Path) -> dict[str, object]:  # noqa: ANN401  a function
    """The kernels of a step, the longest first; how often the host waited; its table is written to a file."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        taken = timed(step)
    averages = profiler.key_averages()
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    file.write_text(averages.table(sort_by=name, row_limit=60, max_name_column_width=90), encoding="utf-8")
    of_device = [each for each in averages if not on_gpu or each.device_type != torch.autograd.DeviceType.CPU]
    longest = sorted(of_device, key=lambda each: -getattr(each, name))
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::item", "aten::nonzero", "cudaMemcpyAsync")
    return {
        "seconds": taken["seconds"],  # with the profiler's cost
        "busy": sum(getattr(each, name) for each in of_device) / 1e6 / taken["seconds"],
        "launches": sum(each.count for each in of_device),
        "waits": {
            each.key: [each.count, round(each.cpu_time_total / 1e3, 1)] for each in averages if each.key in waits
        },
        "kernels": [[each.key[:90], round(getattr(each, name) / 1e3, 2), each.count] for each in longest[:LISTED]],
    }


def measure(
    record: Record, learner: Side, facts: Mapping[str, object], load: Workload, options: argparse.Namespace
) -> None:
    """Steps of one learner with one workload, the first of which is not timed."""
    size = SHAPES[str(facts["shape"])]
    flops, peak = useful_flops(size, load.rows), peak_of(device(), dtype=dtype(), tflops=options.peak_tflops)
    for number in range(1 + options.rounds):
        found = learner.run((load.rows, options.micro_batch, False))
        seconds = found["seconds"]
        record.note(
            "step",
            **facts,
            timed=number > 0,
            rows=len(load.rows),
            row_tokens=load.tokens,
            trained=load.trained,
            row_tokens_per_second=load.tokens / seconds,
            mfu=None if peak is None else utilisation(flops, seconds, peak),
            **found,
        )


def parse() -> argparse.Namespace:
    """The options; on a CPU toys are the default."""
    made = parser(__doc__, seconds=240)
    gpu = torch.cuda.is_available()
    made.add_argument(
        "--shapes",
        nargs="+",
        choices=list(SHAPES),
        default=["0.6b", "1.5b", "7b-8-layers", "0.14b"] if gpu else ["toy"],
    )
    made.add_argument(
        "--workloads", nargs="+", choices=[str(kind) for kind in Kind], default=[str(kind) for kind in Kind]
    )
    made.add_argument("--questions", type=int, default=16 if gpu else 1, help="each has 8 trajectories of 6 turns")
    made.add_argument("--programs", nargs="+", choices=["ours", "trl"], default=["ours", "trl"])
    made.add_argument("--set", action="append", default=[], help="an override; ours is measured again with each")
    made.add_argument("--micro-batch", type=int, help="tokens; default: the configuration's")
    made.add_argument("--trl-rows", type=int, default=16, help="rows of TRL's micro-batch, halved while memory lacks")
    made.add_argument("--peak-tflops", type=float, help="of the device, for MFU; default: see devices.py")
    return made.parse_args()


def main() -> None:
    """All learners, one after another; every process imports while the first one measures."""
    options = parse()
    kinds = [Kind(name) for name in options.workloads]
    with recording("learner_step", options) as record:
        planned: list[tuple[dict[str, object], Side]] = []
        for shape in options.shapes:
            policy = options.models / shape
            for number, override in enumerate(["", *options.set] if "ours" in options.programs else ()):
                file = options.out / f"profile_{shape}_{number}.txt"
                job = Job(policy=policy, overrides=[override] if override else [], profile=file)
                planned.append(({"program": "ours", "shape": shape, "set": override}, side(partial(our_learner, job))))
            if "trl" in options.programs and find_spec("trl") is None:
                record.note("left out", program="trl", why=MISSING)
            elif "trl" in options.programs:
                start = partial(trl_learner, policy, options.trl_rows)
                planned.append(({"program": "trl", "shape": shape}, side(start)))
        lengths = LENGTHS if torch.cuda.is_available() else QUICK_LENGTHS
        for facts, learner in planned:
            shape = str(facts["shape"])
            random_policy(options.models, shape)
            with record.attempt(**facts), closing(learner):
                for kind in kinds:
                    load = workload(
                        kind, lengths[kind], questions=options.questions, vocabulary=SHAPES[shape].vocabulary, seed=0
                    )
                    measure(record, learner, {**facts, "workload": kind}, load, options)
                if facts["program"] == "ours":
                    some = load.rows[: 2 * len(load.rows) // max(2, options.questions)]  # about a micro-batch
                    found = learner.run((some, options.micro_batch, True))
                    record.note("profile", **facts, workload=kind, **found)


if __name__ == "__main__":
    main()
