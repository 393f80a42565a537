"""What two ranks do with rows that show pictures: ``seeing_ranks.py FOLDER``, where the worlds of families are."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from seeing import World, opened_world
from torch import Tensor

from condensegrpo.algorithms.objective import ObjectiveFunction, PerToken, supervised
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import ranks
from condensegrpo.learner.engine import close_deepspeed, measure_logprobs, open_deepspeed, optimizer_step
from condensegrpo.learner.settings import OptimizerSettings
from condensegrpo.learner.vision_tower import BatchPictures
from condensegrpo.learner.weights import gathered_weights

OPTIMISER = OptimizerSettings(lr=0.01, eps=1e-3, grad_clip=10.0)
OBJECTIVE: ObjectiveFunction = PerToken(supervised)
OF_RANKS = {  # ZeRO stage, and ranks that compute a row together; if none does, one rank has all pictures
    "stage 2": (2, 1),
    "stage 3": (3, 1),
    "together": (1, 2),
}
SCENARIOS = {"qwen3_vl": ("stage 3", "together"), "llava_onevision": ("stage 2", "together")}
Found = tuple[dict[str, Tensor], list[float], Tensor]  # weights, norms of gradients, log-probabilities before


def train(
    seen: World, steps: Sequence[Sequence[Segment]], *, stage: int, frozen: bool = False, together: int = 1
) -> Found:
    """A step on each of some rows of this rank, with a fresh engine."""
    policy = seen.policy(frozen=frozen)
    engine = open_deepspeed(
        policy,
        zero_stage=stage,
        optimizer=OPTIMISER,
        total_steps=10,
        dtype="float32",
        sequence_parallel=together,
    )
    engine.module.pictures = BatchPictures(seen.processor, policy)
    norms, logps = [], []
    for rows in steps:
        batches: list[PackedBatch] = engine.module.pack(rows, max_tokens=seen.longest)
        logps += measure_logprobs(engine, batches)
        norms.append(optimizer_step(engine, batches, OBJECTIVE)["grad_norm"])
    weights = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
    close_deepspeed(engine)
    return weights, norms, torch.cat(logps).sort().values if logps else torch.zeros(0)


def main() -> None:
    """The scenarios of each family: its pictures on one rank, or rows that both compute together."""
    torch.set_num_threads(1)
    ranks.join(10.0)
    folder, rank = Path(sys.argv[1]), ranks.rank()
    for family, scenarios in SCENARIOS.items():
        seen = opened_world(folder / family)
        rows = seen.rows()
        pictures, text = [row for row in rows if row.media], [row for row in rows if not row.media]
        for scenario in scenarios:
            stage, together = OF_RANKS[scenario]
            mine = rows[rank::2] if together > 1 else pictures if rank == 0 else text
            found = train(seen, [mine] * 2, stage=stage, together=together)
            torch.save(found, folder / f"{family}_{scenario}_rank{rank}.pt")
    ranks.leave()
    sys.stdout.flush()
    os._exit(0)  # interpreter shutdown of torch and DeepSpeed together takes longer than a scenario


if __name__ == "__main__":
    main()
