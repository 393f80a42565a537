"""What ranks exchange while one of them is late, on two real ranks of one ``torchrun``."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from packed import collate
from tiny import qwen3, rows
from torch.distributed import distributed_c10d
from two_ranks import loss

from condensegrpo.learner import ranks
from condensegrpo.learner.engine import close_engine, open_engine, optimizer_step
from condensegrpo.learner.settings import OptimizerSettings

HERE = Path(__file__).parent
LIMIT = timedelta(seconds=2)  # of every group that gradients travel over; DeepSpeed's is 10 minutes
LATE = 4.0  # seconds


def test_a_rank_may_be_later_than_the_limit_of_the_groups_for_gradients(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(HERE / "test_ranks.py"), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert found["limits"] == {77 * 60.0}  # learner.timeout_minutes, in DeepSpeed's own groups too
        assert found["backends"] == {"gloo"}
        assert found["gathered"] == [0, 1]
        assert found["summed"] == (3.0, 0.5)
        assert found["tokens"] == found["wanted_tokens"]


def _late_second_rank(folder: Path) -> None:
    """The second rank comes late to an exchange of objects, and to an optimiser step."""
    rank = ranks.rank()
    engine = open_engine(qwen3(), zero_stage=2, optimizer=OptimizerSettings(lr=0.01), total_steps=9, dtype="float32")
    groups = [*distributed_c10d._world.pg_map]
    own = {*ranks._gloo.values()}
    assert len(groups) > len(own) + 1  # DeepSpeed made groups after ``join``
    limits = {ranks.time_limit(group).total_seconds() for group in groups}
    for group in groups:
        if group not in own:
            distributed_c10d._set_pg_timeout(LIMIT, group)
    batch = collate(rows(4)[rank * 2 : rank * 2 + 2])
    time.sleep(rank * LATE)
    gathered = ranks.gather(rank)
    summed = ranks.sum_over_ranks((1.0 + rank, 0.25))
    time.sleep(rank * LATE)
    stats = optimizer_step(engine, [batch], loss)
    found = {
        "limits": limits,
        "backends": {torch.distributed.get_backend(group) for group in own},
        "gathered": gathered,
        "summed": summed,
        "tokens": stats["tokens"],
        "wanted_tokens": sum(ranks.gather(float((batch.weights != 0).sum()))),
    }
    torch.save(found, folder / f"rank{rank}.pt")
    close_engine(engine)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks.join(timeout_minutes=77)
    _late_second_rank(Path(sys.argv[1]))
    ranks.leave()
    sys.stdout.flush()
    os._exit(0)
