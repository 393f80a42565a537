"""Removes credentials from what leaves the process: configurations sent to trackers, and messages of libraries.

{"api_key": "abc", "steps": 3}      ─▶   {"api_key": "***", "steps": 3}
http://ana:secret@host/             ─▶   http://***@host/
"""

import os
import re
from collections.abc import Iterable, Mapping

REMOVED = "***"
_NAME = re.compile(r"(^|[_-])(api[_-]?key|access[_-]?key|token|secret|password|credentials?|authorization)$", re.I)
# a user, or a user and a password, which may hold ? and #; no address in the query of another
_IN_ADDRESS = re.compile(r"(?<=://)(?:[^/\s?#:]+|[^/\s?#:]*:[^/\s]+)(?=@)")
_SHORTEST = 6  # characters of a value that is searched for in a text
_given: set[str] = set()  # variables that hold credentials whatever they are called, see ``treat_as_credentials``


def without_credentials(value: object, name: str = "") -> object:
    """A value of JSON in which what stands under names such as ``api_key``, and inside addresses, is removed."""
    if isinstance(value, dict):
        return {key: without_credentials(item, name if _NAME.search(name) else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(item, name) for item in value]
    if _NAME.search(name) and isinstance(value, str | int | float) and not isinstance(value, bool):  # such as 123456
        return REMOVED
    return _IN_ADDRESS.sub(REMOVED, value) if isinstance(value, str) else value


def shown_override(override: str) -> str:
    """``key=value`` as messages have it: ``sampler.options.api_key=***``."""
    key, equals, value = override.partition("=")
    return f"{key}{equals}{without_credentials(value, key.rpartition('.')[2])}"


def has_credentials(address: str) -> bool:
    """Whether an address names a user or a password: ``http://ana:secret@host``."""
    return _IN_ADDRESS.search(address) is not None


def redacted(text: str) -> str:
    """A message without credentials in addresses and without the values of environment variables that hold some."""
    text = _IN_ADDRESS.sub(REMOVED, text)
    for value in sorted(secret_values(os.environ), key=len, reverse=True):  # one may begin with another
        text = text.replace(value, REMOVED)
    return text


def treat_as_credentials(names: Iterable[str]) -> None:
    """Treat environment variables as credentials from now on: a server gets their values, and may repeat them."""
    _given.update(names)


def secret_values(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The values of environment variables that hold credentials, by their names or by ``treat_as_credentials``."""
    secret = (value for name, value in variables.items() if _NAME.search(name) or name in _given)
    return tuple(value for value in secret if len(value) >= _SHORTEST)
