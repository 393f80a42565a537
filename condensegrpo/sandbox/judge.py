"""The process of the tests: runs them, and calls the code under test in another process. That code never runs here.

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

from condensegrpo.sandbox import wire

T = TypeVar("T", int, bool, str)
MAX_ANSWER = 16 << 20  # bytes
_RAISED = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)
}


class Raised(Exception):
    """The candidate raised an exception that is not one of Python's own."""


class Unsupported(Exception):
    """The tests pass a value that cannot be sent to the candidate."""


def judge(tests: list[str], setup: str, entry: list[str], nonce: str, channel: int, records: int) -> int:
    """Run tests one by one and write a record for each; the exit status, which has no meaning."""
    names = _Names(_Link(channel), entry, _modules([setup, *tests]).difference(entry))
    failure = _load_failure(channel) or _run(setup, names, "the set-up of the tests")
    for index, test in enumerate(tests):
        reason = failure or _run(test, names, f"test {index}")
        os.write(records, f"{nonce} {json.dumps([index, reason is None, (reason or '')[:1000]])}\n".encode())
    return 0


def _modules(texts: Collection[str]) -> set[str]:
    """The modules of Python's library whose attributes the texts use: ``sys`` in ``sys.maxsize``."""
    trees = []
    for text in texts:
        with suppress(SyntaxError, ValueError):  # reported when its test runs
            trees.append(ast.parse(text))
    parts = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {part.value.id for part in parts if isinstance(part.value, ast.Name)} & sys.stdlib_module_names


def _load_failure(channel: int) -> str | None:
    """Why the code cannot be called, as its process reports; None if it can."""
    try:
        loaded = wire.receive(channel, most=MAX_ANSWER) == {"loaded": True}
    except (wire.ConnectionLost, MemoryError) as error:
        return f"the process of the code ended: {error}"
    return None if loaded else "the code did not run to its end"


def _run(code: str, names: dict[str, object], title: str) -> str | None:
    """Why a piece of the tests failed; None if it passed."""
    try:
        exec(compile(code, title, "exec", dont_inherit=True), names)
    except wire.ConnectionLost as error:
        return f"the process of the code ended: {error}"
    except BaseException as error:  # the boundary: a test fails by raising anything
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return None


class _Names(dict[str, object]):
    """The globals of the tests: their own, the builtins, modules of the library, and otherwise the candidate's.

    With ``entry``, the names under test, only these come from the candidate: otherwise a ``Counter`` that the tests
    forgot to import would be whatever the code calls ``Counter``.
    """

    def __init__(self, link: "_Link", entry: Collection[str], modules: Collection[str]) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._link = link
        self._entry = frozenset(entry)
        self._modules = frozenset(modules)

    def __missing__(self, name: str) -> object:
        if name not in self._entry:
            if hasattr(builtins, name):
                raise KeyError(name)  # Python then looks it up in the builtins
            if name in self._modules:
                self[name] = importlib.import_module(name)
                return self[name]
            if self._entry:
                raise NameError(f"name {name!r} is not defined: under test are {', '.join(sorted(self._entry))}")
        self[name] = self._link.name(name)
        return self[name]


def _exception(kind: str, text: str) -> Exception:
    """What the candidate raised; one of Python's own that takes more than a text is made without its arguments."""
    known = _RAISED.get(kind, Raised)
    if known is Raised or issubclass(known, ExceptionGroup):  # of exceptions, which were not sent
        return Raised(f"{kind}: {text}")
    several = issubclass(known, UnicodeDecodeError | UnicodeEncodeError | UnicodeTranslateError)
    return known.__new__(known) if several else known(text)


class _Link:
    """The judge's end of the channel."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._remotes: dict[int, Remote] = {}

    def name(self, name: str) -> object:
        """The candidate's global of this name."""
        return self._ask({"name": name}, ())

    def apply(self, function: str, *arguments: object, **options: object) -> object:
        """The result of an operation of the candidate; arguments that it changed in place are changed here too."""
        request = {
            "function": function,
            "arguments": [wire.encode(argument, _handle) for argument in arguments],
            "options": {name: wire.encode(value, _handle) for name, value in options.items()},
        }
        return self._ask(request, arguments[1:] if function == "call" else arguments)

    def _ask(self, request: Mapping[str, object], arguments: tuple[object, ...]) -> object:
        wire.send(self._channel, request)
        answer = wire.receive(self._channel, most=MAX_ANSWER)
        if not isinstance(answer, dict):
            raise wire.ConnectionLost(f"an answer is a {type(answer).__name__}, wanted an object")
        try:
            if "error" in answer:
                kind, text = map(str, answer["error"])
                if kind == "StopIteration" and request.get("function") != "next":
                    kind = "a StopIteration of the code's"  # as itself it would end a loop of the tests
                raise _exception(kind, text)
            for index, data in answer.get("changed", {}).items():
                _replace(arguments[int(index)], wire.decode_value(data, self._find))
            return wire.decode_value(answer["value"], self._find)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if "error" in answer:
                raise
            raise wire.ConnectionLost(f"an answer violates the protocol: {error}") from error

    def _find(self, number: int) -> "Remote":
        if not isinstance(number, int):
            raise ValueError(f"a handle is {number!r}, wanted a number")
        return self._remotes.setdefault(number, Remote(self, number))


class Remote:
    """A proxy for an object of the candidate. It equals itself only: the code does not decide comparisons."""

    __slots__ = ("_link", "_number")
    _link: _Link
    _number: int

    def __init__(self, link: _Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **options: object) -> object:  # noqa: D102  as the candidate's object
        return self._link.apply("call", self, *arguments, **options)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.apply("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._link.apply("set", self, name, value)

    def __getitem__(self, key: object) -> object:
        return self._link.apply("item", self, key)

    def __setitem__(self, key: object, value: object) -> None:
        self._link.apply("set_item", self, key, value)

    def __contains__(self, value: object) -> bool:
        # compared here: the __contains__ of the code under test could always answer yes
        return any(item is value or item == value for item in self)

    def __len__(self) -> int:
        return _exactly(int, self._link.apply("len", self))

    def __bool__(self) -> bool:
        return _exactly(bool, self._link.apply("bool", self))

    def __iter__(self) -> Iterator[object]:
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
        raise TypeError(f"the code returned {type(value).__name__} where Python wants {kind.__name__}")
    return kind(value)


def _handle(value: object) -> int:
    if not isinstance(value, Remote):
        raise Unsupported(f"the tests pass a value of type {type(value).__name__}, only plain values can be passed")
    number: int = object.__getattribute__(value, "_number")
    return number


def _replace(old: Any, new: Any) -> None:  # noqa: ANN401  containers of any type
    """Replace the contents of a mutable container by those of another one of its type."""
    if type(old) is not type(new):
        raise ValueError(f"an argument became {type(new).__name__} from {type(old).__name__}")
    old.clear()
    (old.extend if isinstance(old, list | bytearray) else old.update)(new)
