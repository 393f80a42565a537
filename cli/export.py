"""``condensegrpo export``."""

from pathlib import Path
from typing import Annotated

import typer


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
) -> None:
    """Write a trained policy as a plain Hugging Face folder: weights (with LoRA merged), tokenizer, generation config.

    Example: condensegrpo export runs/quickstart exported --step 40
    """
    from condensegrpo.learner.export import checkpoint_of, export

    checkpoint = checkpoint_of(source, step)
    export(checkpoint, target, "adapter" if adapter else "model")
    typer.echo(f"{checkpoint} → {target}")
