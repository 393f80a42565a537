"""Sets up a training run for the command line and for Python: all checks, then its folder, then the training itself.

prepared = prepare_run(config)               refuses what cannot work before anything is written
with prepared.folder() as folder:            the run's folder, new or continued, locked
    prepared.train(folder, observer=…, stopping=…)
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.objects import described_objects
from condensegrpo.assembly.preflight import check_run
from condensegrpo.config.load import dump_config
from condensegrpo.config.resumed import allowed_changes, change_table, config_at
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.use import NO_OBJECTS, Objects
from condensegrpo.core.errors import CondenseError, Interrupted, LearnerError, RunError
from condensegrpo.core.observer import Observer
from condensegrpo.core.process import resume_collections
from condensegrpo.learner.launchers import launched_rank
from condensegrpo.storage.files import TEMPORARY, keep_compiled
from condensegrpo.storage.new_run import check_run_name, new_run
from condensegrpo.storage.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that passed its checks. Nothing is written and no model is loaded yet."""

    components: Components
    continued: RunFolder | None  # None: the run is new
    overwrite: bool  # replace a run of the same name
    notes: tuple[str, ...]  # on the configuration, for the log

    @contextmanager
    def folder(self) -> Iterator[RunFolder]:
        """The locked folder of the run; a new one gets its configuration, and is removed if nothing is learned in it.

        Ranks other than the first get the path alone: the first one writes the files.
        """
        config = self.components.config
        path = Path(config.runs_dir) / config.name
        if launched_rank(os.environ) > 0:
            yield RunFolder(path)
        elif self.continued is None:
            with new_run(path, dump_config(config), overwrite=self.overwrite) as made:
                yield made
        else:
            with self.continued.locked():
                yield self.continued

    def train(self, folder: RunFolder, *, observer: Observer, stopping: Callable[[], bool]) -> bool:
        """Train in the folder as this rank. Every rank must call it.

        Args:
            stopping: called after every step and evaluation; True saves a checkpoint and ends the training.

        Returns:
            Whether all steps were taken.
        """
        observer.notice(f"run folder {folder.path}")
        for note in self.notes:
            observer.notice(note)
        observer.phase("loading DeepSpeed", None)
        try:
            return self._train(folder, observer, stopping)
        except CondenseError as error:
            with suppress(RunError):  # the log may be what cannot be written
                observer.log_lines(f"error: {error}")
            raise

    def _train(self, folder: RunFolder, observer: Observer, stopping: Callable[[], bool]) -> bool:
        keep_compiled(os.environ)
        import torch

        from condensegrpo.learner import ranks  # DeepSpeed takes seconds to import
        from condensegrpo.learner.devices import expand_segments
        from condensegrpo.planning.plan import VLLM
        from condensegrpo.planning.remedies import advice_for_learner
        from condensegrpo.training.train import run_training

        resume_collections()
        config = self.components.config
        if config.sampler.name != VLLM:
            expand_segments(os.environ)
        ranks.join(config.learner.timeout_minutes)
        folder = ranks.from_first(RunFolder(folder.path.absolute()))  # ranks may work in different folders

        try:
            return run_training(self.components, folder, observer=observer, stopping=stopping)
        except Interrupted as reason:
            observer.notice(str(reason))
            return False
        except torch.OutOfMemoryError as error:
            advice = advice_for_learner(
                config, ranks=ranks.world_size(), device="gpu" if torch.cuda.is_available() else "cpu"
            )
            raise LearnerError(
                f"training on a device without enough memory: {error} To need less memory: {advice}. Then "
                f"resume the run."
            ) from error


def prepare_run(
    config: RunConfig,
    *,
    continued: RunFolder | None = None,
    overwrite: bool = False,
    allow_changes: bool = False,
    dry_run: bool = False,
    objects: Objects = NO_OBJECTS,
) -> PreparedRun:
    """Build the components of a run and check it.

    Args:
        continued: the folder of the run that goes on from its newest checkpoint.
        overwrite: a new run replaces one of the same name.
        allow_changes: accept changed keys that change what is learned.
        dry_run: the run is not to be started, so its name may be taken.
    """
    path = Path(config.runs_dir) / config.name
    changes = () if continued is None else allowed_changes(continued, config, allow_changes=allow_changes)
    if continued is None and not dry_run and launched_rank(os.environ) == 0:
        check_run_name(path, overwrite=overwrite)
    if continued is not None and launched_rank(os.environ) == 0:
        _check_checkpoints(continued)
    components = build(config, objects=objects)
    notes = (*check_run(components, resumed=continued is not None), *described_objects(config, objects))
    if changes:
        notes = (f"changed since the run was last started:\n{change_table(changes)}", *notes)
    return PreparedRun(components=components, continued=continued, overwrite=overwrite, notes=notes)


def _check_checkpoints(run: RunFolder) -> None:
    """Check that a run has a checkpoint if it must have saved one: else it would begin again over its metrics."""
    last = run.last_step or 0
    schedule = config_at(run, last).train
    saved_by = schedule.save_every * (2 if schedule.save_in_background else 1)
    found = any(TEMPORARY not in path.name for path in run.checkpoints.glob("step_*"))
    if last and not found and (0 < saved_by < last or not run.checkpoints.is_dir()):
        raise RunError(
            f"resuming {run.path}: its metrics end at step {last}, and {run.checkpoints} has no checkpoint. Copy the "
            f"checkpoints back, or begin the run again with --overwrite in place of --resume."
        )
