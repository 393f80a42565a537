"""Saving the checkpoints of a run: what the loop adds to the learner's state, and the thread that may write it."""

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from condensegrpo.config.schema import RunConfig
from condensegrpo.core.daemon_thread import DaemonThread
from condensegrpo.core.errors import CondenseError
from condensegrpo.learner import checkpoint, ranks
from condensegrpo.learner.engine import DeepSpeedEngine
from condensegrpo.learner.policy import end_ids, in_main_memory, load_tokenizer, processor_files, write_policy
from condensegrpo.learner.weights import adapters, gathered_weights, write_adapter
from condensegrpo.training.prefetch_files import write_batches
from condensegrpo.training.resume import rollout_settings
from condensegrpo.training.rollout_step import StepBatch


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
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, step: int, batches: Mapping[int, StepBatch]) -> None:
        """Save the checkpoint of a step; every rank must call it.

        It holds the policy as a Hugging Face folder, adapters as a PEFT folder, and prefetched batches: sampled again
        after a resume they would be of newer weights.

        Raises:
            CheckpointError: this checkpoint, or the one before, could not be written.
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
                target = folder / "model"
                write_policy(
                    target,
                    policy.config,
                    tensors,
                    tokenizer=tokenizer,
                    stop_ids=stop_ids,
                    steps=step,
                    beside=beside,
                )
                if adapter is not None:
                    write_adapter(folder / "adapter", policy, adapter)

        write = checkpoint.collect(
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
