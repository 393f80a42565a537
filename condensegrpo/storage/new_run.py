"""The folder of a new run: a taken name is refused or its run deleted, and a start that fails leaves no folder."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from condensegrpo.core.errors import RunError
from condensegrpo.storage.files import TEMPORARY, write_atomically, writing
from condensegrpo.storage.run_folder import RunFolder


@contextmanager
def new_run(path: Path, configuration: str, *, overwrite: bool) -> Iterator[RunFolder]:
    """Create the folder of a new run, locked; it is removed at the end if nothing was learned or sampled in it.

    Args:
        configuration: the text of its ``config.yaml``.
        overwrite: delete a run of this name first.
    """
    check_run_name(path, overwrite=overwrite)
    run, aside = RunFolder(path), path.with_name(f".{path.name}{TEMPORARY}replaced")
    with writing(path):
        shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed while it deleted
        if path.is_dir() and any(path.iterdir()):  # a run, or what is left of a start that was killed
            with run.locked():
                if run.has_results and not overwrite:  # its process ended meanwhile
                    raise _taken(run)
                path.rename(aside)  # whole or not at all
            shutil.rmtree(aside)
    run = RunFolder.create(path)
    try:
        with run.locked():
            write_atomically(run.config, configuration)
            yield run
    finally:
        if not run.has_results:
            shutil.rmtree(path, ignore_errors=True)


def check_run_name(path: Path, *, overwrite: bool) -> None:
    """Check that a run can have this folder; reads only, so before anything is loaded."""
    run = RunFolder(path)
    files = (file.name for file in path.rglob("*") if file.is_file())
    if not run.config.is_file() and any(name != "lock" and TEMPORARY not in name for name in files):
        raise RunError(
            f"creating the run folder {path}: the folder is not empty, and it holds no config.yaml, so it is no "
            f"run. Give this run another name (name=…) or another runs_dir."
        )
    if run.has_results and not overwrite and not run.in_use:  # of one in use, the lock names the process
        raise _taken(run)


def _taken(run: RunFolder) -> RunError:
    return RunError(
        f"creating the run folder {run.path}: the name is taken by a run after step {run.last_step or 0}. Give "
        f"this run another name (name={free_name(run.path)}), continue that run (--resume {run.path}), or delete it "
        f"(--overwrite)."
    )


def free_name(path: Path) -> str:
    """The name of a run folder if no run has it, or ``quickstart-2``, or the next number that is free."""
    names = (path.name, *(f"{path.name}-{number}" for number in range(2, 10_000)))
    return next(name for name in names if not RunFolder(path.with_name(name)).has_results)
