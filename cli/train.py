"""``condensegrpo train``."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from condensegrpo.core.errors import CondenseError, ConfigError, Interrupted

if TYPE_CHECKING:
    from condensegrpo.assembly.assemble import Components
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.core.protocols import Split
    from condensegrpo.storage.run_folder import RunFolder

SPLITS: tuple["Split", ...] = ("train", "eval")


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
    from rich.console import Console

    from condensegrpo.cli.console import PhaseDisplay
    from condensegrpo.config.load import dump_config

    config = _configuration(arguments or [], resume)
    with PhaseDisplay(Console(stderr=True)) as display:
        display.phase("checking the configuration", None)
        from condensegrpo.assembly import assemble

        components = assemble.check(config)
    if dry_run:
        _describe(components)
        typer.echo(dump_config(config), nl=False)
    elif int(os.environ.get("RANK", "0")) > 0:
        _follow(config, components)
    else:
        _lead(config, components, resume)


def _configuration(arguments: list[str], resume: Path | None) -> "RunConfig":
    from condensegrpo.config.load import find_config, load_config

    names = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if resume is not None:
        return _resumed(resume, names, overrides)
    if len(names) != 1:
        raise ConfigError(
            f"reading the arguments: wanted one CONFIG and KEY=VALUEs, found {len(names)} without '='{names or ''}."
        )
    return load_config(find_config(names[0]), overrides)


def _resumed(resume: Path, names: list[str], overrides: list[str]) -> "RunConfig":
    """The run's own configuration. What its past was made of cannot be changed."""
    from condensegrpo.config.load import load_stored
    from condensegrpo.storage.run_folder import RunFolder

    path = RunFolder.open(resume).config
    if names:
        raise ConfigError(
            f"resuming {resume}: found the configuration {names[0]} as well; a run keeps its own. Leave it out."
        )
    before, after = load_stored(path), load_stored(path, overrides)
    for key, (was, is_now) in _differences(before.model_dump(mode="json"), after.model_dump(mode="json")).items():
        if key.partition(".")[0] in ("name", "runs_dir", "seed", "model", "task", "warm_start"):
            raise ConfigError(
                f"resuming {resume}: {key} was changed from {was!r} to {is_now!r}. What the run has done so far hangs "
                f"on it: leave it as it is, or start a new run."
            )
    return after


def _differences(before: Any, after: Any, key: str = "") -> "dict[str, tuple[Any, Any]]":  # noqa: ANN401  YAML trees
    """The leaves in which two trees differ, by their dotted keys.

    {a: {b: 1, c: 2}} and {a: {b: 1, c: 3}}   ─▶   a.c: (2, 3)
    """
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {} if before == after else {key: (before, after)}
    return {
        name: pair
        for part in {**before, **after}
        for name, pair in _differences(before.get(part), after.get(part), f"{key}.{part}" if key else part).items()
    }


def _describe(components: "Components") -> None:
    from condensegrpo.assembly import assemble

    for split in SPLITS:
        found = assemble.problems(components.task, split)
        typer.echo(f"# {split}: {len(found)} problems, the first: {found[0].question[:80]!r}")


def _new_folder(config: "RunConfig") -> "RunFolder":
    """The run's folder, with its configuration; a name that is taken gets a number, so that no run is overwritten."""
    from condensegrpo.config.load import dump_config
    from condensegrpo.storage.files import write_atomically
    from condensegrpo.storage.run_folder import RunFolder

    number, path = 1, Path(config.runs_dir) / config.name
    while path.exists():
        number += 1
        path = Path(config.runs_dir) / f"{config.name}-{number}"
    folder = RunFolder.create(path)
    write_atomically(folder.config, dump_config(config))
    return folder


def _lead(config: "RunConfig", components: "Components", resume: Path | None) -> None:
    """Train as rank 0, which alone shows and writes."""
    from condensegrpo.cli.summary import print_summary
    from condensegrpo.storage.run_folder import RunFolder

    folder = RunFolder.open(resume) if resume else _new_folder(config)
    with folder.locked():
        finished = _run(config, components, folder)
        if finished:
            from condensegrpo.reporting.run_report import write_report

            write_report(folder.path)
            print_summary(folder)
    if not finished:
        typer.echo(f"stopped. To go on: condensegrpo train --resume {folder.path}")
        raise typer.Exit(130)


def _run(config: "RunConfig", components: "Components", folder: "RunFolder") -> bool:
    from condensegrpo.cli.console import TrainingConsole

    stop = StopRequest()
    with TrainingConsole(steps=config.train.steps, log=folder.log) as console:
        console.say(f"run folder {folder.path}")
        console.phase("loading DeepSpeed", None)
        from condensegrpo.cli.quiet import quiet_libraries
        from condensegrpo.learner import ranks
        from condensegrpo.training.train import train as run_training

        quiet_libraries()
        ranks.join()
        ranks.from_first(folder)
        try:
            return run_training(config, components, folder, observer=console, stopping=stop.requested)
        except Interrupted as reason:
            console.say(str(reason))
            return False
        except CondenseError as error:
            console.record(f"error: {error}")
            raise


def _follow(config: "RunConfig", components: "Components") -> None:
    """Train as another rank: rank 0 says in which folder."""
    from condensegrpo.cli.quiet import quiet_libraries
    from condensegrpo.core.observer import Silent
    from condensegrpo.learner import ranks
    from condensegrpo.storage.run_folder import RunFolder
    from condensegrpo.training.train import train as run_training

    quiet_libraries()
    stop = StopRequest()
    ranks.join()
    folder = ranks.from_first(RunFolder(Path()))
    try:
        finished = run_training(config, components, folder, observer=Silent(), stopping=stop.requested)
    except Interrupted:
        finished = False
    if not finished:
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
        os.write(2, b"\nfinishing the step and saving what can be saved; once more to leave at once\n")
