"""``condensegrpo launch sagemaker``: a training job on Amazon SageMaker, created through its SDK.

The entry point must be process 1 of the container to get SIGTERM: the job is a ``TrainingJob`` of ``sagemaker.core``,
which has a field for it. ``ModelTrainer`` has none: it runs commands in a shell.
"""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from condensegrpo.cli.launch_job import Config, Hours, Job, Out, Overwrite, cloud_name, template, write
from condensegrpo.cli.options import Overrides
from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.storage.files import make_folder

CODE, CHECKPOINTS = "/opt/ml/input/data/code", "/opt/ml/checkpoints"
ENTRY, REQUEST = "start.sh", "job.json"
LONGEST_NAME = 63 - len("-20260101-000000")  # characters of a job's name, without the time


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
    request = {
        **_request(job.config.name, f"{bucket.rstrip('/')}/{job.config.name}", round(3600 * hours), spot=spot),
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
    texts = {"config.yaml": job.text, ENTRY: template("sagemaker.sh.txt")}
    for name, text in {**texts, REQUEST: json.dumps(request, indent=2) + "\n"}.items():
        write(folder / name, text, overwrite=overwrite)
    if submit_:
        typer.echo(f"created the training job {submit(folder)}")
    else:
        typer.echo("to submit it: the same command with --submit")


def _request(name: str, address: str, seconds: int, *, spot: bool) -> dict[str, object]:
    """Where the job reads and writes, and how long; ``submit`` appends the time to the name."""
    code = {"S3DataType": "S3Prefix", "S3Uri": f"{address}/code/"}
    return {
        "TrainingJobName": cloud_name(name)[:LONGEST_NAME].rstrip("-"),
        "InputDataConfig": [{"ChannelName": Path(CODE).name, "DataSource": {"S3DataSource": code}}],
        "CheckpointConfig": {"S3Uri": f"{address}/checkpoints", "LocalPath": CHECKPOINTS},
        "OutputDataConfig": {"S3OutputPath": f"{address}/output"},
        "EnableManagedSpotTraining": spot,
        "StoppingCondition": {
            "MaxRuntimeInSeconds": seconds,
            **({"MaxWaitTimeInSeconds": 2 * seconds} if spot else {}),
        },
    }


def submit(folder: Path) -> str:
    """Upload what the job needs, and create it; returns its name.

    Raises:
        RunError: SageMaker's SDK is not installed, or AWS refused.
    """
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
