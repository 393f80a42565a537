"""Finds plug-ins by name through entry points, or in a file as ``path/to/file.py:Name``. Standard library only."""

import difflib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from condensegrpo.core.errors import PluginError

KINDS = ("condensers", "rewards", "tasks", "tools", "samplers", "trackers")


@runtime_checkable
class ChecksOptions(Protocol):
    """A plug-in that can refuse its options before it is built, which may take a model."""

    def check_options(self, **options: Any) -> None:  # noqa: ANN401  see load
        """Raise ValueError for what it does not take."""


def installed(kind: str) -> tuple[EntryPoint, ...]:
    """The entry points of one kind (a member of ``KINDS``), by name."""
    return tuple(sorted(entry_points(group=f"condensegrpo.{kind}"), key=lambda point: point.name))


def load(kind: str, name: str) -> Any:  # noqa: ANN401  a plug-in is whatever its entry point names
    """The object that a plug-in's name stands for: a class or function, not yet called.

    Raises:
        PluginError: no such plug-in (the message names the nearest), or it cannot be imported.
    """
    if ":" in name:
        return _from_file(kind, name)
    points = {point.name: point for point in installed(kind)}
    if name not in points:
        near = difflib.get_close_matches(name, points, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise PluginError(
            f"looking for {name!r} among the {kind}: not installed. {hint}Installed: {', '.join(points) or 'none'}. "
            f"A plug-in in a file is written path/to/file.py:Name."
        )
    try:
        return points[name].load()
    except Exception as error:  # the boundary to somebody else's import
        raise PluginError(
            f"importing {name!r} ({points[name].value}) of the {kind}: {type(error).__name__}: {error}"
        ) from error


def build(kind: str, name: str, options: Mapping[str, Any], supplied: Mapping[str, object] = {}) -> Any:  # noqa: ANN401  see load
    """Load a plug-in and call it with its options, and with what is supplied and named as one of its parameters.

    Raises:
        PluginError: an option is unknown or missing (the message lists what exists), or a value is refused.
    """
    factory = load(kind, name)
    taken = {key: value for key, value in supplied.items() if key in inspect.signature(factory).parameters}
    _bind(factory, kind, name, {**taken, **options})
    return _refusing(partial(factory, **taken), kind, name, options)


def check(kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Find a plug-in and compare the options with its signature, without calling it; raises as ``build`` does.

    One that has a ``check_options`` is asked what it thinks of their values: it raises ValueError for what it refuses.
    """
    factory = load(kind, name)
    _bind(factory, kind, name, options)
    if isinstance(factory, ChecksOptions):
        _refusing(factory.check_options, kind, name, options)


def takes(kind: str, name: str, option: str) -> bool:
    """Whether a plug-in has an option of this name."""
    return option in inspect.signature(load(kind, name)).parameters


def _refusing(factory: Callable[..., Any], kind: str, name: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401  see load
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise PluginError(f"setting up {name!r} of the {kind} with {dict(options)}: {error}") from error


def _bind(factory: Any, kind: str, name: str, options: Mapping[str, Any]) -> None:  # noqa: ANN401  see load
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "none"
        raise PluginError(f"setting up {name!r} of the {kind}: {error}. Its options are: {known}.") from error


def _from_file(kind: str, name: str) -> Any:  # noqa: ANN401  see load
    path_text, _, attribute = name.rpartition(":")
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise PluginError(f"looking for {name!r} among the {kind}: there is no file {path}.")
    module = _import_file(path)
    if not hasattr(module, attribute):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise PluginError(f"looking for {attribute!r} in {path}: it holds {', '.join(names) or 'nothing'}.")
    return getattr(module, attribute)


def _import_file(path: Path) -> ModuleType:
    module_name = f"condensegrpo_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"importing {path}: it is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the boundary to a user's file
        del sys.modules[module_name]
        raise PluginError(f"importing {path}: {type(error).__name__}: {error}") from error
    return module
