"""``condensegrpo serve``: a vLLM server for ``sampler.name=vllm_server``, in the foreground."""

import os
import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from condensegrpo.core.errors import ConfigError

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.samplers.vllm_server.settings import ServedModel, ServerSettings


def serve(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped one.")],
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
    from condensegrpo.config.load import find_config, load_config

    loaded = load_config(find_config(config), overrides or ())
    from condensegrpo.samplers.vllm_server.guard import TOKEN_VARIABLE
    from condensegrpo.samplers.vllm_server.process import check_free, check_installed, command, environment

    line = command(*_served(loaded, model), host=host, port=port)
    if dry_run:
        typer.echo(shlex.join(line))
        return
    check_installed()
    check_free(host, port)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        token = secrets.token_urlsafe(24)
        typer.echo(f"the token of this server; the run needs it:\nexport {TOKEN_VARIABLE}={token}", err=True)
    typer.echo(f"sampler.name=vllm_server sampler.options.urls=[http://{host}:{port}]", err=True)
    os.execvpe(line[0], line, environment(token))  # the server replaces this process: Ctrl-C reaches it directly


def _served(config: "RunConfig", model: str | None) -> "tuple[ServedModel, ServerSettings]":
    from condensegrpo.assembly.plugins import arguments
    from condensegrpo.config.load import longest_request
    from condensegrpo.samplers.vllm_server.settings import ServedModel, ServerSettings

    path = model or _policy(config)
    supplied = {"model_path": path, "dtype": config.model.dtype}
    options = config.sampler.options if config.sampler.name == "vllm_server" else {}
    given = arguments("samplers", "vllm_server", options, supplied)
    settings, longest = given.get("server"), given.get("max_model_len")
    served = ServedModel(
        path=path,
        dtype=str(given["dtype"]),
        max_model_len=longest if isinstance(longest, int) else longest_request(config),
    )
    return served, settings if isinstance(settings, ServerSettings) else ServerSettings()


def _policy(config: "RunConfig") -> str:
    """The model of a configuration; for a new model the initial policy that the run of this name saved."""
    if config.model.path is not None:
        return config.model.path
    run = Path(config.runs_dir) / config.name
    for made in (run / "origin" / "warm", run / "origin" / "new"):
        if made.is_dir():
            return str(made)
    raise ConfigError(
        f"looking for the policy to serve: the configuration makes a new model, and there is none in {run}/origin. "
        f"Name a folder with --model, or leave sampler.options.urls empty: then the run starts its own servers."
    )
