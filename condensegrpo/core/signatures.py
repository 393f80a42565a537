"""Whether the methods of a plug-in can be called as its protocol says. Calls none of them. Standard library only."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin

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


def return_fault(plugin: object, protocol: type) -> str:
    """What is wrong with what a method of a plug-in is annotated to return; empty: nothing, or it does not say.

        def __call__(self, trajectory, problem) -> float   ─▶   __call__ returns float, wanted Mapping[…] (my.py:3)

    A method may return more or less than the protocol says, such as ``dict`` or ``Iterable`` for ``Mapping``.
    """
    for name in methods_of(protocol):
        method = getattr(plugin, name)
        returned, expected = _returned(method), _returned(getattr(protocol, name))
        known = [kind for kind in _classes(returned) if kind is not object]
        related = (issubclass(kind, each) or kind in each.__mro__ for kind in known for each in _classes(expected))
        if known and not any(related):
            return f"{name} returns {_shown(returned)}, wanted {_shown(expected)}{at_definition(method)}"
    return ""


def _returned(method: Callable[..., Any]) -> object:
    """The annotation of what a method returns."""
    try:
        return inspect.signature(method, eval_str=True).return_annotation
    except Exception:  # it names what exists for type checkers only
        return Any


def _classes(annotation: object) -> tuple[type, ...]:
    """The classes of an annotation, those of each member of a union; none: one of them is unknown."""
    if get_origin(annotation) in (Union, UnionType):
        members = [_classes(member) for member in get_args(annotation)]
        return tuple(kind for kinds in members for kind in kinds) if all(members) else ()
    kind = type(None) if annotation is None else get_origin(annotation) or annotation
    return (kind,) if isinstance(kind, type) and kind is not inspect.Signature.empty else ()


def _shown(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return re.sub(r"\b[a-z_.]+\.", "", text)  # without modules


def _fault(method: Callable[..., Any], specified: Callable[..., Any]) -> str:
    """What follows the name of a method; empty: it can be called so."""
    try:
        signature, outermost = inspect.signature(method), inspect.signature(method, follow_wrapped=False)
    except (TypeError, ValueError):  # not known of what is built in
        return ""
    specification = inspect.signature(specified).parameters
    names = tuple(specification)
    keywords = [name for name, each in specification.items() if each.kind is each.KEYWORD_ONLY]
    if not (_binds(signature, names, keywords) or _binds(outermost, names, keywords)):  # a decorator may pass more
        return f"({', '.join(map(str, signature.parameters.values()))}) cannot be called with ({', '.join(names)})"
    if inspect.iscoroutinefunction(specified):
        returned = str(signature.return_annotation)
        passes_on = any(each.kind is each.VAR_POSITIONAL for each in outermost.parameters.values())  # to a coroutine?
        wrapped = inspect.unwrap(_function(method))
        asynchronous = (
            _gives_coroutine(method) or _gives_coroutine(wrapped) or any(map(returned.__contains__, AWAITABLE))
        )
        if not passes_on and not asynchronous:
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


def _binds(signature: inspect.Signature, names: Sequence[str], keywords: Sequence[str]) -> bool:
    try:
        signature.bind(*(name for name in names if name not in keywords), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _gives_coroutine(method: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine; also of an object with such a ``__call__``."""
    function = _function(method)
    return inspect.iscoroutinefunction(function if inspect.isroutine(function) else type(function).__call__)


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    return method.func if isinstance(method, partial) else method
