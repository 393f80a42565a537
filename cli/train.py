"""``condensegrpo train``."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from condensegrpo.errors import ConfigError, Interrupted, RunError

if TYPE_CHECKING:
    from condensegrpo.config import RunConfig
    from condensegrpo.storage import RunFolder


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file (or the name of a shipped one) and overrides."
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue the run in this folder.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved configuration, load no model.")
    ] = False,
) -> None:
    """Train a policy: warm start, then GRPO on condensed multi-turn trajectories.

    Example: condensegrpo train configs/quickstart.yaml train.steps=40 seed=1
    """
    from condensegrpo.config import dump_config
    from condensegrpo.storage import RunFolder, write_atomically

    config = _configuration(arguments or [], resume)
    if dry_run:
        _check(config)
        typer.echo(dump_config(config), nl=False)
        return
    if int(os.environ.get("RANK", "0")) > 0:
        _follow(config)
        return
    folder = RunFolder.open(resume) if resume else _new_folder(config)
    with folder.locked():
        write_atomically(folder.config, dump_config(config))
        _lead(config, folder)


def _configuration(arguments: list[str], resume: Path | None) -> "RunConfig":
    from condensegrpo.config import find_config, load_config

    names = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if resume is not None:
        if names:
            raise ConfigError(
                f"resuming {resume}: found the configuration {names[0]} as well; a run keeps its own. Leave it out."
            )
        if not (resume / "config.yaml").is_file():
            raise RunError(
                f"resuming {resume}: there is no config.yaml in it. Give the folder of a run, such as runs/quickstart."
            )
        return load_config(resume / "config.yaml", overrides)
    if len(names) != 1:
        raise ConfigError(
            f"reading the arguments: wanted one CONFIG and KEY=VALUEs, found {len(names)} without '='{names or ''}."
        )
    return load_config(find_config(names[0]), overrides)


def _check(config: "RunConfig") -> None:
    from condensegrpo import assemble

    cast = assemble.check(config)
    for split in ("train", "eval"):
        found = assemble.problems(cast.task, split)
        typer.echo(f"# {split}: {len(found)} problems, the first: {found[0].question[:80]!r}")


def _new_folder(config: "RunConfig") -> "RunFolder":
    """The run's folder; a name that is taken gets a number, so that no run is ever overwritten."""
    from condensegrpo.storage import RunFolder

    number, path = 1, Path(config.runs_dir) / config.name
    while path.exists():
        number += 1
        path = Path(config.runs_dir) / f"{config.name}-{number}"
    return RunFolder.create(path)


def _lead(config: "RunConfig", folder: "RunFolder") -> None:
    """Train as rank 0, which alone shows and writes."""
    from condensegrpo.cli.console import TrainingConsole
    from condensegrpo.cli.summary import print_summary

    stop = StopRequest()
    with TrainingConsole(steps=config.train.steps, log=folder.log) as console:
        console.say(f"run folder {folder.path}")
        console.phase("loading torch, transformers and DeepSpeed", None)
        from condensegrpo.cli.quiet import quiet_libraries
        from condensegrpo.learner import deepspeed, ranks
        from condensegrpo.train import train as run_training

        quiet_libraries()
        deepspeed.join()
        ranks.from_first(folder)
        try:
            finished = run_training(config, folder, observer=console, stopping=stop.requested)
        except Interrupted as reason:
            console.say(str(reason))
            finished = False
    if finished:
        from condensegrpo.report import write_report

        write_report(folder.path)
        print_summary(folder)
    else:
        typer.echo(f"stopped. To go on: condensegrpo train --resume {folder.path}")
        raise typer.Exit(130)


def _follow(config: "RunConfig") -> None:
    """Train as another rank: rank 0 says in which folder."""
    from condensegrpo.cli.quiet import quiet_libraries
    from condensegrpo.learner import deepspeed, ranks
    from condensegrpo.observer import Silent
    from condensegrpo.storage import RunFolder
    from condensegrpo.train import train as run_training

    quiet_libraries()
    deepspeed.join()
    folder = ranks.from_first(RunFolder(Path()))
    if not run_training(config, folder, observer=Silent(), stopping=StopRequest().requested):
        raise typer.Exit(130)


class StopRequest:
    """Ctrl-C (or SIGTERM) once: finish the step and save. Twice: leave at once."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def requested(self) -> bool:
        """Whether somebody asked to stop."""
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            os.write(2, b"\nleft at once; the last checkpoint is intact\n")
            os._exit(130)
        self._asked = True
        os.write(2, b"\nfinishing the step and saving; once more to leave at once\n")
