"""Resuming a run: its newest checkpoint, the batches that were prefetched then, and the folder rewound to it."""

from collections.abc import Callable

from condensegrpo.config.resumed import named_as, store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.failures import plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.learner import checkpoint, ranks
from condensegrpo.learner.engine import DeepSpeedEngine
from condensegrpo.learner.engine_state import to_main_memory
from condensegrpo.learner.weights import all_gathered
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.prefetch_files import restore_batches
from condensegrpo.training.rollout_step import StepBatch
from condensegrpo.training.update_step import sampled_weights


def resume(
    config: RunConfig,
    folder: RunFolder,
    sampler: Sampler,
    learner: DeepSpeedEngine,
    observer: Observer,
    *,
    write: Callable[[int, ScoredTrajectory], None],
) -> tuple[int, dict[int, StepBatch]]:
    """Load the newest checkpoint, if there is one, rewind the folder to it, and send its weights to the sampler.

    Args:
        write: as of ``BatchRollout``.

    Returns:
        The number of steps already taken, and the batches that were prefetched, by step.
    """
    newest = checkpoint.latest(folder.checkpoints)
    done, batches = 0, dict[int, StepBatch]()
    if newest is not None:
        state = checkpoint.load(learner, newest)
        done = int(state["step"])
        observer.say(f"resumed after step {done} from {newest}")
        batches = restore_batches(
            newest,
            settings=named_as(folder, state["sampled_by"], rollout_settings(config)),
            stored_settings=state["sampled_by"],
            last_step=config.train.steps,
            say=observer.say,
        )
    rewind(folder, config, after=-1 if newest is None else done)
    for step, batch in batches.items():
        for scored in batch.trajectories:
            write(step, scored)
    if config.learner.offload.rollouts:
        to_main_memory(learner)
    doing = f"giving the sampler the weights after step {done}"
    with all_gathered(sampled_weights(sampler, learner)) as tensors, plugin_code(doing, SamplerError):
        sampler.update_weights(tensors, done)
    return done, batches


def rewind(folder: RunFolder, config: RunConfig, *, after: int) -> None:
    """Remove from the folder what was recorded after a step.

    The configuration is written only now, since a checkpoint may have refused it.
    """
    if ranks.rank() == 0:
        folder.truncate_after(after)
        store_configuration(folder, config, first_step=after + 1)
    ranks.barrier()


def rollout_settings(config: RunConfig) -> dict[str, object]:
    """The part of a configuration that decides which trajectories a step has and how they are split, as JSON."""
    sections = dict.fromkeys(("task", "rollout", "condenser", "reward", "sampler", "algorithm"), True)
    parts = {"train": {"problems_per_step", "samples_per_problem"}, "sandbox": {"limits", "packages"}}
    return config.model_dump(
        mode="json",
        include={**sections, **parts},
        # where trajectories are sampled
        exclude={"rollout": {"workers"}, "sampler": {"options": {"urls", "urls_file"}}},
    )
