"""Finds the policy that an argument names: the newest checkpoint of a run, a checkpoint, a model folder or a Hub id."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from condensegrpo.config.load import CONFIG_FILE
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import RunError
from condensegrpo.storage.files import shared_lock
from condensegrpo.storage.run_folder import MANIFEST, RunFolder


def run_of_policy(policy: str) -> Path | None:
    """The run folder that a policy is of: the folder itself, or that of a checkpoint or its model; None: neither."""
    path = Path(policy)
    checkpoint = next((each for each in (path, path.parent) if (each / MANIFEST).is_file()), None)
    run = checkpoint.resolve().parent.parent if checkpoint is not None else path
    return run if (run / CONFIG_FILE).is_file() else None


def model_of(policy: str) -> str:
    """The model folder or Hub id of a policy."""
    path = Path(policy)
    if (path / MANIFEST).is_file():
        return str(path / "model")
    if path.parent.name == "checkpoints" and not path.exists() and path.parent.is_dir():
        kept = ", ".join(sorted(other.name for other in path.parent.glob("step_*"))) or "none"
        raise RunError(
            f"finding the model of {policy}: there is no such checkpoint. The run keeps {kept} "
            f"(train.keep_checkpoints)."
        )
    if not (path / CONFIG_FILE).is_file():
        return policy
    from condensegrpo.learner import checkpoint  # imports torch

    newest = checkpoint.latest(RunFolder.open(path).checkpoints)
    if newest is None:
        raise RunError(
            f"finding the model of {policy}: it has no checkpoint yet. Wait for one, or continue with train --resume."
        )
    return str(newest / "model")


def initial_of(model: str, config: RunConfig) -> str:
    """The policy that GRPO started from: of the run that a model is of, or without a run the model itself."""
    run = run_of_policy(model)
    if run is None:
        return model
    made = (run / "origin" / name for name in ("warm", "new"))
    return next((str(folder) for folder in made if folder.is_dir()), config.model.path or model)


def frozen_writers(configs: Iterable[RunConfig]) -> dict[str, str]:
    """The folders or Hub ids of the models that write for condensers, by ``rollout.condense.writer``.

    The policy is not among them, and neither is the one that it started from: they belong to the run.
    """
    names = {each.rollout.condense.writer for each in configs} - {"policy", "initial"}
    return {name: model_of(name) for name in sorted(names)}


def writer_folder(name: str) -> Path | None:
    """The model folder of a ``rollout.condense.writer``; None: it is not here, or no longer."""
    from condensegrpo.learner.model_folder import local_source

    with suppress(RunError):
        if (folder := local_source(model_of(name))) is not None:
            return Path(folder)
    return None


@contextmanager
def in_use(model: str) -> Iterator[None]:
    """Keep the checkpoint of a model folder from being pruned by its run. Nothing to do for any other model."""
    checkpoint = Path(model).parent
    with ExitStack() as locks:
        if checkpoint.parent.name == "checkpoints":
            try:
                locks.enter_context(shared_lock(checkpoint / MANIFEST))
            except OSError as error:
                raise RunError(
                    f"reading the policy {model}: its checkpoint cannot be opened ({error.strerror}). If its run "
                    f"removed it (train.keep_checkpoints), name the run's folder to take its newest checkpoint."
                ) from error
        yield
