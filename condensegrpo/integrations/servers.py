"""Servers of environments and tools: their addresses, and the processes that are started for them."""

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import ClassVar

from pydantic import ConfigDict

from condensegrpo.core.credentials import has_credentials, redacted, treat_as_credentials
from condensegrpo.core.errors import EnvironmentLost

CHUNK = 2**16
SHOWN = 300  # characters of a server's stderr in a message: with the rest of it they fit into that of a failure
END_SECONDS = 2.0  # in which a process ends by itself after its stdin was closed, and again after SIGTERM
READ_SECONDS = 0.5  # in which the stderr of a process that ended has been read; a child of it may keep it open
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")  # variables that every command gets


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """A server has a command, which is started here, or the address of one that runs."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    command: str | tuple[str, ...] = ()
    url: str = ""
    environment: tuple[str, ...] = ()  # names of variables that the command gets besides PATH, HOME and the like
    headers: Mapping[str, str] = field(default_factory=dict)  # of every request; ${NAME} is an environment variable
    folder: str | None = None  # that the command runs in; None: the current one

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"one of command and url: found {self.command!r} and {self.url!r}")
        if has_credentials(self.url):
            raise ValueError("an url without user and password: put them into headers, as in Authorization: ${TOKEN}")

    @property
    def arguments(self) -> Sequence[str]:
        """The command and its arguments."""
        return shlex.split(self.command) if isinstance(self.command, str) else self.command

    def variables(self) -> Mapping[str, str]:
        """The environment variables of the command; KeyError: one is not set."""
        treat_as_credentials(self.environment)
        return {name: os.environ[name] for name in self.environment}

    def filled_headers(self) -> Mapping[str, str]:
        """The headers with the values of variables; KeyError: one is not set."""
        templates = {name: Template(value) for name, value in self.headers.items()}
        treat_as_credentials(name for template in templates.values() for name in template.get_identifiers())
        return {name: template.substitute(os.environ) for name, template in templates.items()}


def check_servers(servers: Mapping[str, ServerAddress]) -> None:
    """Check what an option ``servers`` holds by name."""
    if not servers:
        raise ValueError("there is no server: name one in task.options.servers")
    for name, server in servers.items():
        try:
            server.variables(), server.filled_headers()
        except (KeyError, ValueError) as error:
            raise ValueError(f"the server {name} names an environment variable that is not set: {error}") from error


class ChildProcess:
    """A command with pipes, the end of whose stderr is kept. All coroutines run on one event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use ``started``."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout
        self._process = process
        self._said = b""  # the end of its stderr
        self._reader = asyncio.create_task(self._keep_errors())

    @classmethod
    async def started(
        cls, name: str, command: Sequence[str], variables: Mapping[str, str], folder: str | None
    ) -> "ChildProcess":
        """Start a command.

        Args:
            name: of the server, for messages.
            variables: of its environment, besides ``INHERITED``.
            folder: that it runs in; None: the current one.
        """
        pipe = asyncio.subprocess.PIPE
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=folder,
                env={**inherited, **variables},
                start_new_session=True,  # a group, which is ended as a whole
            )
        except OSError as error:
            raise EnvironmentLost(f"starting {name}: {error}") from error
        return cls(process)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.returncode is not None

    async def described_end(self) -> str:
        """How it ended, and what it wrote last. It has closed its stdout, or ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._process.wait()), END_SECONDS)
        await asyncio.wait([self._reader], timeout=READ_SECONDS)
        code = self._process.returncode
        how = "closed its stdout" if code is None else f"ended with exit code {code}"
        said = redacted(self._said.decode(errors="replace").strip())[-SHOWN:]
        return f"{how}{said and f': {said}'}"

    def kill(self, number: int) -> None:
        """Send a signal to its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def terminate(self) -> None:
        """Ask it to end, and wait for that."""
        self.kill(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_SECONDS)

    async def close(self) -> None:
        """End the process group: by closing its stdin, else by signals."""
        self.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
                break
            self.kill(number)
        self.kill(signal.SIGKILL)  # processes that it started
        with contextlib.suppress(TimeoutError):  # asyncio also waits until no process of another group has its pipes
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        self._process._transport.close()  # type: ignore[attr-defined]  # others may hold its pipes
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(CHUNK):
            self._said = (self._said + chunk)[-2 * SHOWN :]  # so that a credential which is cut is not shown
