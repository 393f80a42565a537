"""Finds plug-ins by name through entry points, in a file as ``path/to/file.py:Name``, or in an installed package as
``package.module:Name``. Standard library only.
"""

import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from condensegrpo.core.errors import PluginError
from condensegrpo.core.failures import failure_of, is_ctrl_c
from condensegrpo.core.plugin_kinds import KINDS
from condensegrpo.core.wording import did_you_mean

OBJECT = "python:"  # begins the name that a configuration has for a plug-in given as an object
WriteStamp = tuple[int, int] | None  # when a file was written, and its size; None: it is gone
_files = dict[str, tuple[str, WriteStamp]]()  # modules that files of plug-ins brought: their files as they were then
_loaded = set[Path]()  # the folders of the files of plug-ins


def installed(kind: str) -> tuple[EntryPoint, ...]:
    """The entry points of one kind (a member of ``KINDS``), by name."""
    return _entry_points(tuple(sys.path))[kind]


@cache
def _entry_points(path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of all packages on a search path, by kind, read once: a configuration names a dozen of them."""
    points = entry_points()
    by_kind = {kind: points.select(group=f"condensegrpo.{kind}") for kind in KINDS}
    return {kind: tuple(sorted(found, key=lambda point: point.name)) for kind, found in by_kind.items()}


def missing_methods(plugin: object, *names: str) -> tuple[str, ...]:
    """The names of the methods that a plug-in, or its class, does not have."""
    return tuple(name for name in names if not callable(getattr(plugin, name, None)))


def load_plugin(kind: str, name: str) -> Any:  # noqa: ANN401  a plug-in is whatever its entry point names
    """The object that a plug-in's name stands for: a class or function, not yet called."""
    if name.startswith(OBJECT):
        place = KINDS[kind]
        argument = f"{place.argument}={'[…]' if place.is_list else '…'}"
        again = f"Pass the object again, as in condensegrpo.train(…, resume=True, {argument}). "
        of_file = "the function or its class" if kind == "tools" else "its class"
        raise PluginError(
            f"looking for {name!r} among the {kind}: it is an object of a Python program, and no configuration can "
            f"hold it. {again if place.argument else ''}On the command line name {of_file} in a file, as in "
            f"{place.override('path/to/file.py:Name')}."
        )
    if ":" in name:
        return load_object(kind, name)
    if name.endswith(".py"):
        raise PluginError(f"looking for {name!r} among the {kind}: it names a file, wanted what in it: {name}:Name.")
    points = {point.name: point for point in installed(kind)}
    if name not in points:
        raise PluginError(
            f"looking for {name!r} among the {kind}: not installed. {did_you_mean(name, points)}"
            f"Installed: {', '.join(points) or 'none'}. "
            f"A plug-in in a file is written path/to/file.py:Name."
        )
    try:
        return points[name].load()
    except BaseException as error:  # the boundary to the import of a plug-in
        if is_ctrl_c(error):
            raise
        raise PluginError(
            f"importing {name!r} ({points[name].value}) of the {kind}: {failure_of('', error)}"
        ) from error


def load_object(kind: str, name: str) -> Any:  # noqa: ANN401  whatever the name stands for
    """What a file or an importable module defines: ``path/to/file.py:Name`` or ``package.module:Name``.

    Args:
        kind: of the object, in the plural, for the errors.
    """
    path_text, _, attribute = name.rpartition(":")
    path = Path(os.path.expanduser(path_text)).resolve()  # not Path.expanduser, which fails at an unknown user
    module = _import_file(path) if path.is_file() else _import_module(path_text)
    if module is None:
        beside = "" if os.path.isabs(path_text) else ", nor one beside the configuration"
        raise PluginError(
            f"looking for {name!r} among the {kind}: there is no file {path}{beside}, and no module of that name. "
            f"A plug-in in a file is written path/to/file.py:Name."
        )
    if not hasattr(module, attribute):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise PluginError(
            f"looking for {attribute!r} in {path if path.is_file() else path_text}: no such name; it holds "
            f"{', '.join(names) or 'nothing'}."
        )
    return getattr(module, attribute)


def _import_module(name: str) -> ModuleType | None:
    """An importable module; None: there is none of that name."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    try:
        return importlib.import_module(name)
    except BaseException as error:  # the boundary to the import of a plug-in
        if is_ctrl_c(error):
            raise
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            return None
        raise PluginError(f"importing {name}: {failure_of('', error)}") from error


def _import_file(path: Path) -> ModuleType:
    root = path.parent  # above the package that the file is in, if it is in one
    while (root / "__init__.py").is_file():
        root = root.parent
    leaf = f"condensegrpo_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    module_name = ".".join((*path.parent.relative_to(root).parts, leaf))  # for its relative imports
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"importing {path}: it is not a Python file.")
    module, before = importlib.util.module_from_spec(spec), set(sys.modules)
    sys.modules[module_name] = module
    try:
        with _neighbours_in(root) if str(root) not in sys.path else nullcontext(), _neighbours_in(path.parent):
            spec.loader.exec_module(module)
    except BaseException as error:  # the boundary to a user's file
        del sys.modules[module_name]
        if is_ctrl_c(error):
            raise
        raise PluginError(f"importing {path}: {failure_of('', error)}") from error
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if not file or "site-packages" in file or name.startswith("condensegrpo."):
            continue
        if any(Path(file).is_relative_to(folder) for folder in _loaded):
            _files[name] = file, _written(file)
    return module


def forget_edited() -> None:
    """Forget the modules of plug-ins' files if one of those was edited; where a run begins, and never inside of one.

    All are forgotten: what imported an edited one holds what it had.
    """
    if any(_written(file) != written for file, written in _files.values()):
        for name in _files:
            sys.modules.pop(name, None)
        _files.clear()


def _written(file: str) -> WriteStamp:
    """When a file was written, and its size; None: it is gone."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@contextmanager
def _neighbours_in(folder: Path) -> Iterator[None]:
    """Let a plug-in's file import the modules in a folder while it loads.

    A module of the same name in another such folder is imported again: each file gets its own neighbour.
    """
    here = {entry.name.removesuffix(".py") for entry in folder.iterdir()}  # read once: the folder may be remote
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        if top not in here or not file:
            continue
        elsewhere = (path for other in _loaded - {folder} for path in (other / f"{top}.py", other / top))
        if any(Path(file).is_relative_to(path) for path in elsewhere):
            del sys.modules[name]
    _loaded.add(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
