"""The checkpoints of a run: saving them, in a thread if so configured, and resuming from the newest one.

A checkpoint holds batches that were sampled ahead, so that a resumed run trains on what it would have trained on:

ahead/rank_0/step_000021/kept.parquet  masked.parquet  dropped.parquet   as in trajectories/, in the batch's order
"""

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from condensegrpo.config.resumed import store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import CondenseError, SamplerError
from condensegrpo.core.failures import plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.threads import DaemonThread
from condensegrpo.learner import checkpoint, ranks
from condensegrpo.learner.engine import DeepSpeedEngine
from condensegrpo.learner.model_folder import end_ids, in_main_memory, load_tokenizer, processor_files, write_policy
from condensegrpo.learner.training_state import to_main_memory
from condensegrpo.learner.weights import adapters, all_gathered, gathered_weights, write_adapter
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import read_trajectories, write_trajectories
from condensegrpo.training.learn_step import sampled_weights
from condensegrpo.training.rollout import StepBatch

FOLDER = "ahead"
FILES = ("kept", "masked", "dropped")  # fields of StepBatch


class CheckpointSaver:
    """Saves checkpoints one after another: at once, or in a thread while the run goes on. Its end waits for it."""

    def __init__(self, config: RunConfig, folder: Path, source: str, learner: DeepSpeedEngine) -> None:
        """Save the learner's checkpoints into a folder.

        Args:
            source: the folder or Hub id that GRPO started from.
        """
        self._config, self._folder, self._source, self._learner = config, folder, source, learner
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        """Return the saver itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the checkpoint that is being written; an error of the run comes before one of writing it."""
        with suppress(*(() if kind is None else (CondenseError,))):
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, step: int, batches: Mapping[int, StepBatch]) -> None:
        """Save the checkpoint of a step; every rank must call it.

        It holds the policy as a Hugging Face folder, adapters as a PEFT folder, and prefetched batches: sampled again
        after a resume they would be of newer weights.
        """
        self.wait()
        learner, settings = self._learner, self._config.train
        tensors = in_main_memory(gathered_weights(learner))
        adapter = None if self._config.model.lora is None else in_main_memory(adapters(learner))
        tokenizer, stop_ids = load_tokenizer(self._source), end_ids(self._source)
        policy, beside = learner.module.policy, processor_files(self._source)

        def export(folder: Path) -> None:
            write_batches(folder, batches)
            if ranks.rank() == 0:
                write_policy(
                    folder / "model",
                    policy.config,
                    tensors,
                    tokenizer=tokenizer,
                    stop_ids=stop_ids,
                    steps=step,
                    extra_files=beside,
                )
                if adapter is not None:
                    write_adapter(folder / "adapter", policy, adapter)

        write = checkpoint.save_shards(
            learner,
            self._folder,
            step=step,
            state={"step": step, "sampled_by": rollout_settings(self._config)},
            extra=export,
            copied=settings.save_in_background,
        )

        def write_and_prune() -> None:
            write()
            checkpoint.prune(self._folder, settings.keep_checkpoints)

        if settings.save_in_background:
            thread = DaemonThread("checkpoint")  # a run that is ended at once leaves a partial folder
            self._pending = thread.submit(write_and_prune)
            thread.close()
        else:
            write_and_prune()


def resume(
    config: RunConfig, folder: RunFolder, sampler: Sampler, learner: DeepSpeedEngine, observer: Observer
) -> tuple[int, dict[int, StepBatch]]:
    """Load the newest checkpoint, if there is one, rewind the folder to it, and send its weights to the sampler.

    Returns:
        The number of steps already taken, and the batches that were prefetched, by step.
    """
    newest = checkpoint.latest(folder.checkpoints)
    done, batches = 0, dict[int, StepBatch]()
    if newest is not None:
        observer.phase("loading the checkpoint", None)
        state = checkpoint.load_checkpoint(learner, newest)
        done = int(state["step"])
        observer.notice(f"resumed after step {done} from {newest}")
        batches = restored_batches(newest, config, state["sampled_by"], observer)
    if ranks.rank() == 0:
        folder.truncate_after(-1 if newest is None else done)
        store_configuration(folder, config, first_step=done + 1 if newest else 0)  # a checkpoint may have refused it
    ranks.barrier()
    if config.learner.offload.rollouts:
        to_main_memory(learner)
    doing = f"giving the sampler the weights after step {done}"
    observer.phase(doing, None)
    with all_gathered(sampled_weights(sampler, learner)) as tensors, plugin_code(doing, SamplerError):
        sampler.update(tensors, done)
    return done, batches


def rollout_settings(config: RunConfig) -> dict[str, object]:
    """What decides which trajectories a step has and how they are split, over how many ranks, as JSON."""
    sections = dict.fromkeys(("task", "rollout", "condenser", "reward", "sampler", "algorithm"), True)
    parts = {"train": {"problems_per_step", "samples_per_problem"}, "sandbox": {"limits", "packages"}}
    settings = config.model_dump(
        mode="json",
        include={**sections, **parts},
        # where trajectories are sampled
        exclude={"rollout": {"workers"}, "sampler": {"options": {"urls", "urls_file"}}},
    )
    return {**settings, "ranks": ranks.world_size()}


def write_batches(checkpoint: Path, batches: Mapping[int, StepBatch]) -> None:
    """Write this rank's part of batches, by step, into the folder of a checkpoint."""
    for step, batch in batches.items():
        folder = _folder(checkpoint) / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for name, trajectories in zip(FILES, (batch.kept, batch.masked, batch.dropped), strict=True):
            write_trajectories(folder / f"{name}.parquet", trajectories)


def read_batches(checkpoint: Path) -> dict[int, StepBatch]:
    """This rank's part of the batches that ``write_batches`` wrote, by step; empty if the checkpoint has none."""

    def read(step: Path) -> StepBatch:
        return StepBatch(*(read_trajectories(step / f"{name}.parquet") for name in FILES))

    return {int(step.name.removeprefix("step_")): read(step) for step in sorted(_folder(checkpoint).glob("step_*"))}


def restored_batches(
    checkpoint: Path, config: RunConfig, sampled_by: Mapping[str, object], observer: Observer
) -> dict[int, StepBatch]:
    """The batches of a checkpoint that this run would have sampled the same way.

    Args:
        sampled_by: the ``rollout_settings`` that they were sampled with.
    """
    if rollout_settings(config) == sampled_by:
        return {step: batch for step, batch in read_batches(checkpoint).items() if step <= config.train.steps}
    if (checkpoint / FOLDER).is_dir():
        observer.notice("prefetched trajectories are discarded: the settings of the rollouts or the ranks were changed")
    return {}


def _folder(checkpoint: Path) -> Path:
    return checkpoint / FOLDER / f"rank_{ranks.rank()}"
