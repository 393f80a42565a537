"""The sandbox that all tools and rewards of a process share: one server, started when somebody first needs it."""

import atexit
import threading

from condensegrpo.sandbox import ladder
from condensegrpo.sandbox.limits import Limits
from condensegrpo.sandbox.sandbox import Sandbox

_lock = threading.Lock()
_settings: tuple[str, Limits] = (ladder.AUTO, Limits())
_opened: Sandbox | None = None


def use(rung: str, limits: Limits) -> None:
    """Say what ``shared`` opens; one that is open with other settings is closed."""
    global _settings
    with _lock:
        if _settings != (rung, limits):
            _close()
            _settings = (rung, limits)


def shared() -> Sandbox:
    """The sandbox of this process."""
    global _opened
    with _lock:
        if _opened is None:
            _opened = Sandbox(*_settings)
        return _opened


def _close() -> None:
    global _opened
    if _opened is not None:
        _opened.close()
        _opened = None


atexit.register(_close)
