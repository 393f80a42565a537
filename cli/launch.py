"""``condensegrpo launch``: the batch script of a run for SLURM, and a training job on Amazon SageMaker.

The entry point must be process 1 of the container to get SIGTERM: the job is a ``TrainingJob`` of ``sagemaker.core``,
which has a field for it. ``ModelTrainer`` has none: it runs commands in a shell.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic import TypeAdapter

from condensegrpo.cli.options import Overrides, config_names
from condensegrpo.config.checks import check_ranks
from condensegrpo.config.load import config_on, find_config, load_config, resolved
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import dump, override
from condensegrpo.core.errors import ConfigError, DataMissing, ModelMissing, RunError
from condensegrpo.core.wording import plural
from condensegrpo.display.console import waiting_for
from condensegrpo.samplers.vllm.settings import TEMPORARY, ServerSettings
from condensegrpo.storage.files import make_folder, write_atomically

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A YAML file or the name of a shipped configuration.", autocompletion=config_names
    ),
]
Hours = Annotated[float, typer.Option(min=0.1, help="Time limit of a start.")]
Out = Annotated[Path | None, typer.Option(metavar="PATH", help="What to write; by default named after the run.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there and differ.")]
OPTION = re.compile(r"[a-z][a-z-]*(=\S.*)?")  # as #SBATCH takes them
CODE, CHECKPOINTS = "/opt/ml/input/data/code", "/opt/ml/checkpoints"
SERVERS = "vllm_server"
ENTRY, REQUEST = "start.sh", "job.json"
LONGEST_NAME = 63 - len("-20260101-000000")  # characters of a job's name, without the time

launch = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


class Job(NamedTuple):
    """The training that a script starts."""

    source: str  # the CONFIG argument
    overrides: tuple[str, ...]
    config: RunConfig  # that they give

    @classmethod
    def load(cls, source: str, overrides: Sequence[str]) -> "Job":
        """Read and check a configuration."""
        return cls(source, tuple(overrides), load_config(find_config(source), overrides))

    def check(self, *, gpus: int) -> None:
        """Check the run on nodes with ``gpus`` as far as this machine can, and print the rest; doctor checks all."""
        with waiting_for("checking the configuration"):
            from condensegrpo.assembly.build import build
            from condensegrpo.assembly.preflight import check_settings

            try:
                notes = check_settings(build(config_on("gpu" if gpus else "cpu", self.source, self.overrides)))
            except (DataMissing, ModelMissing) as error:
                notes = (f"not checked on this machine: {error}",)
        for note in notes:
            typer.echo(note)


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

    def check(self, config: RunConfig) -> None:
        """Check that a configuration can use these machines."""
        machines = f"{plural(self.nodes, 'node')} with {plural(self.gpus, 'GPU')} each"
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
        check_ranks(config, self.learning_nodes * self.ranks_per_node)


def template(name: str) -> str:
    """A text of ``cli/templates``."""
    return (files("condensegrpo.cli") / "templates" / name).read_text(encoding="utf-8")


def write(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a file, unless there is another one that may not be replaced."""
    if path.is_file() and not overwrite and path.read_text(encoding="utf-8") != text:
        raise RunError(f"writing {path}: there is another file of this name. Add --overwrite, or another --out.")
    make_folder(path.parent)
    write_atomically(path, text)
    typer.echo(f"wrote {path}")


@launch.command()
def slurm(
    config: Config,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a node; 0: CPUs alone, a process a node.")] = 8,
    server_nodes: Annotated[int, typer.Option(min=0, help="Of the nodes, those that sample with vLLM servers.")] = 0,
    server_gpus: Annotated[int, typer.Option(min=0, help="Of every node's GPUs, those that sample.")] = 0,
    hours: Hours = 24.0,
    save_minutes: Annotated[int, typer.Option(min=1, help="Before its end a start is asked to save.")] = 10,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of sbatch. May be repeated.")
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option(metavar="COMMAND", help="A line to run first. May be repeated.")
    ] = None,
    out: Out = None,
    overwrite: Overwrite = False,
    submit_: Annotated[bool, typer.Option("--submit", help="Submit the script with sbatch.")] = False,
) -> None:
    """Write a SLURM script: checks every node, trains, saves when it is asked to end, is queued again and continues.

    Example: condensegrpo launch slurm my.yaml --nodes 2 --sbatch account=lab --setup '. venv/bin/activate'
    """
    job = Job.load(config, overrides or ())
    machines = Machines(nodes=nodes, gpus=gpus, server_nodes=server_nodes, server_gpus=server_gpus)
    machines.check(job.config)
    if hours * 60 < 2 * save_minutes:
        raise ConfigError(
            f"reading --hours: found {hours:g}, of which --save-minutes {save_minutes} are for saving. Wanted at least "
            f"twice as long, or every start is asked to save before it has learned anything."
        )
    if wrong := [option for option in sbatch or () if not OPTION.fullmatch(option)]:
        raise ConfigError(f"reading --sbatch: found {wrong[0]!r}, wanted KEY=VALUE or KEY, such as account=lab.")
    minutes = round(hours * 60)
    limits = (f"time={minutes // 60}:{minutes % 60:02d}:00", f"signal=B:TERM@{60 * save_minutes}")
    job.check(gpus=gpus)
    path = out or Path(f"{job.config.name}.sbatch")
    write(path, script(job, machines, options=(*limits, *(sbatch or ())), setup=setup or ()), overwrite=overwrite)
    line = shlex.join(("sbatch", str(path)))
    if not submit_:
        typer.echo(f"to submit it: {line}")
        return
    if shutil.which("sbatch") is None:
        raise RunError(f"submitting the job: found no sbatch on the PATH. Where it is installed, run: {line}")
    if code := subprocess.run(("sbatch", str(path)), check=False).returncode:
        raise RunError(f"submitting the job: {line} ended with exit code {code}; its message is above.")


def script(job: Job, machines: Machines, *, options: Sequence[str], setup: Sequence[str]) -> str:
    """The batch script; ``options`` are further ones of sbatch, without their dashes."""
    name, given = job.config.sampler.name, job.config.sampler.options
    server = TypeAdapter(ServerSettings).validate_python(given.get("server", {}) if name == SERVERS else {})
    if machines.server_nodes or machines.server_gpus:
        sampler = [f"sampler.name={SERVERS}", *(["sampler.options={}"] if given and name != SERVERS else [])]
        job = Job.load(job.source, (*job.overrides, *sampler, *_placed(job, machines, server)))
    fixed = (
        f"job-name={job.config.name}",
        f"nodes={machines.nodes}",
        f"ntasks-per-node={machines.ranks_per_node}",
        *([f"gpus-per-node={machines.gpus}"] if machines.gpus else []),
        *("output=%x-%j.log", "open-mode=append", "requeue"),
    )
    directives = "".join(f"#SBATCH --{option}\n" for option in (*fixed, *options))
    lines = "".join(f"{line}\n" for line in setup)
    words = "".join(f"\n    {shlex.quote(override)}" for override in job.overrides)
    variables = f"config={shlex.quote(job.source)}\noverrides=({words}{words and chr(10)})\n"
    head = f"#!/bin/bash\n{directives}{lines}\n{variables}"
    if not machines.server_nodes:
        return f"{head}learner=()\n\n{template('slurm.sh.txt')}"
    counts = (
        f"server_nodes={machines.server_nodes} servers_per_node={machines.gpus // server.tensor_parallel_size} "
        f"gpus_per_server={server.tensor_parallel_size}\n"
        f"learner=(--nodes={machines.learning_nodes} --ntasks={machines.learning_nodes * machines.ranks_per_node})\n"
    )
    checked, train = template("slurm.sh.txt").split("# train\n")
    return f"{head}{counts}\n{checked}{template('slurm_servers.sh.txt')}\n{train}"


def _placed(job: Job, machines: Machines, server: ServerSettings) -> list[str]:
    """The overrides that place servers: with weights in a folder that all nodes share, or as many as a rank starts."""
    size, ranks = server.tensor_parallel_size, machines.ranks_per_node
    if machines.server_gpus:
        if machines.server_gpus % (ranks * size):
            raise ConfigError(
                f"sharing out {machines.server_gpus} GPUs of each node for servers: each of {ranks} ranks starts "
                f"servers of {size} GPUs, so wanted a multiple of {ranks * size}. Choose another --server-gpus, or "
                f"--server-nodes."
            )
        return [f"sampler.options.replicas={machines.server_gpus // (ranks * size)}"]
    if job.config.model.path is None:
        raise ConfigError(
            "placing servers on nodes of their own: the configuration makes a new model, which no server can load "
            "before the run has made it. Set model.path, or leave out --server-nodes."
        )
    if size > machines.gpus:
        raise ConfigError(
            f"placing servers on nodes with --gpus {machines.gpus}: each takes server.tensor_parallel_size={size}. Set "
            f"that to {machines.gpus} or less."
        )
    folder = Path(job.config.runs_dir) / f"{job.config.name}.weights"
    return [override("sampler.options.server.weights", str(folder.absolute()))] if server.weights == TEMPORARY else []


@launch.command()
def sagemaker(
    config: Config,
    image: Annotated[str, typer.Option(help="Image with condensegrpo in ECR.")],
    role: Annotated[str, typer.Option(metavar="ARN", help="Role of the job.")],
    bucket: Annotated[str, typer.Option(metavar="URL", help="Where the run is kept, as s3://NAME/runs.")],
    overrides: Overrides = None,
    instance: Annotated[str, typer.Option(help="Type of the machine.")] = "ml.p4d.24xlarge",
    hours: Hours = 24.0,
    spot: Annotated[bool, typer.Option("--spot", help="Use a spot instance; a run that loses it continues.")] = False,
    disk: Annotated[int, typer.Option(min=1, metavar="GB", help="Size of the machine's volume.")] = 200,
    include: Annotated[
        list[Path] | None, typer.Option(exists=True, help="A file or folder that CONFIG names. May be repeated.")
    ] = None,
    out: Out = None,
    overwrite: Overwrite = False,
    submit_: Annotated[bool, typer.Option("--submit", help="Upload the folder and create the job.")] = False,
) -> None:
    """Write a SageMaker job of one machine: checks it, trains, saves on SIGTERM, and continues what is in the bucket.

    Example: condensegrpo launch sagemaker my.yaml --image URI --role ARN --bucket s3://my-runs --spot
    """
    if not bucket.startswith("s3://"):
        raise ConfigError(f"reading --bucket: found {bucket}, wanted an address such as s3://my-runs.")
    job = Job.load(config, (*(overrides or ()), f"runs_dir={CHECKPOINTS}"))
    address, seconds = f"{bucket.rstrip('/')}/{job.config.name}", round(3600 * hours)
    code = {"S3DataType": "S3Prefix", "S3Uri": f"{address}/code/"}
    request = {
        # letters, digits and hyphens between them; submitting appends the time
        "TrainingJobName": re.sub(r"[^A-Za-z0-9]+", "-", job.config.name).strip("-")[:LONGEST_NAME].rstrip("-"),
        "InputDataConfig": [{"ChannelName": Path(CODE).name, "DataSource": {"S3DataSource": code}}],
        "CheckpointConfig": {"S3Uri": f"{address}/checkpoints", "LocalPath": CHECKPOINTS},
        "OutputDataConfig": {"S3OutputPath": f"{address}/output"},
        "EnableManagedSpotTraining": spot,
        "StoppingCondition": {
            "MaxRuntimeInSeconds": seconds,
            **({"MaxWaitTimeInSeconds": 2 * seconds} if spot else {}),
        },
        "RoleArn": role,
        "ResourceConfig": {"InstanceType": instance, "InstanceCount": 1, "VolumeSizeInGB": disk},
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/bash", f"{CODE}/{ENTRY}"],
        },
    }
    job.check(gpus=1)  # of any instance that trains a language model
    folder = out or Path(f"{job.config.name}.sagemaker")
    make_folder(folder)
    for path in include or ():
        placed = folder / (path.name if path.is_absolute() or ".." in path.parts else path)  # as CONFIG names it
        if path.is_dir():
            shutil.copytree(path, placed, dirs_exist_ok=True)
        else:
            make_folder(placed.parent)
            shutil.copy(path, placed)
    # what the configuration does not set is chosen where it is read, such as model.dtype
    texts = {"config.yaml": dump(resolved(find_config(config), job.overrides)), ENTRY: template("sagemaker.sh.txt")}
    for name, text in {**texts, REQUEST: json.dumps(request, indent=2) + "\n"}.items():
        write(folder / name, text, overwrite=overwrite)
    if submit_:
        typer.echo(f"created the training job {_submitted(folder)}")
    else:
        typer.echo("to submit it: the same command with --submit")


def _submitted(folder: Path) -> str:
    """Upload the files of the job, and create it; returns its name."""
    try:
        import boto3
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
        from sagemaker.core.resources import TrainingJob
        from sagemaker.core.utils.code_injection.codec import transform
    except ImportError as error:
        raise RunError(f"submitting the job: {error}. Run pip install 'condensegrpo[sagemaker]'.") from error
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    request["TrainingJobName"] += f"-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    (code,) = request["InputDataConfig"]
    bucket, _, prefix = code["DataSource"]["S3DataSource"]["S3Uri"].removeprefix("s3://").partition("/")
    try:
        session = boto3.Session()
        s3 = session.client("s3")
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != REQUEST):
            s3.upload_file(str(file), bucket, prefix + file.relative_to(folder).as_posix())
        TrainingJob.create(**transform(request, "CreateTrainingJobRequest"), session=session)
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise RunError(
            f"submitting the job: {error}. Check credentials and region (aws configure), and the role."
        ) from error
    return str(request["TrainingJobName"])
