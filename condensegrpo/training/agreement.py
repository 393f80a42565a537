"""What all ranks must agree on before a run starts: its configuration and data, and the folder that they write to."""

import secrets
import socket
import time
from pathlib import Path

from condensegrpo.assembly.components import Components
from condensegrpo.config.checks import check_ranks
from condensegrpo.config.resumed import differences
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.learner import ranks
from condensegrpo.storage.files import TEMPORARY, writing

HIDDEN_SECONDS = 3.0  # for which a new file may be hidden from another node


def check_agreement(components: Components, folder: Path) -> None:
    """Check that this many ranks can run this configuration in this folder. Every rank must call it."""
    config = components.config
    check_ranks(config, ranks.world_size())
    check_equal(config, {split: len(components.problems(split)) for split in ("train", "eval")})
    check_shared(folder)


def check_equal(config: RunConfig, problems: dict[str, int]) -> None:
    """Check that every rank has the configuration of rank 0 and as many problems of each split.

    Nodes may read different files of the same name. ``runs_dir`` may differ, since rank 0 alone reads it.
    """
    here = {**config.model_dump(mode="json", exclude={"runs_dir"}), "problems": problems}
    different = differences(ranks.from_first(here), here)
    text = "; ".join(f"{key} is {old!r} on rank 0 and {new!r} here" for key, (old, new) in different.items())
    for rank, (host, fault) in enumerate(ranks.gather((socket.gethostname(), text))):
        if fault:
            raise ConfigError(
                f"comparing the configurations of the ranks: on rank {rank} ({host}) {fault}. Start every rank with "
                f"the same arguments, and give every node the same files."
            )


def check_shared(folder: Path) -> None:
    """Check that every rank sees what rank 0 writes into the run folder. Every rank must call it."""
    if ranks.world_size() == 1:
        return
    mark = folder / f".shared{TEMPORARY}{ranks.from_first(secrets.token_hex(8))}"
    if ranks.rank() == 0:
        with writing(mark):
            mark.touch()
    ranks.barrier()
    blind = "" if _appears(mark) else f"rank {ranks.rank()} on {socket.gethostname()}"
    all_blind = [rank for rank in ranks.gather(blind) if rank]
    if ranks.rank() == 0:
        mark.unlink()
    if all_blind:
        raise RunError(
            f"checking the run folder {folder}: {', '.join(all_blind)} cannot see there what rank 0 on "
            f"{ranks.from_first(socket.gethostname())} writes. The folder must be on a file system that all nodes "
            f"share: all ranks write trajectories, evaluations and their parts of a checkpoint into it, and load a "
            f"new or warm-started model and the checkpoint of a resumed run from it. Set runs_dir to such a folder."
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + HIDDEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
