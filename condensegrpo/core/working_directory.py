"""The working directory of the process, which may be removed while a run goes on: a clone that is deleted, a job's."""

from pathlib import Path


def working_directory() -> Path | None:
    """Where relative paths are; None: it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
