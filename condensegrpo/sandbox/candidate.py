"""The process of the code under test: runs it, then calls its functions for the judge.

It receives the function to call and the arguments, never the expected result. Whatever the code does here, also to the
functions of this file, it can only send an answer, which is right or wrong. Standard library only.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from condensegrpo.sandbox import values, wire
from condensegrpo.sandbox.script import execute, finish, fresh, status_of

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
                return {"value": values.encode(names[name], handles.of)}
            case {"name": name}:
                return {"error": ["NameError", f"name {name!r} is not defined"]}
            case {"function": operation, "arguments": before, "options": options}:
                arguments: list[Any] = [values.decode_value(argument, handles.__getitem__) for argument in before]
                decoded = {name: values.decode_value(value, handles.__getitem__) for name, value in options.items()}
                function = OPERATIONS.get(operation) or arguments.pop(0)
                result = values.encode(function(*arguments, **decoded), handles.of)
                return {
                    "value": result,
                    "changed": _changed(before[len(before) - len(arguments) :], arguments, handles),
                }
        raise ValueError(f"a request has the keys {', '.join(request)}")
    except SystemExit as error:
        return {"error": ["SystemExit", str(status_of(error))]}
    except BaseException as error:  # an exception of the code is its answer
        return {"error": [type(error).__name__, str(error)[:1000]]}


def _changed(before: list[object], arguments: list[object], handles: _Handles) -> dict[str, object]:
    """The arguments that the call changed in place, by their index in the call."""
    now = {
        str(index): values.encode(argument, handles.of)
        for index, argument in enumerate(arguments)
        if isinstance(argument, _MUTABLE)
    }
    return {index: data for index, data in now.items() if data != before[int(index)]}
