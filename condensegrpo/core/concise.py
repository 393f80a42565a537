"""Errors of the Python interface: a traceback shows the line of the caller and the message. Standard library only."""

from collections.abc import Callable
from functools import cached_property, wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

from condensegrpo.core.errors import CondenseError

C = TypeVar("C", bound=type)
P = ParamSpec("P")
T = TypeVar("T")


def concise(function: Callable[P, T]) -> Callable[P, T]:
    """Let errors that are raised on purpose show the line of the caller and the message, no lines of this package."""

    @wraps(function)
    def called(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except CondenseError as error:
            raise error.with_traceback(None) from None

    return called


def concise_class(kind: C) -> C:
    """Make the constructor, the public methods and the properties of a class ``concise``."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name not in ("__init__", "__getitem__"):
            continue
        if isinstance(member, FunctionType):
            setattr(kind, name, concise(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(kind, name, property(concise(member.fget)))
        elif isinstance(member, cached_property):
            member.func = concise(member.func)
    return kind
