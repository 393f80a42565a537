"""The process of the code under test: runs it, then calls its functions for the judge.

It receives the function to call and the arguments, never the expected result. Whatever the code does here, also to the
functions of this file, it can only send an answer, which is right or wrong. Standard library only.
"""

import atexit
import builtins
import linecache
import operator
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

from condensegrpo.sandbox import wire

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


MODULE = "candidate"  # not __main__: code under ``if __name__ == "__main__"`` is not tested
OPERATIONS: dict[str, Callable[..., object]] = {
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "len": len,
    "bool": bool,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
}
_MUTABLE = (list, dict, set, bytearray)


class _Handles(list[object]):
    """Objects by the handles under which the judge knows them."""

    def of(self, value: object) -> int:
        """The handle of an object, which gets one if it has none."""
        for number, known in enumerate(self):
            if known is value:
                return number
        self.append(value)
        return len(self) - 1


def serve_candidate(code: str, channel: int) -> int:
    """Run the code, then answer requests until the judge closes the channel; the exit status."""
    module = fresh(MODULE)
    status = execute(code, module)
    try:
        wire.send(channel, {"loaded": status == 0})
        handles = _Handles()
        while status == 0:
            wire.send(channel, _answer(wire.receive(channel), vars(module), handles))
    except wire.ConnectionLost:
        pass  # the judge closed the channel
    return finish(status)


def _answer(request: Mapping[str, Any], names: Mapping[str, object], handles: _Handles) -> dict[str, object]:
    try:
        match request:
            case {"name": name} if name in names:
                return {"value": wire.encode(names[name], handles.of)}
            case {"name": name}:
                return {"error": ["NameError", f"name {name!r} is not defined"]}
            case {"function": operation, "arguments": before, "options": options}:
                arguments: list[Any] = [wire.decode_value(argument, handles.__getitem__) for argument in before]
                decoded = {name: wire.decode_value(value, handles.__getitem__) for name, value in options.items()}
                function = OPERATIONS.get(operation) or arguments.pop(0)
                result = wire.encode(function(*arguments, **decoded), handles.of)
                given = before[len(before) - len(arguments) :]
                now = {
                    index: wire.encode(argument, handles.of)
                    for index, argument in enumerate(arguments)
                    if isinstance(argument, _MUTABLE)
                }
                # the arguments that the call changed in place, by their index in the call
                changed = {str(index): data for index, data in now.items() if data != given[index]}
                return {"value": result, "changed": changed}
        raise ValueError(f"a request has the keys {', '.join(request)}")
    except SystemExit as error:
        return {"error": ["SystemExit", str(status_of(error))]}
    except BaseException as error:  # an exception of the code is its answer
        return {"error": [type(error).__name__, str(error)[:1000]]}
