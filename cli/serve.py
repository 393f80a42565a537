"""``condensegrpo serve``: a vLLM server for ``sampler.name=vllm_server``, in the foreground."""

import os
import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from condensegrpo.cli.addresses import base_url
from condensegrpo.cli.options import AnyConfig
from condensegrpo.core.errors import ConfigError

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.samplers.vllm.settings import ServedModel, ServerSettings


def serve(
    config: AnyConfig,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="On top of it.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Serve this; by default model.path, or the policy of the run.")
    ] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on; by default loopback only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, start nothing.")] = False,
) -> None:
    """Serve a run's model with vLLM, for rollouts of this run here or on other machines. Ctrl-C ends it.

    The token is read from VLLM_API_KEY, or created and printed once; the run needs it in the same variable.

    Example: condensegrpo serve gsm8k model.new=null model.path=Qwen/Qwen2.5-0.5B-Instruct --port 8001
    """
    from condensegrpo.config.load import named_config

    loaded = named_config(config, overrides or ())
    from condensegrpo.evaluation.policy import in_use
    from condensegrpo.learner.checkpoint import verify_model
    from condensegrpo.samplers.vllm_server.process import check_free, check_installed, command, environment
    from condensegrpo.samplers.vllm_server.server import TOKEN_VARIABLE

    source = model or _policy(loaded, Path(config))
    served, settings = _served(loaded, source)
    line = command(served, settings, host=host, port=port)
    if dry_run:
        typer.echo(shlex.join(line))
        return
    check_installed()
    check_free(host, port)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        token = secrets.token_urlsafe(24)
        typer.echo(f"the token of this server; the run needs it:\nexport {TOKEN_VARIABLE}={token}", err=True)
    typer.echo(f"sampler.name=vllm_server sampler.options.urls=[{base_url(host, port)}]", err=True)
    with in_use(source):
        verify_model(Path(source))
        # the server replaces this process: Ctrl-C reaches it directly
        os.execvpe(line[0], line, environment(token, settings))


def _served(config: "RunConfig", model: str) -> "tuple[ServedModel, ServerSettings]":
    from condensegrpo.assembly.plugins import check_plugin
    from condensegrpo.config.load import longest_request
    from condensegrpo.samplers.vllm.settings import ServedModel, ServerSettings

    supplied = {"model_path": model, "dtype": config.model.dtype}
    options = config.sampler.options if config.sampler.name == "vllm_server" else {}
    given = check_plugin("samplers", "vllm_server", options, supplied)
    settings, longest = given.get("server"), given.get("max_model_len")
    served = ServedModel(
        path=model,
        dtype=str(given["dtype"]),
        lora=config.model.sampled_lora,
        max_model_len=longest if isinstance(longest, int) else longest_request(config),
    )
    return served, settings if isinstance(settings, ServerSettings) else ServerSettings()


def _policy(config: "RunConfig", folder: Path) -> str:
    """The model to serve: the newest policy of a run folder; else that of a configuration.

    For a configuration with a new model that is the initial policy that the run of its name saved.
    """
    is_run = (folder / "config.yaml").is_file()
    if is_run:
        from condensegrpo.learner import checkpoint

        newest = checkpoint.latest(folder / "checkpoints")
        if newest is not None:
            return str(newest / "model")
    if config.model.path is not None:
        return config.model.path
    run = folder if is_run else Path(config.runs_dir) / config.name
    for made in (run / "origin" / "warm", run / "origin" / "new"):
        if made.is_dir():
            return str(made)
    raise ConfigError(
        f"looking for the policy to serve: the configuration makes a new model, and there is none in {run}/origin. "
        f"Name a folder with --model, or leave sampler.options.urls empty: then the run starts its own servers."
    )
