"""What several ranks do in the learner's tests, as processes of their own: ``two_ranks.py SCENARIO,… FOLDER``.

Every scenario writes what it found as ``FOLDER/<name>.pt``; the tests compare that with plain torch in their process.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from adapters import EVERYWHERE, adapted_qwen3, moved_qwen3
from builders import scored, trajectory
from estimating import LOSSES
from packed import collate, hidden_and_bytes
from tiny import forking_rows, kl_surrogate, llama, qwen3, rows, segment, surrogate, wide_llama
from torch import Tensor
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel
from waiting import eventually

from condensegrpo.algorithms.objective import Objective, ObjectiveFunction, ObjectiveValue, PerToken
from condensegrpo.algorithms.packing import PackedBatch, lay_out
from condensegrpo.core.errors import LearnerError, RolloutError
from condensegrpo.core.observer import Observer
from condensegrpo.core.trajectory import Segment, StopReason
from condensegrpo.episodes.failures import FailureWatch, failures_of
from condensegrpo.learner import checkpoint, ranks
from condensegrpo.learner.devices import DTYPES
from condensegrpo.learner.engine import (
    STAGES,
    DeepSpeedEngine,
    Offload,
    against_base,
    close_deepspeed,
    measure_logprobs,
    open_deepspeed,
    optimizer_step,
)
from condensegrpo.learner.layers import CompileTrial, agreed_trial, checkpoint_layers
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.micro_batches import pack_rows
from condensegrpo.learner.settings import Dtype, OptimizerSettings
from condensegrpo.learner.training_state import on_device, to_main_memory
from condensegrpo.learner.weights import adapters, gathered_weights

OPTIMISER = OptimizerSettings(lr=0.01, eps=1e-3, weight_decay=0.1, grad_clip=0.05, warmup_steps=2)
STEPS = 2
ROWS = {"2_1": (2, 1), "3_0": (3, 0)}  # of the two ranks
SPLITS = (("3_0", 0), ("2_1", 1), ("3_0", 2), ("2_1", 3), ("3_0", 3))  # with the ZeRO stage
OFFLOAD: dict[int, Offload] = {1: "optimiser", 3: "optimiser_and_weights"}  # by the stage of "2_1"


def at_once(logp_T: Tensor, batch: PackedBatch) -> ObjectiveValue:
    """An objective that sees all trained tokens of a micro-batch together."""
    statistics = {"ratio": logp_T.detach().exp()}
    return ObjectiveValue(loss_T=surrogate(logp_T, batch), statistics=statistics, kl_T=kl_surrogate(logp_T, batch))


loss = PerToken(at_once)  # the same, a tile at a time


def micro_batches(some: Sequence[Segment], size: int) -> list[PackedBatch]:
    return [collate(some[start : start + size]) for start in range(0, len(some), size)]


def train(
    stage: int,
    mine: Sequence[Sequence[PackedBatch]],
    objective: ObjectiveFunction = loss,
    *,
    model: Callable[[], PreTrainedModel] = qwen3,
    dtype: Dtype = "float32",
    offload: Offload = "none",
    away: bool = False,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Some steps of a fresh engine, whose state may be away between them; the weights after them, metrics of each."""
    engine = open_deepspeed(
        model().to(DTYPES[dtype]), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype=dtype, offload=offload
    )
    stats = []
    if away:
        to_main_memory(engine)
    for batches in mine:
        with on_device(engine) if away else nullcontext():
            stats.append(optimizer_step(engine, batches, objective, temperature=0.9))
        assert sum(1 for _ in gathered_weights(engine))  # as a sampler is sent them
    weights = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
    close_deepspeed(engine)
    return weights, stats


def uneven(folder: Path) -> None:
    """Two ranks with 2 rows and 1, and offload, then with 3 and none; a micro-batch a row. Under ZeRO 2 as on a GPU."""
    rank = ranks.rank()
    for name, stage in SPLITS:
        first, second = ROWS[name]
        mine = slice(0, first) if rank == 0 else slice(first, first + second)
        batches = [micro_batches(rows(3, seed=step)[mine], 1) for step in range(STEPS)]
        found = train(stage, batches, offload=OFFLOAD.get(stage, "none") if second else "none", away=stage == 2)
        torch.save(found, folder / f"{name}_stage{stage}_rank{rank}.pt")
        if stage == 2:
            torch.save(train(2, batches, dtype="bfloat16", away=True), folder / f"bfloat16_rank{rank}.pt")


def shared_out(folder: Path) -> None:
    """Rows that share prefixes, all but two of them on the first rank until they are shared out."""
    rank = ranks.rank()
    steps = []
    for step in range(STEPS):
        mine = slice(0, 22) if rank == 0 else slice(22, 24)
        steps.append(pack_rows(forking_rows(24, seed=step)[mine], max_tokens=40, share=True))
    sizes = [sum(batch.token_ids.numel() for batch in batches) for batches in steps]
    for stage in (1, 3):
        torch.save((*train(stage, steps), sizes), folder / f"shared_stage{stage}_rank{rank}.pt")


def chunks(folder: Path) -> None:
    """ZeRO 3 with nothing kept gathered, and heads that need different numbers of chunks or tiles on the two ranks."""
    rank = ranks.rank()
    mine = collate(rows(40)) if rank == 0 else collate(rows(41)[40:])
    for name, objective in (("chunks", at_once), ("tiles", loss)):
        engine = open_deepspeed(llama(), zero_stage=3, optimizer=OPTIMISER, total_steps=10, dtype="float32")
        engine.module.head.chunk_tokens = 50
        stats = optimizer_step(engine, [mine], objective)
        weights = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
        close_deepspeed(engine)
        torch.save((weights, stats), folder / f"{name}_rank{rank}.pt")


def with_adapters(folder: Path) -> None:
    """Two ranks with 5 and 2 rows that train adapters, their reference measured between the steps."""
    rank = ranks.rank()
    mine = slice(0, 5) if rank == 0 else slice(5, 7)
    for stage in STAGES:
        engine = open_deepspeed(moved_qwen3(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
        references = []
        for step in range(STEPS):
            batches = against_base(engine, micro_batches(rows(7, seed=step)[mine], 1), 0.9)
            references += [batch.reference for batch in batches]
            optimizer_step(engine, batches, loss, temperature=0.9)
        weights, alone = ({name: tensor.clone() for name, tensor in of(engine)} for of in (gathered_weights, adapters))
        close_deepspeed(engine)
        torch.save((weights, alone, references), folder / f"adapters_stage{stage}_rank{rank}.pt")


def checkpointed(folder: Path) -> None:
    """Two ranks with 3 and 2 micro-batches, with and without activation checkpointing, also where ZeRO 3 shares."""
    rank = ranks.rank()
    batches = [micro_batches(rows(5 + rank, seed=2 * step + rank), 2) for step in range(2)]
    for name, make, stage in (("full", wide_llama, 3), ("adapters", lambda: moved_qwen3(EVERYWHERE), 1)):
        found = []
        for on in (False, True):
            policy = make()
            if on:
                checkpoint_layers(policy)
            engine = open_deepspeed(policy, zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
            torch.manual_seed(rank)
            stats = [optimizer_step(engine, some, loss) for some in batches]
            shared = sum(tensor.numel() == 0 for tensor in policy.parameters())  # not here until they are gathered
            found.append((stats, {name: tensor.clone() for name, tensor in gathered_weights(engine)}, shared))
            close_deepspeed(engine)
        torch.save(found, folder / f"checkpointed_{name}_rank{rank}.pt")


def whole_turns(logp_T: Tensor, batch: PackedBatch) -> ObjectiveValue:
    """A loss in which a token depends on the others of its turn, wherever those are computed."""
    return Objective(loss=LOSSES["gspo"], kl_coefficient=0.1)(logp_T, batch)


def steps_of_shared_rows(
    policy: PreTrainedModel, stage: int, objective: ObjectiveFunction, *, together: int
) -> tuple[dict[str, Tensor], list[dict[str, float]], list[Tensor]]:
    """Some steps on trees of uneven length, with the log-probabilities of each batch before its step."""
    engine = open_deepspeed(
        policy, zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32", sequence_parallel=together
    )
    stats, logps = [], []
    for step in range(STEPS):
        some = forking_rows(24, seed=step)
        mine = some if ranks.world_size() == 1 else some[:15] if ranks.rank() == 0 else some[15:]
        batches = pack_rows(mine, max_tokens=41, share=True, ranks_a_row=together)
        logps.append(torch.cat(measure_logprobs(engine, batches, temperature=0.9)).sort().values)
        stats.append(optimizer_step(engine, batches, objective, temperature=0.9))
    weights = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
    close_deepspeed(engine)
    return weights, stats, logps


def checkpointed_wide_llama() -> PreTrainedModel:
    policy = wide_llama()
    checkpoint_layers(policy)
    return policy


SHARED_ROWS: dict[str, tuple[Callable[[], PreTrainedModel], int, ObjectiveFunction]] = {
    "one_key_head": (qwen3, 0, loss),
    "whole_turns": (llama, 2, whole_turns),
    "zero_3": (checkpointed_wide_llama, 3, loss),
    "adapters": (moved_qwen3, 1, at_once),
}


def shared_rows(folder: Path) -> None:
    """Two ranks that compute every micro-batch together."""
    for name, (make, stage, objective) in SHARED_ROWS.items():
        found = steps_of_shared_rows(make(), stage, objective, together=2)
        torch.save(found, folder / f"{name}_rank{ranks.rank()}.pt")
    module, batch = TrainedLogprobs(llama()), lay_out([(segment(range(3, 30), [9]),) for _ in range(20)])
    _, alone = hidden_and_bytes(module, batch)
    module.share_rows(2)
    _, together = hidden_and_bytes(module, batch)
    torch.save((alone, together), folder / f"bytes_rank{ranks.rank()}.pt")


def _late(folder: Path) -> None:
    """The second rank is slow to write."""
    if ranks.rank() == 1:
        time.sleep(1.0)
        (folder / "late_rank_1.txt").write_text("written")


def saved_and_resumed(folder: Path) -> None:
    """Four steps at once, and two, a checkpoint over a leftover, a fresh engine and two more; ZeRO 3, all ranks.

    They train adapters with dropout; ``resharded`` trains all weights.
    """
    rank, checkpoints = ranks.rank(), folder / "checkpoints"
    batches = [micro_batches(rows(5, seed=step)[rank::2], 2) for step in range(4)]
    torch.manual_seed(5 + rank)
    whole, _ = train(3, batches, model=partial(adapted_qwen3, EVERYWHERE))
    torch.manual_seed(5 + rank)
    policy = adapted_qwen3(EVERYWHERE)
    first = open_deepspeed(policy, zero_stage=3, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    for some in batches[:2]:
        optimizer_step(first, some, loss, temperature=0.9)
    if rank == 0:  # as a process of the same id would have left it
        stale = checkpoints / f"step_000002.tmp-{os.getpid()}"
        stale.mkdir(parents=True)
        (stale / "rng_rank_7.pt").touch()
    path = checkpoint.save(first, checkpoints, step=2, state={"cursor": 2}, extra=_late)
    close_deepspeed(first)
    torch.manual_seed(99)
    policy = adapted_qwen3(EVERYWHERE, seed=7)
    second = open_deepspeed(policy, zero_stage=3, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    state = checkpoint.load_checkpoint(second, path)
    for some in batches[2:]:
        optimizer_step(second, some, loss, temperature=0.9)
    halves = {name: tensor.clone() for name, tensor in gathered_weights(second)}
    torch.save((whole, halves, state), folder / f"resumed_rank{rank}.pt")


FEWER, MORE = "two_stage{}", "one_stage{}"  # folders of checkpoints that two ranks saved for one, and one for two


def steps_of(engine: DeepSpeedEngine, numbers: range, share: slice = slice(None)) -> dict[str, Tensor]:
    """Steps of an engine on this rank's share of their rows; the weights after them."""
    for step in numbers:
        optimizer_step(engine, micro_batches(rows(5, seed=step)[share], 2), loss, temperature=0.9)
    return {name: tensor.clone() for name, tensor in gathered_weights(engine)}


def resharded(folder: Path) -> None:
    """Two ranks save after two steps for one rank, and take two steps from what one rank saved."""
    mine = slice(ranks.rank(), None, 2)
    for stage in (1, 3):
        first = open_deepspeed(qwen3(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
        steps_of(first, range(2), mine)
        checkpoint.save(first, folder / FEWER.format(stage), step=2, state={})
        close_deepspeed(first)
        second = open_deepspeed(qwen3(seed=9), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
        checkpoint.load_checkpoint(second, folder / MORE.format(stage) / "step_000002")
        torch.save(steps_of(second, range(2, 4), mine), folder / f"more_stage{stage}_rank{ranks.rank()}.pt")
        close_deepspeed(second)


def saved_in_background(folder: Path) -> None:
    """Two ranks write a checkpoint of step 2 while step 3 is taken, the second not before both have taken it; then both
    take step 3 again.
    """

    def late(saved: Path) -> None:
        if ranks.rank() == 1:
            assert eventually(lambda: all((folder / f"taken{rank}").exists() for rank in range(2)))
            (saved / "late_rank_1.txt").write_text("written")

    mine = slice(ranks.rank(), None, 2)
    first = open_deepspeed(qwen3(), zero_stage=2, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    steps_of(first, range(2), mine)
    write = checkpoint.save_shards(first, folder / "background", step=2, state={}, extra=late, copied=True)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write)
        beside = steps_of(first, range(2, 3), mine)
        assert not writing.done()
        (folder / f"taken{ranks.rank()}").touch()
        path = writing.result()
    close_deepspeed(first)
    second = open_deepspeed(qwen3(seed=9), zero_stage=2, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    checkpoint.load_checkpoint(second, path)
    torch.save((beside, steps_of(second, range(2, 3), mine)), folder / f"background_rank{ranks.rank()}.pt")
    close_deepspeed(second)


@contextmanager
def _recorded(file: Path) -> Iterator[None]:
    """The error of the block in a file."""
    try:
        yield
    except LearnerError as error:
        file.write_text(f"{type(error).__name__}: {error}")


def flip_bit(file: Path) -> None:
    """Damage a file without changing its size."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def fails_on_one_rank(folder: Path) -> None:
    """The second rank cannot write its part of a checkpoint; the first finds a damaged one, and has too long a row."""

    def full(_: Path) -> None:
        if ranks.rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    engine = open_deepspeed(qwen3(), zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    with _recorded(folder / f"error_rank{ranks.rank()}.txt"):
        checkpoint.save(engine, folder / "failed", step=1, state={}, extra=full)
    damaged = checkpoint.save(engine, folder / "damaged", step=1, state={})
    if ranks.rank() == 0:
        flip_bit(damaged / "train_rank_1.pt")
    ranks.barrier()
    with _recorded(folder / f"damaged_rank{ranks.rank()}.txt"):
        checkpoint.load_checkpoint(engine, damaged)
    with _recorded(folder / f"too_long_rank{ranks.rank()}.txt"):
        pack_rows(forking_rows(4)[: 4 if ranks.rank() == 0 else 0], max_tokens=3, share=True)
    close_deepspeed(engine)


LIMIT = timedelta(seconds=4)  # of every group that gradients travel over; DeepSpeed's is 10 minutes
LATE = 5.0  # seconds
MINUTES = 77.0  # learner.timeout_minutes


def late(folder: Path) -> None:
    """The second rank comes late to an exchange of values, and to an optimiser step."""
    rank = ranks.rank()
    engine = open_deepspeed(qwen3(), zero_stage=2, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    groups, own = [*distributed_c10d._world.pg_map], {*ranks._gloo.values()}
    limits = {ranks.timeout_of(group).total_seconds() / 60 for group in groups}
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(minutes=MINUTES) if group in own else LIMIT, group)
    time.sleep(rank * LATE)
    gathered_values, sums = ranks.gather(rank), ranks.sum_over_ranks((1.0 + rank, 0.25))
    time.sleep(rank * LATE)
    steps_of(engine, range(1), slice(rank, None, 2))
    torch.save((len(groups) - len(own), limits, gathered_values, sums), folder / f"late_rank{rank}.pt")
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(minutes=MINUTES), group)
    close_deepspeed(engine)


def dies_while_saving(folder: Path) -> None:
    """One good checkpoint, then one in the background that never ends: the test kills this process meanwhile."""

    def stall(_: Path) -> None:
        (folder / "stalled").touch()
        time.sleep(600)

    engine = open_deepspeed(qwen3(), zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    checkpoint.save(engine, folder / "checkpoints", step=1, state={"cursor": 1})
    write = checkpoint.save_shards(engine, folder / "checkpoints", step=2, state={}, extra=stall, copied=True)
    Thread(target=write).start()
    for step in range(1000):
        steps_of(engine, range(step, step + 1))


def runs_out_of_disk(folder: Path) -> None:
    """One good checkpoint, then a save that may write no file of more than 4 kB."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails with EFBIG instead
    engine = open_deepspeed(qwen3(), zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    checkpoint.save(engine, folder / "checkpoints", step=1, state={})
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        checkpoint.save(engine, folder / "checkpoints", step=2, state={})
    except LearnerError as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")


def one_rank_fails(folder: Path) -> None:
    """A step in which every trajectory of the second rank failed."""
    stop = StopReason.SAMPLER_ERROR if ranks.rank() == 1 else StopReason.ANSWERED
    try:
        FailureWatch(0.5).check(ranks.gather(failures_of([scored(trajectory(stop=stop), 1.0)] * 2)), Observer())
    except RolloutError as error:
        (folder / f"failed_rank{ranks.rank()}.txt").write_text(str(error))


def trials(folder: Path) -> None:
    """One of two machines knows a trial, the other does not; then both do. The second machine's own says no."""
    rank, made = ranks.rank(), list[int]()
    file = folder / f"cache{rank}" / "trial.json"
    fast, slow = CompileTrial(4e-3, 2e-3, 0.0, None), CompileTrial(4e-3, 5e-3, 0.0, "it is slower")
    if rank == 0:
        file.parent.mkdir()
        file.write_text(json.dumps(fast._asdict()))

    def attempt() -> CompileTrial:
        made.append(rank)
        return (fast, slow)[rank]

    found = [agreed_trial(file, attempt).fault for _ in range(2)]
    torch.save((found, len(made)), folder / f"trials_rank{rank}.pt")


SCENARIOS: dict[str, Callable[[Path], None]] = {
    scenario.__name__: scenario
    for scenario in (
        uneven,
        shared_out,
        chunks,
        with_adapters,
        checkpointed,
        shared_rows,
        saved_and_resumed,
        resharded,
        saved_in_background,
        fails_on_one_rank,
        late,
        dies_while_saving,
        runs_out_of_disk,
        one_rank_fails,
        trials,
    )
}


def main() -> None:
    """The scenarios of the command line, one after another."""
    torch.set_num_threads(1)
    ranks.join(MINUTES)
    for wanted in sys.argv[1].split(","):
        SCENARIOS[wanted](Path(sys.argv[2]))
    ranks.leave()
    sys.stdout.flush()
    os._exit(0)  # interpreter shutdown of torch and DeepSpeed together takes longer than a scenario


if __name__ == "__main__":
    main()
