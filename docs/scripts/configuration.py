"""Writes all keys into docs/reference/configuration.md, and those of a study file into docs/reference/studies.md.

python docs/scripts/configuration.py

What stands before the first section of a page is kept. A section is a pydantic model or a dataclass. Both give their
keys, types, bounds, defaults and attribute docstrings.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from condensegrpo.config.schema import RunConfig
from condensegrpo.studies.lab.study import LabStudy

REFERENCE = Path(__file__).parents[1] / "reference"
PAGES: Mapping[str, type] = {"configuration.md": RunConfig, "studies.md": LabStudy}
FIRST = "## Top level\n"


class Key(NamedTuple):
    """One key of a section."""

    name: str
    annotation: object  # Annotated included
    default: object  # PydanticUndefined: required
    about: str
    bounds: tuple[object, ...]


def is_section(kind: object) -> bool:
    """Whether a type has keys of its own."""
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


@cache
def described(kind: type) -> dict[str, str]:
    """The attribute docstrings, or trailing comments, of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_section(base) or base is BaseModel:
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        body = ast.parse(source).body[0].body  # type: ignore[attr-defined]  # a class of the source
        for index, node in enumerate(body):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            after = body[index + 1] if index + 1 < len(body) else None
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[node.target.id] = inspect.cleandoc(str(after.value.value))
            else:
                comment = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].partition("# ")[2]
                texts[node.target.id] = re.sub(r"^(noqa|type): .*", "", comment)
    return texts


def keys(section: type) -> Iterator[Key]:
    """The keys of a pydantic model or a dataclass."""
    about = described(section)
    if issubclass(section, BaseModel):
        for name, field in section.model_fields.items():
            default = field.get_default(call_default_factory=True, validated_data={})
            text = field.description or about.get(name, "")
            yield Key(name, field.annotation, default, text, tuple(field.metadata))
        return
    hints = get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        default, metadata = _of_dataclass(field, hints[field.name])
        yield Key(field.name, hints[field.name], default, about.get(field.name, ""), metadata)


def _of_dataclass(field: dataclasses.Field[Any], hint: object) -> tuple[object, tuple[object, ...]]:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    metadata = [bound for part in (hint, *get_args(hint)) for bound in getattr(part, "__metadata__", ())]
    for given in (*metadata, default):
        if isinstance(given, FieldInfo):
            metadata += given.metadata
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True, validated_data={})
    return (PydanticUndefined if default is dataclasses.MISSING else default), tuple(metadata)


def sections(section: type, path: str = "", value: object = None) -> list[tuple[str, type, object]]:
    """A section and those inside it, each with its dotted path and the value that it has by default, if any."""
    nested = [(path, section, value)]
    for key in keys(section):
        for kind in (*_inside(key.annotation), *_elements(key.annotation)):
            if is_section(kind) and kind.__name__ != "Plugin":
                inner = key.default if isinstance(key.default, kind) else None
                nested += sections(kind, f"{path}.{key.name}".lstrip("."), inner)
    return nested


def _inside(annotation: object) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _inside(get_args(annotation)[0])
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        return [kind for part in get_args(annotation) for kind in _inside(part)]
    return [annotation]


def _elements(annotation: object) -> list[Any]:
    """The type of a list's elements; nothing for other types."""
    return list(get_args(annotation)) if get_origin(annotation) is list else []


def default_of(key: Key, value: object) -> str:
    """The default as YAML writes it, in a section with a default value of its own; empty for a section."""
    default = getattr(value, key.name, key.default)
    if default is PydanticUndefined:
        return "required"
    if is_section(type(default)):
        return ""
    return f"`{_plain(default)}`"


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != f.default
        }
        return {name: _plain(item) for name, item in changed.items() if item != {}}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return "null" if value is None else value


def kind_of(annotation: object) -> str:
    """A type in the words of YAML."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        pattern = any(getattr(item, "pattern", None) or getattr(item, "metadata", None) for item in metadata)
        return "name" if inner is str and pattern else kind_of(inner)
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(map(kind_of, get_args(annotation)))
    if get_origin(annotation) in (dict, Mapping):
        return "mapping"
    if get_origin(annotation) is tuple and Ellipsis not in get_args(annotation):
        return f"[{', '.join(map(kind_of, get_args(annotation)))}]"
    if arguments := get_args(annotation):
        outer = (
            "list"
            if get_origin(annotation) is tuple
            else getattr(get_origin(annotation), "__name__", str(get_origin(annotation)))
        )
        return f"{outer} of {', '.join(kind_of(item) for item in arguments if item is not Ellipsis)}"
    if annotation is type(None):
        return "null"
    return getattr(annotation, "__name__", str(annotation))


def range_of(bound: object) -> str:
    """A bound, for example ``≥ 1``; empty for what is no bound."""
    match bound:
        case Ge(ge=least):
            return f"≥ {least}"
        case Gt(gt=least):
            return f"> {least}"
        case Le(le=most):
            return f"≤ {most}"
        case Lt(lt=most):
            return f"< {most}"
    return ""


def _type_of(key: Key, parent: str) -> str:
    """The type, or a link to the section of that name."""
    path = f"{parent}.{key.name}".lstrip(".")
    if any(map(is_section, _elements(key.annotation))) and _elements(key.annotation)[0].__name__ != "Plugin":
        return f"list of [sections](#{path.replace('.', '')})"
    words = []
    for kind in _inside(key.annotation):
        section = is_section(kind) and kind.__name__ != "Plugin"
        words.append(f"[section](#{path.replace('.', '')})" if section else kind_of(kind))
    return " or ".join(words)


def _meaning_of(key: Key) -> str:
    """What a key means and its bounds; what a section is for stands below its heading."""
    about = key.about
    text = " ".join(about.split()).replace("``", "`").replace("|", "\\|")
    text = "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(text.split("`")))
    return f"{text} {', '.join(dict.fromkeys(filter(None, map(range_of, key.bounds))))}".strip()


def filled(page: str, top: type) -> str:
    """A page with its introduction as it is, and a table for each section of its keys."""
    parts = [page[: page.index(FIRST)]]
    for path, section, value in sections(top):
        about = (inspect.getdoc(section) or "").replace("``", "`")
        parts.append(f"## {path or 'Top level'}\n\n{about}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts += (
            f"| `{key.name}` | {_type_of(key, path)} | {default_of(key, value)} | {_meaning_of(key)} |\n"
            for key in keys(section)
        )
        parts.append("\n")
    return "".join(parts)


if __name__ == "__main__":
    for name, top in PAGES.items():
        file = REFERENCE / name
        file.write_text(filled(file.read_text(encoding="utf-8"), top), encoding="utf-8")
