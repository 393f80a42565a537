"""Runs Python source in this process as the interpreter would. Standard library only."""

import atexit
import builtins
import linecache
import sys
import threading
import traceback
import types
from collections.abc import Callable

NAME = "<code>"


def execute(code: str, module: types.ModuleType) -> int:
    """Run Python source in a module; an exception is printed as Python prints it.

    Returns:
        0 if it completed, else the exit status that Python would have.
    """
    sys.modules[module.__name__] = module
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    try:
        exec(compile(code, NAME, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        return status_of(error)
    except BaseException as error:  # KeyboardInterrupt too: the code raised it
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, shown)
        return 1
    return 0


def status_of(error: SystemExit) -> int:
    """The exit status for a SystemExit; its text goes to stderr."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201  as Python does
    return 1


def finish(status: int) -> int:
    """Do as Python before it exits: wait for threads, run exit handlers, flush; the exit status."""
    shutdown: Callable[[], None] = getattr(threading, "_shutdown")  # noqa: B009  private, and Python's own last step
    handlers: Callable[[], None] = getattr(atexit, "_run_exitfuncs")  # noqa: B009  as above
    for last in (shutdown, handlers, sys.stdout.flush, sys.stderr.flush):
        try:
            last()
        except BaseException:  # an exit handler may raise anything
            status = status or 120
    return status


def fresh(name: str) -> types.ModuleType:
    """An empty module."""
    module = types.ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=NAME)
    return module
