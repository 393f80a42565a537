"""Whether the methods of a plug-in can be called as its protocol says. Calls none of them. Standard library only."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from condensegrpo.core.failures import at_definition

AWAITABLE = ("Awaitable", "Coroutine", "Future", "Task")  # in the annotation of a plain function that returns one


def methods_of(protocol: type) -> tuple[str, ...]:
    """The methods of a protocol by name, properties left out."""
    names = (name for name, member in vars(protocol).items() if inspect.isfunction(member))
    return tuple(name for name in names if name == "__call__" or not name.startswith("_"))


def signature_faults(plugin: object, protocol: type) -> Iterator[str]:
    """What is wrong with the methods that a plug-in has of a protocol: their arguments, or whether they are async.

        def condense(self, history)   ─▶   condense(history) cannot be called with (history, budget, tools) (my.py:3)

    Args:
        plugin: an object; or a class, whose methods get their object as the first argument.
    """
    for name in methods_of(protocol):
        method = plugin if name == "__call__" and inspect.isroutine(plugin) else getattr(plugin, name, None)
        if callable(method):
            specified = partial(getattr(protocol, name), None)
            fault = _fault(partial(method, None) if _lacks_object(plugin, name) else method, specified)
            if fault:
                yield f"{name}{fault}{at_definition(method)}"


def _fault(method: Callable[..., Any], specified: Callable[..., Any]) -> str:
    """What follows the name of a method; empty: it can be called so."""
    try:
        signature, outermost = inspect.signature(method), inspect.signature(method, follow_wrapped=False)
    except (TypeError, ValueError):  # not known of what is built in
        return ""
    names = tuple(inspect.signature(specified).parameters)
    if not (_binds(signature, names) or _binds(outermost, names)):  # a decorator may pass further arguments
        return f"({', '.join(map(str, signature.parameters.values()))}) cannot be called with ({', '.join(names)})"
    if inspect.iscoroutinefunction(specified):
        returned = str(signature.return_annotation)
        passes_on = any(each.kind is each.VAR_POSITIONAL for each in outermost.parameters.values())  # to a coroutine?
        if not passes_on and not _asynchronous(method) and not any(word in returned for word in AWAITABLE):
            return "() is not asynchronous: define it with async def, or annotate it as -> Awaitable[…]"
    elif _gives_coroutine(method):  # but not of what it wraps, which it may run to its end
        return "() is asynchronous: define it with def"
    return ""


def _lacks_object(plugin: object, name: str) -> bool:
    """Whether the method is that of a class and takes its object as the first argument."""
    if not isinstance(plugin, type):
        return False
    found = inspect.getattr_static(plugin, name)
    return inspect.isroutine(found) and not isinstance(found, classmethod | staticmethod)


def _binds(signature: inspect.Signature, names: tuple[str, ...]) -> bool:
    try:
        signature.bind(*names)
    except TypeError:
        return False
    return True


def _asynchronous(method: Callable[..., Any]) -> bool:
    """Whether a call may give a coroutine: it does, or what it wraps does."""
    return _gives_coroutine(method) or _gives_coroutine(inspect.unwrap(_function(method)))


def _gives_coroutine(method: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine; also of an object with such a ``__call__``."""
    function = _function(method)
    return inspect.iscoroutinefunction(function if inspect.isroutine(function) else type(function).__call__)


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    return method.func if isinstance(method, partial) else method
