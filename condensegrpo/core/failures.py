"""What a plug-in raised, and in which line of its code. Standard library only."""

import asyncio
import inspect
import linecache
import os
import re
import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import FrameType, FunctionType, MethodType

from condensegrpo.core.errors import CondenseError
from condensegrpo.core.packages import missing_package
from condensegrpo.core.process import working_directory

PACKAGE = __name__.partition(".")[0]
MESSAGE_CHARACTERS = 400  # of an exception
_UNSAID: dict[type[BaseException], str] = {asyncio.CancelledError: "it cancelled itself"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFailure:
    """What a plug-in raised, or why its call was abandoned."""

    source: str  # which plug-in: the reward Brief
    error: str  # the class of the exception
    message: str  # on one line
    location: str = ""  # file:line of the plug-in's code; empty: not known
    traceback: str = ""  # empty: nothing was raised

    def __str__(self) -> str:
        """One line without a full stop: ``the reward Brief: KeyError: 'level' (mine.py:12)``."""
        text = ": ".join(part for part in (self.source, self.error, self.message) if part).removesuffix(".")
        return f"{text} ({self.location})" if self.location else text


def failure_of(source: str, error: BaseException, *, plugin: object = None) -> PluginFailure:
    """The failure of an exception.

    Args:
        source: names the plug-in.
        plugin: the function or object that was called. Its definition is the location of an exception that none of its
            lines raised, such as a check of what it returned.
    """
    walked = list(traceback.walk_tb(error.__traceback__))
    message = missing_package(error) or str(error) or _UNSAID.get(type(error), "")
    return PluginFailure(
        source=source,
        error=type(error).__name__,
        message=" ".join(message.split())[:MESSAGE_CHARACTERS],
        location=location_of(reversed(walked)) or _definition(plugin),
        traceback="".join(traceback.format_exception(error)),
    )


def message_of(error: BaseException, plugin: object = None) -> str:
    """The message of a plug-in's error with its location, without a full stop; a ``ValueError`` needs no type."""
    failure = failure_of("", error, plugin=plugin)
    untyped = isinstance(error, ValueError) and plugin is None  # a check of its arguments
    return str(replace(failure, error="", message=str(error)) if untyped else failure)


@contextmanager
def plugin_code(doing: str, kind: type[CondenseError], plugin: object = None) -> Iterator[None]:
    """Run code of a plug-in outside of an episode: what it raises becomes an error of ours, with the line.

    A device without memory stays what it is: the run says what to change.

    Args:
        plugin: see ``failure_of``.
    """
    try:
        yield
    except CondenseError:
        raise
    except BaseException as error:  # the boundary to a plug-in
        no_memory = type(error).__name__ == "OutOfMemoryError"  # torch's
        if no_memory or isinstance(error, GeneratorExit) or is_ctrl_c(error):
            raise
        raise kind(f"{doing}: {message_of(error, plugin)}.") from error


def at_definition(plugin: object) -> str:
    """`` (file:line)`` of the class or function of a plug-in; empty: it is of this package or built in."""
    location = _definition(plugin)
    return f" ({location})" if location else ""


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a ``KeyboardInterrupt`` may be Ctrl-C: Python raises that in the main thread, by its own handler.

    The commands install another handler, which raises nothing.
    """
    main = threading.current_thread() is threading.main_thread()
    return (
        isinstance(error, KeyboardInterrupt) and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def is_cancellation(error: BaseException) -> bool:
    """Whether the current task is to end; False if a plug-in raised ``CancelledError`` by itself."""
    task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0


def location_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """``file:line`` of the first frame whose code is neither of this package nor of a library; empty: none.

    Args:
        frames: with their lines, the innermost first.
    """
    for frame, line in frames:
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if module.partition(".")[0] != PACKAGE and not file.startswith(("<", *_library_folders())):
            return f"{_shown(file)}:{line}"
    return ""


def _definition(plugin: object) -> str:
    """The place where a function, or the class of an object, is defined; empty: in this package."""
    while isinstance(plugin, partial):
        plugin = plugin.func
    named = plugin if isinstance(plugin, FunctionType | MethodType | type) else type(plugin)
    if named.__module__.partition(".")[0] == PACKAGE:
        return ""
    try:
        file = inspect.getsourcefile(named) or ""
    except TypeError:  # built in
        return ""
    if code := getattr(inspect.unwrap(named), "__code__", None):
        return f"{_shown(file)}:{code.co_firstlineno}" if file else ""
    # not inspect.getsourcelines, which parses the file in this thread, see ``threads.parsed``
    defines = re.compile(rf"\s*class\s+{re.escape(named.__name__)}\b")
    lines = (number for number, text in enumerate(linecache.getlines(file), start=1) if defines.match(text))
    line = next(lines, None)
    return f"{_shown(file)}:{line}" if line else ""


def _shown(file: str) -> str:
    """The path of a file, relative to the working folder if it lies there."""
    here = working_directory()
    return os.path.relpath(file, here) if here and Path(file).is_relative_to(here) else file


@cache
def _library_folders() -> tuple[str, ...]:
    """Folders of the standard library and of installed packages."""
    known = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{Path(folder)}{os.sep}" for folder in known)
