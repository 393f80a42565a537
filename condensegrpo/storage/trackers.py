"""Where metrics go: always to ``metrics.jsonl`` of the run folder, which is read back here, and to tracker plug-ins."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import append_line, read_lines


class JsonlTracker:
    """Appends ``{"step": …, name: value, …}`` to a file, one line a call, handed to the system at once."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step.

        Raises:
            RunError: the disk is full or the file cannot be written.
        """
        append_line(self._path, dump_line({"step": step, **metrics}))

    def close(self) -> None:
        """Nothing is held between calls."""


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """The lines of a metrics file in order, without a last line that is cut off; none if the file is missing.

    Raises:
        DataError: another line is damaged.
    """
    if not path.is_file():
        return ()
    metrics = []
    for number, line in read_lines(path)[0]:
        try:
            metrics.append(decode(dict[str, float], line))
        except ValueError as error:
            raise DataError(f"reading {path}, line {number}: {error}. Remove the line.") from error
    return tuple(metrics)


class TensorboardTracker:
    """Writes TensorBoard event files: ``tensorboard --logdir FOLDER`` shows them."""

    def __init__(self, folder: str) -> None:
        _package("tensorboard")
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker:
    """Sends metrics to Weights & Biases, as the environment says (``WANDB_MODE=offline`` keeps them in ``folder``)."""

    def __init__(self, project: str, name: str | None = None, folder: str = ".") -> None:
        self._run = _package("wandb").init(project=project, name=name, dir=folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send what is still waiting."""
        self._run.finish()


def _package(name: str) -> ModuleType:
    """A package that only some users want.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"setting up the tracker {name}: the package is not installed. Run pip install -e '.[{name}]' in a clone, "
            f"or take the tracker out of the configuration."
        ) from error
