"""``condensegrpo launch slurm``: the batch script of a run."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from condensegrpo.cli.launch_job import (
    Config,
    Hours,
    Job,
    Machines,
    Nodes,
    Out,
    Overwrite,
    Setup,
    submit,
    template,
    write,
)
from condensegrpo.cli.options import Overrides
from condensegrpo.core.errors import ConfigError

if TYPE_CHECKING:
    from condensegrpo.samplers.vllm.settings import ServerSettings

OPTION = re.compile(r"[a-z][a-z-]*(=\S.*)?")  # as #SBATCH takes them


def slurm(
    config: Config,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a node; 0: CPUs alone, a process a node.")] = 8,
    server_nodes: Annotated[int, typer.Option(min=0, help="Of the nodes, those that sample with vLLM servers.")] = 0,
    server_gpus: Annotated[int, typer.Option(min=0, help="Of every node's GPUs, those that sample.")] = 0,
    hours: Hours = 24.0,
    save_minutes: Annotated[int, typer.Option(min=1, help="Before its end a start is asked to save.")] = 10,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of sbatch. May be repeated.")
    ] = None,
    setup: Setup = None,
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
    submit(("sbatch", str(path)), now=submit_)


def script(job: Job, machines: Machines, *, options: tuple[str, ...], setup: "list[str] | tuple[str, ...]") -> str:
    """The batch script; ``options`` are further ones of sbatch, without their dashes."""
    server = _server(job)
    if machines.server_nodes:
        job = _on_server_nodes(job, server)
    elif machines.server_gpus:
        job = _on_server_gpus(job, server, machines)
    fixed = (
        f"job-name={job.config.name}",
        f"nodes={machines.nodes}",
        f"ntasks-per-node={machines.ranks_per_node}",
        *([f"gpus-per-node={machines.gpus}"] if machines.gpus else []),
        *("output=%x-%j.log", "open-mode=append", "requeue"),
    )
    directives = "".join(f"#SBATCH --{option}\n" for option in (*fixed, *options))
    lines = "".join(f"{line}\n" for line in setup)
    head = f"#!/bin/bash\n{directives}{lines}\n{job.variables}"
    if not machines.server_nodes:
        return f"{head}learner=()\n\n{template('slurm.sh.txt')}"
    each = machines.gpus // server.tensor_parallel_size
    if not each:
        raise ConfigError(
            f"placing servers on nodes with --gpus {machines.gpus}: each takes server.tensor_parallel_size="
            f"{server.tensor_parallel_size}. Set that to {machines.gpus} or less."
        )
    counts = (
        f"server_nodes={machines.server_nodes} servers_per_node={each} gpus_per_server={server.tensor_parallel_size}\n"
        f"learner=(--nodes={machines.learning_nodes} --ntasks={machines.learning_nodes * machines.ranks_per_node})\n"
    )
    checked, train = template("slurm.sh.txt").split("# train\n")
    return f"{head}{counts}\n{checked}{template('slurm_servers.sh.txt')}\n{train}"


def _server(job: Job) -> "ServerSettings":
    from pydantic import TypeAdapter

    from condensegrpo.samplers.vllm.settings import ServerSettings

    options = job.config.sampler.options if job.config.sampler.name == "vllm_server" else {}
    return TypeAdapter(ServerSettings).validate_python(options.get("server", {}))


def _sampler(job: Job) -> tuple[str, ...]:
    """The overrides that choose servers: the options of another sampler are none of theirs."""
    other = job.config.sampler.name != "vllm_server" and job.config.sampler.options
    return ("sampler.name=vllm_server", *(["sampler.options={}"] if other else []))


def _on_server_nodes(job: Job, server: "ServerSettings") -> Job:
    """The job with the weights for the servers in a folder that all nodes share."""
    from condensegrpo.config.yaml_tree import override
    from condensegrpo.samplers.vllm.settings import TEMPORARY

    if job.config.model.path is None:
        raise ConfigError(
            "placing servers on nodes of their own: the configuration makes a new model, which no server can load "
            "before the run has made it. Set model.path, or leave out --server-nodes."
        )
    folder = Path(job.config.runs_dir) / f"{job.config.name}.weights"
    shared = [override("sampler.options.server.weights", str(folder.absolute()))] if server.weights == TEMPORARY else []
    return job.with_overrides(*_sampler(job), *shared)


def _on_server_gpus(job: Job, server: "ServerSettings", machines: Machines) -> Job:
    """The job in which every rank starts its share of the servers, on the GPUs that no rank computes on."""
    used = machines.ranks_per_node * server.tensor_parallel_size
    if machines.server_gpus % used:
        raise ConfigError(
            f"sharing out {machines.server_gpus} GPUs of each node for servers: each of {machines.ranks_per_node} "
            f"ranks starts servers of {server.tensor_parallel_size} GPUs, so wanted a multiple of {used}. Choose "
            f"another --server-gpus, or --server-nodes."
        )
    return job.with_overrides(*_sampler(job), f"sampler.options.replicas={machines.server_gpus // used}")
