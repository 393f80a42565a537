"""The folder of a new run: a taken name is refused or its run replaced, and a start that fails leaves no folder.

A run that is replaced stands aside as ``.NAME.tmp-replaced`` until the new one has learned something. It comes back if
the start fails or its process is killed.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from condensegrpo.core.errors import RunError
from condensegrpo.storage.files import TEMPORARY, write_atomically, writing
from condensegrpo.storage.run_folder import RunFolder, read_metrics


@contextmanager
def new_run(path: Path, configuration: str, *, overwrite: bool) -> Iterator[RunFolder]:
    """Create the folder of a new run, locked; it is removed at the end if nothing was learned or sampled in it.

    Args:
        configuration: the text of its ``config.yaml``.
        overwrite: replace a run of this name.
    """
    with writing(path):
        _make_room(path, overwrite=overwrite)
    run = RunFolder.create(path)
    try:
        with run.locked():
            write_atomically(run.config, configuration)
            yield run
    finally:
        discard_replaced(run)
        if not _is_kept(run):
            shutil.rmtree(path, ignore_errors=True)
            _restore(path)


def check_run_name(path: Path, *, overwrite: bool) -> None:
    """Check that a run can have this folder; reads only, so before anything is loaded."""
    run = RunFolder(path)
    files = (file.name for file in path.rglob("*") if file.is_file())
    if not run.config.is_file() and any(name != "lock" and TEMPORARY not in name for name in files):
        raise RunError(
            f"creating the run folder {path}: the folder is not empty, and it holds no config.yaml, so it is no "
            f"run. Give this run another name (name=…) or another runs_dir."
        )
    if _is_kept(run) and not overwrite and not run.in_use:  # of one in use, the lock names the process
        steps = int(max((line["step"] for line in read_metrics(run.metrics)), default=0))
        raise RunError(
            f"creating the run folder {path}: the name is taken by a run after step {steps}. Give this run another "
            f"name (name={free_name(path)}), continue that run (--resume {path}), or delete it (--overwrite)."
        )


def discard_replaced(run: RunFolder) -> None:
    """Delete the run that this one replaces, if there is one, and if this one has learned something."""
    if _aside(run.path).is_dir() and run.has_progress:
        shutil.rmtree(_aside(run.path), ignore_errors=True)


def _make_room(path: Path, *, overwrite: bool) -> None:
    """Check that a run can be created at a path, and move aside what it may replace."""
    run = RunFolder(path)
    check_run_name(path, overwrite=overwrite)
    if path.is_dir() and any(path.iterdir()):
        with run.locked():
            if not _is_kept(run):  # its process was killed before it learned anything
                shutil.rmtree(path)
    _restore(path)
    check_run_name(path, overwrite=overwrite)  # again: of a run that came back
    if _is_kept(run):
        with run.locked():
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))


def _is_kept(run: RunFolder) -> bool:
    """Whether a folder is a run: trajectories, such as those that failed, make one unless it is to replace another."""
    return run.has_progress if _aside(run.path).is_dir() else run.has_results


def _restore(path: Path) -> None:
    """Bring back the replaced run if there is no new one."""
    if not path.exists() and _aside(path).is_dir():
        _aside(path).rename(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}{TEMPORARY}replaced")


def free_name(path: Path) -> str:
    """The name of a run folder if no run has it, or ``quickstart-2``, or the next number that is free."""
    names = (path.name, *(f"{path.name}-{number}" for number in range(2, 10_000)))
    return next(name for name in names if not RunFolder(path.with_name(name)).has_results)
