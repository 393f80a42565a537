"""Finds the policy that an argument names: the newest checkpoint of a run, a checkpoint, a model folder or a Hub id."""

from pathlib import Path

from condensegrpo.config.load import STORED
from condensegrpo.core.errors import RunError
from condensegrpo.storage.run_folder import RunFolder


def run_of_policy(policy: str) -> Path | None:
    """The run folder that a policy is of: the folder itself, or that of a checkpoint or its model; None: neither."""
    path = Path(policy)
    checkpoint = next((each for each in (path, path.parent) if (each / "manifest.json").is_file()), None)
    run = checkpoint.resolve().parent.parent if checkpoint is not None else path
    return run if (run / STORED).is_file() else None


def model_of(policy: str) -> str:
    """The model folder or Hub id of a policy.

    Raises:
        RunError: the run has no checkpoint yet, or no longer has that one.
    """
    path = Path(policy)
    if (path / "manifest.json").is_file():
        return str(path / "model")
    if path.parent.name == "checkpoints" and not path.exists() and path.parent.is_dir():
        kept = ", ".join(sorted(other.name for other in path.parent.glob("step_*")))
        raise RunError(
            f"evaluating {policy}: there is no such checkpoint. The run keeps {kept} (train.keep_checkpoints)."
        )
    if not (path / STORED).is_file():
        return policy
    from condensegrpo.learner import checkpoint  # imports torch

    newest = checkpoint.latest(RunFolder.open(path).checkpoints)
    if newest is None:
        raise RunError(f"evaluating {policy}: it has no checkpoint yet. Wait for one, or continue with train --resume.")
    return str(newest / "model")
