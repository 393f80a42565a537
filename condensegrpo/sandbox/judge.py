"""The process that judges: runs the tests, and has the candidate do the calls. No code under judgement ever runs here.

    candidate  ◀── call "add" on [1, 2] ──  judge    assert add(1, 2) == 3
            ──      the value 3       ─▶          3 == 3, in this process, between plain values: passed

Standard library only.
"""

import ast
import builtins
import importlib
import itertools
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from condensegrpo.sandbox import values, wire

T = TypeVar("T", int, bool, str)
MOST = 16 << 20  # bytes of one answer
_RAISED = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)
}


class Raised(Exception):
    """The candidate raised what is no exception of Python's own."""


class Unsupported(Exception):
    """The tests ask for what cannot cross between the two processes."""


def judge(request: Mapping[str, Any], channel: int, records: int) -> int:
    """Run the tests of a request one by one and write a record for each; the exit status, which means nothing."""
    link = _Link(channel)
    nonce = request["nonce"]
    modules = _modules([request["setup"], *request["tests"]]).difference(request["entry"])
    space = _Names(link, request["entry"], modules)
    why = _unloaded(channel) or _run(request["setup"], space, "the set-up of the tests")
    for place, test in enumerate(request["tests"]):
        found = why or _run(test, space, f"test {place}")
        os.write(records, f"{nonce} {json.dumps([place, found is None, (found or '')[:1000]])}\n".encode())
    return 0


def _modules(texts: Collection[str]) -> set[str]:
    """The modules of Python's library that texts take something from: ``sys`` of ``sys.maxsize``."""
    trees = []
    for text in texts:
        with suppress(SyntaxError, ValueError):  # its test will say so
            trees.append(ast.parse(text))
    parts = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {part.value.id for part in parts if isinstance(part.value, ast.Name)} & sys.stdlib_module_names


def _unloaded(channel: int) -> str | None:
    """Why the code is not ready to be called, by its own word; None: it is."""
    try:
        word = wire.receive(channel, most=MOST)
        loaded = isinstance(word, dict) and word.get("loaded") is True
    except (wire.ConnectionLost, MemoryError) as error:
        return f"the process of the code ended: {error}"
    return None if loaded else "the code did not run to its end"


def _run(code: str, space: dict[str, Any], name: str) -> str | None:
    """Why a piece of the tests failed; None: it did not."""
    try:
        exec(compile(code, name, "exec", dont_inherit=True), space)
    except wire.ConnectionLost as error:
        return f"the process of the code ended: {error}"
    except BaseException as error:  # the boundary: a test fails by raising anything
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return None


class _Names(dict[str, Any]):
    """The global names of the tests: their own, Python's, its library's modules, and for the rest the candidate's.

    Where the names under test are given, those alone are the candidate's: else a ``Counter`` that the tests forgot to
    import would be whatever the code calls so.
    """

    def __init__(self, link: "_Link", entry: Collection[str], modules: Collection[str]) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._link = link
        self._entry = frozenset(entry)
        self._modules = frozenset(modules)

    def __missing__(self, name: str) -> Any:  # noqa: ANN401  whatever the code called so
        if name not in self._entry:
            if hasattr(builtins, name):
                raise KeyError(name)  # Python then finds it
            if name in self._modules:
                self[name] = importlib.import_module(name)
                return self[name]
            if self._entry:
                raise NameError(f"name {name!r} is not defined: under test are {', '.join(sorted(self._entry))}")
        value = self._link.name(name)
        self[name] = value
        return value


class _Link:
    """The judge's end of the channel."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._remotes: dict[int, Remote] = {}

    def name(self, name: str) -> Any:  # noqa: ANN401  anything a candidate holds
        """The candidate's global of this name."""
        return self._ask({"name": name}, ())

    def apply(self, function: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401  anything a candidate holds
        """What an operation of the candidate gives; arguments that it changed in place are changed here too."""
        request = {
            "function": function,
            "arguments": [values.encode(argument, _handle) for argument in arguments],
            "options": {name: values.encode(value, _handle) for name, value in options.items()},
        }
        return self._ask(request, arguments[1:] if function == "call" else arguments)

    def _ask(self, request: Mapping[str, Any], arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401  anything a candidate holds
        wire.send(self._channel, request)
        answer = wire.receive(self._channel, most=MOST)
        if not isinstance(answer, dict):
            raise wire.ConnectionLost("an answer is no object")
        try:
            if "error" in answer:
                kind, text = map(str, answer["error"])
                if kind == "StopIteration" and request.get("function") != "next":
                    kind = (
                        "a StopIteration of the code's"  # which would end a loop of the tests, such as all(map(f, …))
                    )
                raise _RAISED.get(kind, Raised)(text if kind in _RAISED else f"{kind}: {text}")
            for place, data in answer.get("changed", {}).items():
                _replace(arguments[int(place)], values.decode(data, self._find))
            return values.decode(answer["value"], self._find)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if "error" in answer:
                raise
            raise wire.ConnectionLost(f"an answer is not of the agreed form: {error}") from error

    def _find(self, number: int) -> "Remote":
        if not isinstance(number, int):
            raise ValueError(f"a handle is {number!r}, wanted a number")
        return self._remotes.setdefault(number, Remote(self, number))


class Remote:
    """An object of the candidate. It equals itself only: the code under judgement has no say in comparisons."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: _Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401, D102  as its candidate says
        return self._link.apply("call", self, *arguments, **options)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  anything a candidate holds
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.apply("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401  anything a candidate holds
        self._link.apply("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401  anything a candidate holds
        return self._link.apply("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401  anything a candidate holds
        self._link.apply("set_item", self, key, value)

    def __contains__(self, value: Any) -> bool:  # noqa: ANN401  anything a candidate holds
        return any(
            found is value or found == value for found in self
        )  # asked outright, the code would know what to say

    def __len__(self) -> int:
        return _exactly(int, self._link.apply("len", self))

    def __bool__(self) -> bool:
        return _exactly(bool, self._link.apply("bool", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._link.apply("iter", self)
        for _ in itertools.count():
            try:
                value = self._link.apply("next", iterator)
            except StopIteration:
                return
            yield value

    def __str__(self) -> str:
        return _exactly(str, self._link.apply("str", self))

    def __repr__(self) -> str:
        return _exactly(str, self._link.apply("repr", self))


def _exactly(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise TypeError(f"the code gave {type(value).__name__} where Python wants {kind.__name__}")
    return kind(value)


def _handle(value: object) -> int:
    if not isinstance(value, Remote):
        raise Unsupported(f"the tests hand over {type(value).__name__}, and only plain values can be handed over")
    number: int = object.__getattribute__(value, "_number")
    return number


def _replace(old: Any, new: Any) -> None:  # noqa: ANN401  anything a candidate holds
    """Make a container hold what another of its kind holds."""
    if type(old) is not type(new):
        raise ValueError(f"an argument became {type(new).__name__} from {type(old).__name__}")
    old.clear()
    (old.extend if isinstance(old, list | bytearray) else old.update)(new)
