"""``condensegrpo export``: a trained policy as a Hugging Face folder."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from condensegrpo.core.errors import RunError
from condensegrpo.core.wording import counted
from condensegrpo.display.console import waiting_for


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder, or a step_… folder in its checkpoints.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to create.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the run's checkpoint; by default the newest.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, as a PEFT folder, not merged into its base.")
    ] = False,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence of the model card, such as apache-2.0.")
    ] = None,
    repository: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="REPO", help="Also upload to this Hugging Face repository.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push-to-hub: a new repository is public, not private.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --push-to-hub: write TARGET, list what would be sent, send nothing.")
    ] = False,
) -> None:
    """Write a trained policy as a Hugging Face folder: weights (with LoRA merged), tokenizer, model card, condenser.

    Example: condensegrpo export runs/quickstart exported --step 40
    """
    if repository is None and (public or dry_run):
        raise RunError(
            "exporting: --public and --dry-run say how to upload. Add --push-to-hub REPO, or leave them out."
        )
    with waiting_for("loading torch and transformers") as display:
        from condensegrpo.evaluation.policy import run_of_policy
        from condensegrpo.learner.checkpoint import Part, checkpoint_of, export_checkpoint

        display.phase(f"exporting {source}", None)
        checkpoint = checkpoint_of(source, step)
        part: Part = "adapter" if adapter else "model"
        run = run_of_policy(str(checkpoint))
        if run is None:
            export_checkpoint(checkpoint, target, part)
            display.say("no model card: the checkpoint is not in the folder of its run")
        else:
            from condensegrpo.reporting.model_card import write_card
            from condensegrpo.storage.run_folder import RunFolder

            name = repository or target.absolute().name
            card = partial(write_card, RunFolder(run), part=part, name=name, licence=licence)
            export_checkpoint(checkpoint, target, part, card)
    typer.echo(f"{checkpoint} → {target}")
    if repository is not None:
        _push(target, repository, public=public, dry_run=dry_run)


def _push(folder: Path, repository: str, *, public: bool, dry_run: bool) -> None:
    from condensegrpo.storage.hub import files_of, upload

    files = files_of(folder)
    size = f"{counted(len(files), 'file')}, {sum(files.values()) / 1e6:.1f} MB"
    if dry_run:
        visibility = "public" if public else "private"
        typer.echo(f"would upload {size} to {repository} ({visibility} if it is new):")
        typer.echo("".join(f"  {size:>12,}  {name}\n" for name, size in files.items()), nl=False)
        return
    typer.echo(f"uploading {size} to {repository}")
    typer.echo(upload(folder, repository, public=public, message=f"condensegrpo export of {folder.name}"))
