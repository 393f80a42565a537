"""Where a server that an environment needs is: what the options of tasks say of it."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import ClassVar

from pydantic import ConfigDict

from condensegrpo.core.credentials import has_credentials, treat_as_credentials


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
            raise ValueError(f"a server has a command or an url: found {self.command!r} and {self.url!r}")
        if has_credentials(self.url):
            raise ValueError("an url has no user and no password: put them into headers, as in Authorization: ${TOKEN}")

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
    """Check what an option ``servers`` holds by name.

    Raises:
        ValueError: there is no server, or an environment variable that a server names is not set.
    """
    if not servers:
        raise ValueError("there is no server: name one in task.options.servers")
    for name, server in servers.items():
        try:
            server.variables(), server.filled_headers()
        except (KeyError, ValueError) as error:
            raise ValueError(f"the server {name} names an environment variable that is not set: {error}") from error
