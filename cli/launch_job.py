"""What ``condensegrpo launch`` puts into every script: what is trained, and on which machines."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from condensegrpo.cli.options import config_names
from condensegrpo.core.errors import ConfigError, DataMissing, ModelMissing, RunError
from condensegrpo.core.wording import counted
from condensegrpo.display.console import waiting_for
from condensegrpo.storage.files import make_folder, write_atomically

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

Config = Annotated[
    str, typer.Argument(help="A YAML file or the name of a shipped configuration.", autocompletion=config_names)
]
Nodes = Annotated[int, typer.Option(min=1, help="Machines.")]
Hours = Annotated[float, typer.Option(min=0.1, help="Time limit of a start.")]
Setup = Annotated[list[str] | None, typer.Option(metavar="COMMAND", help="A line to run first. May be repeated.")]
Out = Annotated[Path | None, typer.Option(metavar="PATH", help="What to write; by default named after the run.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there and differ.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained."""

    source: str  # the CONFIG argument
    overrides: tuple[str, ...]
    config: "RunConfig"  # that they give

    @classmethod
    def load(cls, source: str, overrides: Sequence[str]) -> "Job":
        """Read and check a configuration.

        Raises:
            ConfigError: it is not valid.
        """
        from condensegrpo.config.load import find_config, load_config

        return cls(source=source, overrides=tuple(overrides), config=load_config(find_config(source), overrides))

    def check(self, *, gpus: int) -> None:
        """Check what this machine can tell of the run, and print what it cannot; doctor checks all of it on the nodes.

        Args:
            gpus: of a node.

        Raises:
            ConfigError, DataError: as ``build`` and ``check_settings``.
        """
        with waiting_for("checking the configuration"):
            from condensegrpo.assembly.build import build
            from condensegrpo.assembly.preflight import check_settings
            from condensegrpo.assembly.reward_trial import try_rewards
            from condensegrpo.config.load import config_on

            try:
                built = build(config_on("gpu" if gpus else "cpu", self.source, self.overrides))
                unchecked = (*check_settings(built), *try_rewards(built))
            except (DataMissing, ModelMissing) as error:
                unchecked = (str(error),)
        for note in unchecked:
            typer.echo(f"not checked on this machine: {note}")

    @property
    def variables(self) -> str:
        """The lines of bash that set ``config`` and ``overrides``."""
        words = "".join(f"\n    {shlex.quote(override)}" for override in self.overrides)
        return f"config={shlex.quote(self.source)}\noverrides=({words}{words and chr(10)})\n"

    @property
    def text(self) -> str:
        """The configuration as one file: what it does not set is chosen where it is read, such as ``model.dtype``."""
        from condensegrpo.config.extends import layered, plain
        from condensegrpo.config.load import find_config
        from condensegrpo.config.yaml_tree import apply_overrides, dump

        return dump(apply_overrides(plain(layered(find_config(self.source))), self.overrides))

    def with_overrides(self, *overrides: str) -> "Job":
        """The job with further overrides."""
        return Job.load(self.source, (*self.overrides, *overrides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines of a job, and which of their GPUs sample."""

    nodes: int
    gpus: int  # of a node; 0: CPUs alone
    server_nodes: int = 0  # of the nodes: they have a vLLM server on every GPU, and no rank
    server_gpus: int = 0  # of the GPUs of each other node: they have a server, and no rank

    @property
    def ranks_per_node(self) -> int:
        """Processes that learn on each node that has any."""
        return max(1, self.gpus - self.server_gpus)

    @property
    def learning_nodes(self) -> int:
        """Nodes that have ranks."""
        return self.nodes - self.server_nodes

    def check(self, config: "RunConfig") -> None:
        """Check that a configuration can use these machines.

        Raises:
            ConfigError: no GPU is left to learn, servers lack a GPU, or as ``check_ranks``.
        """
        machines = f"{counted(self.nodes, 'node')} with {counted(self.gpus, 'GPU')} each"
        if self.server_nodes >= self.nodes or self.server_gpus >= max(1, self.gpus):
            raise ConfigError(
                f"sharing out {machines}: --server-nodes {self.server_nodes} and "
                f"--server-gpus {self.server_gpus} leave none to learn. Give the servers fewer."
            )
        if self.server_nodes and (self.server_gpus or not self.gpus):
            raise ConfigError(
                f"sharing out {machines}: found --server-nodes with --server-gpus "
                f"{self.server_gpus}. A node of servers has one on each of its GPUs: choose one of the options, and "
                f"--gpus of 1 or more."
            )
        from condensegrpo.config.checks import check_ranks

        check_ranks(config, self.learning_nodes * self.ranks_per_node)


def cloud_name(name: str) -> str:
    """The name of a run as a cloud takes it: letters, digits and hyphens between them."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def template(name: str) -> str:
    """A text of ``cli/templates``."""
    from importlib.resources import files

    return (files("condensegrpo.cli") / "templates" / name).read_text(encoding="utf-8")


def write(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a file.

    Raises:
        RunError: a file that differs is there and may not be replaced, or the folder cannot be written.
    """
    if path.is_file() and not overwrite and path.read_text(encoding="utf-8") != text:
        raise RunError(f"writing {path}: there is another file of this name. Add --overwrite, or another --out.")
    make_folder(path.parent)
    write_atomically(path, text)
    typer.echo(f"wrote {path}")


def submit(command: Sequence[str], *, now: bool) -> None:
    """Run the command that submits a script, or only print it.

    Raises:
        RunError: it is not installed here, or it failed.
    """
    line = shlex.join(command)
    if not now:
        typer.echo(f"to submit it: {line}")
        return
    if shutil.which(command[0]) is None:
        raise RunError(f"submitting the job: found no {command[0]} on the PATH. Where it is installed, run: {line}")
    code = subprocess.run(command, check=False).returncode
    if code:
        raise RunError(f"submitting the job: {line} ended with exit code {code}; its message is above.")
