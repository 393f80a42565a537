"""``condensegrpo launch skypilot``: the task file of a run."""

from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from condensegrpo.cli.launch_job import (
    Config,
    Job,
    Machines,
    Nodes,
    Out,
    Overwrite,
    Setup,
    cloud_name,
    submit,
    template,
    write,
)
from condensegrpo.cli.options import Overrides
from condensegrpo.core.errors import ConfigError

SHARED = "/shared"  # where bucket or volume is mounted


def skypilot(
    config: Config,
    overrides: Overrides = None,
    accelerators: Annotated[str | None, typer.Option(metavar="NAME:COUNT", help="GPUs of a node, as H100:8.")] = None,
    nodes: Nodes = 1,
    bucket: Annotated[
        str | None, typer.Option(metavar="URL", help="Bucket for the run, as s3://NAME: on one node.")
    ] = None,
    volume: Annotated[str | None, typer.Option(metavar="NAME", help="Volume for the run that all nodes share.")] = None,
    image: Annotated[str | None, typer.Option(help="Image with condensegrpo, as docker:ghcr.io/you/it:cuda.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Use spot instances; a run that loses one continues.")] = False,
    setup: Setup = None,
    out: Out = None,
    overwrite: Overwrite = False,
    submit_: Annotated[bool, typer.Option("--submit", help="Submit the task as a managed job.")] = False,
) -> None:
    """Write a SkyPilot task: checks every node, trains, and continues after it has lost its machines.

    Example: condensegrpo launch skypilot my.yaml --accelerators H100:8 --spot --bucket s3://my-runs
    """
    if (bucket is None) == (volume is None) or (bucket and nodes > 1):
        raise ConfigError(
            f"placing the run folder: found --bucket {bucket}, --volume {volume} and {nodes} nodes. Wanted a bucket "
            f"for 1 node, or a volume that all nodes can write (ReadWriteMany): ranks share files that a bucket does "
            f"not show at once."
        )
    job = Job.load(config, (*(overrides or ()), f"runs_dir={SHARED}/runs"))
    Machines(nodes=nodes, gpus=_count(accelerators)).check(job.config)
    resources = {
        **({"accelerators": accelerators} if accelerators else {}),
        **({"image_id": image} if image else {}),
        "use_spot": spot,
    }
    mounts = (
        {"volumes": {SHARED: volume}}
        if volume
        else {"file_mounts": {SHARED: {"source": bucket, "mode": "MOUNT_CACHED"}}}
    )
    job.check(gpus=_count(accelerators))
    path = out or Path(f"{job.config.name}.sky.yaml")
    write(path, task(job, nodes, {"resources": resources, "workdir": ".", **mounts}, setup or ()), overwrite=overwrite)
    submit(("sky", "jobs", "launch", "--yes", str(path)), now=submit_)


def task(job: Job, nodes: int, settings: dict[str, object], setup: "list[str] | tuple[str, ...]") -> str:
    """The text of the task file."""
    import yaml

    head = yaml.safe_dump({"name": cloud_name(job.config.name), "num_nodes": nodes, **settings}, sort_keys=False)
    prepared = f"setup: |\n{indent(''.join(f'{line}{chr(10)}' for line in setup), '  ')}" if setup else ""
    return f"{head}{prepared}run: |\n{indent(job.variables + chr(10) + template('skypilot.sh.txt'), '  ')}"


def _count(accelerators: str | None) -> int:
    """GPUs of a node."""
    if accelerators is None:
        return 0
    name, _, count = accelerators.partition(":")
    if not name or not (count or "1").isdigit():
        raise ConfigError(f"reading --accelerators: found {accelerators!r}, wanted NAME:COUNT, such as H100:8.")
    return int(count or 1)
