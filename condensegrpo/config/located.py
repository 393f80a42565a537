"""Relative paths in a configuration, for a command that runs in another folder than the run was started in.

    reward: {name: my/reward.py:Brief}   ─▶   /home/me/project/my/reward.py:Brief, unless the command runs in project

A path of a YAML file is looked for in the working directory, then beside the file; one of a run in the folder that the
run was started in, then in the working directory; one of an override in the working directory alone. Paths are the
files of plug-ins and data, wherever they are named, and the folders of ``FOLDERS``. What is nowhere stays as it is.
"""

import os
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from condensegrpo.config.extends import OVERRIDE, Sourced, plain, with_leaves
from condensegrpo.config.yaml_tree import KeyPath
from condensegrpo.core.process import looked_for, working_directory
from condensegrpo.storage.environment import started_in

# of the task ``agent``, relative to the folder of an episode
IN_EPISODE = tuple(("task", "options", name) for name in ("program", "outcome", "answer_file", "protected"))
FOLDERS = (("task", "data"), ("task", "eval_data"), ("model", "path"), ("sandbox", "packages"))  # they may be files
SHIPPED = Path(str(files("condensegrpo.configs"))).parent  # with configs/ and studies/, in a clone and installed
VARIANTS = ("evaluate", "variants")  # by name, overrides: key=value


def absolute_paths(tree: Any, file: Path) -> Any:  # noqa: ANN401  a YAML tree
    """The plain tree of a YAML file and overrides with origins, whose paths are found from the working directory."""
    here, start = working_directory(), started_in(file.parent)

    def found(leaf: object, key: KeyPath) -> object:
        if not (isinstance(leaf, Sourced) and isinstance(leaf.value, str)):
            return plain(leaf)
        beside = (here, Path(leaf.origin).parent) if start is None else (start, here)
        folders = [folder for folder in ((here,) if leaf.origin == OVERRIDE else beside) if folder is not None]
        name, equals, text = leaf.value.partition("=") if key[: len(VARIANTS)] == VARIANTS else ("", "", leaf.value)
        stays, named = here if here == (start or here) else None, tuple(name.split(".")) if equals else key
        if named in IN_EPISODE and ".py:" not in text:
            return leaf.value
        folders += [SHIPPED] if text.startswith("studies/") else []  # files of the studies that a package brings
        path = _found(text, named, folders, stays=stays)
        return f"{name}{equals}{path}"

    return with_leaves(tree, found)


def _found(text: str, key: KeyPath, folders: Iterable[Path], *, stays: Path | None) -> str:
    """A text with the relative path in it made absolute, unless it is found in the folder in which it ``stays``."""
    file, colon, name = _file_and_name(text)
    path = Path(os.path.expanduser(file))  # unlike that of Path, for a text that begins with ~ and is no path
    if path.is_absolute() or not (path.suffix or key in FOLDERS):
        return text
    exists = os.path.exists if key in FOLDERS else os.path.isfile  # unlike those of Path, for a text of any length
    for folder in folders:
        if exists(folder / path):
            return text if folder == stays else f"{folder / path}{colon}{name}"
    if colon:
        looked_for(text, folders)
    return text


def is_same_file(one: str, other: str) -> bool:
    """Whether two texts name one file from the working directory: as paths, ``path.py:Name``, or behind a ``key=``."""
    (key, equals, value), (other_key, _, other_value) = one.partition("="), other.partition("=")
    if equals and key == other_key:
        return value == other_value or is_same_file(value, other_value)
    (file, _, name), (other_file, _, other_name) = _file_and_name(one), _file_and_name(other)
    exist = os.path.exists(file) and os.path.exists(other_file)
    return exist and name == other_name and os.path.samefile(file, other_file)


def plugin_files(tree: object) -> tuple[Path, ...]:
    """The Python files that a plain tree names, as ``path.py:Name``, relative to the working directory."""
    texts = (value.rpartition("=")[2] for value in _texts(tree) if ".py:" in value)
    return tuple(sorted({Path(os.path.abspath(os.path.expanduser(_file_and_name(text)[0]))) for text in texts}))


def _texts(tree: object) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(part)


def _file_and_name(text: str) -> tuple[str, str, str]:
    """``path.py``, a colon and the name behind it; of another path the path alone."""
    return text.rpartition(":") if ".py:" in text else (text, "", "")
