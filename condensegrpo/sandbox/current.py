"""The sandbox of this process: what tools and rewards that run code share, as the configuration asks for it."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from condensegrpo.sandbox.ladder import AUTO
from condensegrpo.sandbox.limits import Limits
from condensegrpo.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    rung: str = AUTO
    limits: Limits = field(default_factory=Limits)
    parallel: int | None = None
    packages: tuple[str, ...] = ()


_settings = _Settings()
_open: dict[_Settings, Sandbox] = {}


def configure(*, rung: str, limits: Limits, parallel: int | None, packages: Sequence[str]) -> None:
    """Say what ``current`` shall be from now on; who holds an earlier one keeps it. Starts nothing."""
    global _settings
    _settings = _Settings(rung=rung, limits=limits, parallel=parallel, packages=tuple(packages))


def current() -> Sandbox:
    """The sandbox as configured, one for the whole process, closed when that ends. ``open`` it to see that it holds."""
    if _settings not in _open:
        one = Sandbox(_settings.rung, _settings.limits, parallel=_settings.parallel, packages=_settings.packages)
        _open[_settings] = one
        atexit.register(_close, one, os.getpid())
    return _open[_settings]


def _close(one: Sandbox, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the process has no say
        one.close()
