"""``condensegrpo launch``: scripts that start a run on a cluster or in a cloud."""

import typer

from condensegrpo.cli.launch_sagemaker import sagemaker
from condensegrpo.cli.launch_skypilot import skypilot
from condensegrpo.cli.launch_slurm import slurm

launch = typer.Typer(
    help="Write scripts that start a run on a cluster or in a cloud, and submit them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
launch.command("slurm")(slurm)
launch.command("sagemaker")(sagemaker)
launch.command("skypilot")(skypilot)
