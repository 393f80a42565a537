"""The process that holds code under judgement: runs it, then calls its functions for the judge.

It is told which function to call on what, never what should come out. Whatever the code does here, to this file's
functions too, it can do no more than answer, and an answer is right or wrong. Standard library only.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from condensegrpo.sandbox import plain, wire
from condensegrpo.sandbox.script import execute, finish, fresh, status_of

MODULE = "candidate"  # not __main__: what only a script does is not under judgement
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


class _Held:
    """Objects that were handed out by number."""

    def __init__(self) -> None:
        self._objects: list[object] = []

    def hold(self, value: object) -> int:
        for number, known in enumerate(self._objects):
            if known is value:
                return number
        self._objects.append(value)
        return len(self._objects) - 1

    def find(self, number: int) -> object:
        return self._objects[number]


def serve(code: str, channel: int) -> int:
    """Run the code, then answer requests until nobody asks any more; the exit status."""
    module = fresh(MODULE)
    status = execute(code, module)
    try:
        wire.send(channel, {"loaded": status == 0})
        held = _Held()
        while status == 0:
            wire.send(channel, _answer(wire.receive(channel), vars(module), held))
    except wire.Lost:
        pass  # the judge has heard enough
    return finish(status)


def _answer(request: Mapping[str, Any], names: Mapping[str, object], held: _Held) -> dict[str, object]:
    try:
        if "name" in request:
            if request["name"] not in names:
                return {"error": ["NameError", f"name {request['name']!r} is not defined"]}
            return {"value": plain.encode(names[request["name"]], held.hold)}
        before = request["arguments"]
        arguments = [plain.decode(argument, held.find) for argument in before]
        options = {name: plain.decode(value, held.find) for name, value in request["options"].items()}
        function = OPERATIONS.get(request["function"]) or arguments.pop(0)
        value = plain.encode(function(*arguments, **options), held.hold)
        after = before[len(before) - len(arguments) :]
        return {"value": value, "changed": _changed(after, arguments, held)}
    except SystemExit as error:
        return {"error": ["SystemExit", str(status_of(error))]}
    except BaseException as error:  # whatever the code raises is its answer
        return {"error": [type(error).__name__, str(error)[:1000]]}


def _changed(before: list[object], arguments: list[object], held: _Held) -> dict[str, object]:
    """The arguments that the call changed in place, by their place in the call."""
    now = {
        str(place): plain.encode(argument, held.hold)
        for place, argument in enumerate(arguments)
        if isinstance(argument, _MUTABLE)
    }
    return {place: data for place, data in now.items() if data != before[int(place)]}
