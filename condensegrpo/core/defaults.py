"""Plug-ins and the defaults of their base classes. Standard library only."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, cast

T = TypeVar("T")


def with_defaults(plugin: object, base: type[T]) -> T:
    """The plug-in. One that does not inherit its base class gets the defaults of the members that it lacks."""
    if isinstance(plugin, base):
        return plugin
    names = [name for name in vars(base) if (name == "__call__" or name[0] != "_") and hasattr(plugin, name)]
    members = {name: property(attrgetter(f"plugin.{name}")) for name in names}
    kind = type(plugin)
    adapter: Any = type(kind.__name__, (base,), {**members, "__module__": kind.__module__})()
    adapter.plugin = plugin
    return cast(T, adapter)


def overrides(plugin: object, default: Callable[..., object]) -> bool:
    """Whether a plug-in, or a class of plug-ins, has another method than the default of its base class."""
    found = getattr(plugin, default.__name__, default)
    return getattr(found, "__func__", found) is not default
