"""Gives a new run the warm start of an earlier run with the same one: arms of a study often differ in GRPO only."""

import shutil
from collections.abc import Iterable

from condensegrpo.config.resumed import store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.learner.atomic_folder import remove_leftover, temporary_folder
from condensegrpo.storage.run_folder import RunFolder

# What the initial policy does not depend on; of the rest any difference means another warm start.
NOT_USED = frozenset(
    {"name", "runs_dir", "condenser", "reward", "algorithm", "train", "evaluate", "trackers", "sandbox"}
)


def same_warm_start(one: RunConfig, other: RunConfig) -> bool:
    """Whether two configurations have a warm start, and the same one."""
    used, also_used = (
        config.model_dump(mode="json", exclude={**dict.fromkeys(NOT_USED, True), "rollout": {"condense"}})
        for config in (one, other)
    )
    return one.warm_start.steps > 0 and used == also_used


def is_warm(folder: RunFolder) -> bool:
    """Whether the warm start of a run is complete."""
    return (folder.path / "origin" / "warm").is_dir()


def adopt_warm_start(folder: RunFolder, config: RunConfig, others: Iterable[tuple[RunFolder, RunConfig]]) -> bool:
    """Make the folder of a run that was not started, with the complete warm start of one of the others.

    The folder is then as if the run had been stopped after its warm start: it is continued with ``train --resume``.

    Returns:
        Whether one of the others has it; if not, nothing was written.
    """
    origins = (other.path / "origin" for other, its in others if is_warm(other) and same_warm_start(config, its))
    origin = next(origins, None)
    if origin is None:
        return False
    aside = folder.path.with_name(f".{folder.path.name}")
    remove_leftover(aside)
    with temporary_folder(aside):
        made = RunFolder.create(aside)
        shutil.copytree(origin, aside / "origin")
        store_configuration(made, config, first_step=0)
        aside.rename(folder.path)
    return True
