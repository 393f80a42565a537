"""``condensegrpo serve`` and ``proxy``: a vLLM server, and an endpoint that condenses for agents."""

import asyncio
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from condensegrpo.assembly.policy import in_use
from condensegrpo.cli.evaluate import parsed_condensers
from condensegrpo.cli.options import AnyConfig, Overrides, shown
from condensegrpo.cli.process import handle_first
from condensegrpo.config.load import dump_config, longest_request, named_config, overridden, validate
from condensegrpo.config.options import check_plugin
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import override
from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Score, Trajectory
from condensegrpo.core.wording import plural
from condensegrpo.display.console import quiet_libraries
from condensegrpo.samplers.vllm.settings import ServedModel, ServerSettings
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import Provenance, part_file, write_trajectories

if TYPE_CHECKING:
    from condensegrpo.integrations.proxy import Proxy

KEY = "CONDENSEGRPO_PROXY_KEY"  # environment variable of the token
TASK = "python:RemoteAgent"
UNLIMITED = 1_000_000_000  # turns of a session, tokens of a row
SESSIONS_A_FILE, TOKENS_A_FILE = 64, 1_000_000  # of recorded sessions
REPLY_SECONDS = 3600.0  # beside the idle time: of one reply with all its retries


def serve_command(
    config: AnyConfig,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="On top of it.")] = None,
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
    loaded = named_config(config, overrides or ())
    from condensegrpo.learner.checkpoint import verify_model
    from condensegrpo.samplers.vllm_server.process import check_free, check_vllm_installed, environment, server_command
    from condensegrpo.samplers.vllm_server.server import TOKEN_VARIABLE

    source = model or _policy(loaded, Path(config))
    served, settings = _served(loaded, source)
    line = server_command(served, settings, host=host, port=port)
    if dry_run:
        typer.echo(shlex.join(line))
        return
    check_vllm_installed()
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


def _served(config: RunConfig, model: str) -> tuple[ServedModel, ServerSettings]:
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


def _policy(config: RunConfig, folder: Path) -> str:
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


def base_url(host: str, port: int) -> str:
    """The URL of a server of this machine.

    >>> base_url("10.0.0.5", 8000), base_url("::1", 8000)
    ('http://10.0.0.5:8000', 'http://[::1]:8000')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def proxy(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub id of the served model's tokenizer; loads no weights.")
    ],
    upstream: Annotated[str, typer.Option(metavar="URL", help="API of the model, such as http://localhost:8000/v1.")],
    condenser: Annotated[str, typer.Option(help="With its options, such as 'last_k keep_last=3'.")],
    overrides: Overrides = None,
    budget: Annotated[int, typer.Option(min=8, metavar="TOKENS", help="Largest prompt of a request.")] = 8192,
    out: Annotated[Path, typer.Option(help="New run folder for the trajectories.")] = Path("runs/proxy"),
    host: Annotated[str, typer.Option(help="Interface to listen on; by default loopback only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")] = 8001,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions that may be open at a time.")] = 64,
    idle: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Without a request, when one ends.")] = 3600.0,
    max_body: Annotated[int, typer.Option(min=1, metavar="MIB", help="Largest body of a request.")] = 8,
) -> None:
    """Condense the conversations of agents that run as they are, before any served model, and record them.

    It speaks the APIs of OpenAI (chat completions, Responses) and Anthropic (Messages), and prints the variables with
    its URL and token that agents read. The token is read from CONDENSEGRPO_PROXY_KEY, or created and printed once.
    Ctrl-C ends all sessions and writes them.

    Example: condensegrpo proxy Qwen/Qwen3-8B --upstream http://localhost:8000/v1 --condenser "last_k keep_last=3"
    """
    named = parsed_condensers(condenser)
    if len(named) != 1:
        raise ConfigError(f"reading --condenser {condenser!r}: found {len(named)} condensers, wanted one.")
    limits = {"max_turns": UNLIMITED, "max_context_tokens": budget, "max_output_tokens": 4096, "ends_at_cut": False}
    tree = {
        "name": out.name,
        "runs_dir": str(out.parent),
        "model": {"path": model},
        "task": {"name": TASK},
        "condenser": {"name": named[0][0], "options": named[0][1]},
        "sampler": {"name": "openai"},
        "rollout": {
            "limits": {**limits, "turn_seconds": idle + REPLY_SECONDS},
            "condense": {"when": "over_budget"},  # prefixes stay cached while they fit
        },
        "learner": {"tokens_per_micro_batch": UNLIMITED},  # it learns nothing
    }
    # as overrides: one that names another sampler leaves them
    served = (override(f"sampler.options.{key}", value) for key, value in (("url", upstream), ("model", model)))
    given = (*served, *(overrides or ()))
    config = validate(overridden(tree, given), source="of the proxy", overrides=given)
    options = {"sessions": sessions, "idle_seconds": idle, "max_bytes": max_body << 20}
    with _proxy(config, model, out, options) as proxied:
        asyncio.run(_serve(proxied, host, port, _condensing(config)))
    if any((out / "trajectories").glob("*.parquet")):
        typer.echo(shown(f"next: condensegrpo inspect {shlex.quote(str(out))}"))


@contextmanager
def _proxy(config: RunConfig, model: str, out: Path, options: Mapping[str, Any]) -> "Iterator[Proxy]":
    """The proxy of a configuration with its run folder, and with these ``options``."""
    from condensegrpo.assembly.build import build_components, build_condenser
    from condensegrpo.assembly.runtime import check_sampler, open_sampler, renderer_for, trajectory_engine
    from condensegrpo.integrations.proxy import Proxy, RemoteAgent

    quiet_libraries()
    if tools := build_condenser(config.condenser).tools():
        names = ", ".join(tool.name for tool in tools)
        raise ConfigError(
            f"checking --condenser: with {config.condenser.label} the policy decides by {names}, and an agent shows it "
            f"other tools. Choose a condenser that decides by itself."
        )
    components = build_components(config, objects={TASK: RemoteAgent()})
    check_sampler(config)
    media = MediaFolder(out / "media")
    renderer, sampler = renderer_for(components, model, media), open_sampler(config, model, media=media)
    temperature = config.rollout.temperature
    engine = trajectory_engine(components, renderer=renderer, sampler=sampler, temperature=temperature)
    form = config.rollout.tools.format
    with _recorded(config, model, out) as record:
        yield Proxy(
            engine=engine,
            tool_format=form if isinstance(form, str) else form.name,
            token=os.environ.get(KEY) or secrets.token_urlsafe(24),
            finished=record,
            seed=config.seed,
            **options,
        )


class RecordedSessions:
    """Writes sessions as they end: whole files of a few, the newest of which is written again with each."""

    def __init__(self, path: Path, sampled_with: Provenance) -> None:
        self._path, self._sampled_with = path, sampled_with
        self._part, self._newest = 0, list[ScoredTrajectory]()

    def add(self, session: ScoredTrajectory) -> None:
        """Write a session. One that cannot be written is left out of later files."""
        written = [*self._newest, session]
        write_trajectories(part_file(self._path, self._part), written, self._sampled_with)
        self._newest = written
        tokens = sum(each.figures.prompt_tokens for each in self._newest)
        if len(self._newest) >= SESSIONS_A_FILE or tokens > TOKENS_A_FILE:
            self._part, self._newest = self._part + 1, []


@contextmanager
def _recorded(config: RunConfig, model: str, out: Path) -> Iterator[Callable[[Trajectory], None]]:
    """A new run folder; yields a function that prints how a session ended, and writes it there if it had a reply."""
    from condensegrpo.assembly.runtime import provenance
    from condensegrpo.learner.model_folder import save_tokenizer

    run, lost = RunFolder.create(out), list[str]()
    sessions = RecordedSessions(run.trajectories(0), provenance(config, model=model, step=0))

    def written(scored: ScoredTrajectory) -> None:
        try:
            sessions.add(scored)
        except Exception as error:  # nobody looks at the thread's; the next session may find space again
            lost.append(scored.trajectory.problem_id)
            typer.echo(shown(f"{lost[-1]}: not recorded, {plural(len(lost), 'session')} so far. {error}"), err=True)

    def record(trajectory: Trajectory) -> None:
        tokens = trajectory.max_context_tokens
        unjudged = Score(total=0.0, components={}, format_valid=True, correct=0.0, context_tokens=tokens, judged=False)
        scored = ScoredTrajectory.of(trajectory, unjudged)
        if trajectory.turns:
            writer.submit(partial(written, scored))
        replies = plural(len(trajectory.turns), "reply", "replies")
        ended = f"{trajectory.problem_id}: {replies}, {trajectory.stop}. {trajectory.detail}"
        typer.echo(shown(ended.rstrip()), err=True)

    try:
        with run.locked(), ThreadPoolExecutor(1) as writer:  # a slow disk delays no turn
            write_atomically(run.config, dump_config(config))
            save_tokenizer(model, run.path)
            yield record
    except RunError:  # it could not listen: without a session the folder would be in the way of the next start
        if not run.steps():
            shutil.rmtree(run.path)
        raise
    if lost:
        names = ", ".join(lost[:5]) + ", …" * (len(lost) > 5)
        typer.echo(shown(f"{plural(len(lost), 'session')} not recorded: {names}"), err=True)


def _condensing(config: RunConfig) -> str:
    """When the proxy condenses, and what it passes on as it is, in words."""
    most, condense, name = config.rollout.limits.max_context_tokens, config.rollout.condense, config.condenser.name
    if condense.when == "every_turn":
        return f"{name} condenses before every turn, to at most {plural(condense.target_tokens(most, 0.0), 'token')}"
    over, room = condense.threshold_tokens(most, 0.0), condense.target_tokens(most, 0.0)
    to = "" if room == over else f" to at most {room}"
    return f"{name} condenses prompts of more than {plural(over, 'token')}{to}; shorter ones pass as they are"


async def _serve(served: "Proxy", host: str, port: int, condensing: str) -> None:
    """Serve until the first SIGINT or SIGTERM."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    handle_first(lambda *_: loop.call_soon_threadsafe(stopping.set))
    try:
        async with served.serving(host, port) as listening:
            token = f"${KEY}" if os.environ.get(KEY) else served.token
            url = base_url(host, listening)
            typer.echo(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={token}", err=True)
            typer.echo(f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={token}", err=True)
            typer.echo(f"{condensing}\nCtrl-C ends the sessions and writes them", err=True)
            await stopping.wait()
            typer.echo("awaiting the replies under way; press Ctrl-C again to quit now", err=True)
    except OSError as error:
        raise RunError(f"listening on {host}:{port}: {error.strerror}. Choose another --port or --host.") from error
