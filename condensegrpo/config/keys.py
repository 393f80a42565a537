"""The keys of a configuration with type, default and meaning, from its JSON schema, and what TRL and verl call them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

from condensegrpo.config.foreign_keys import FOREIGN_KEYS
from condensegrpo.config.options import installed_options
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.section import keys_of
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.plugin_kinds import KINDS
from condensegrpo.core.wording import did_you_mean
from condensegrpo.episodes.settings import ToolLimits

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "object": "mapping"}
FREE_MAPPING = "mapping"  # the type of a key below which any key may stand


class Key(NamedTuple):
    """A key of a configuration."""

    name: str  # dotted
    type: str  # section: it has keys of its own
    default: str  # as YAML; empty: of a section
    about: str


@cache
def keys(top: type[BaseModel] = RunConfig) -> Mapping[str, Key]:
    """All keys by their names, sections included, in the order of the schema."""
    schema = top.model_json_schema()
    known = schema["$defs"]
    limits = TypeAdapter(list[ToolLimits], config=ConfigDict(use_attribute_docstrings=True)).json_schema()["$defs"]
    if "ToolSettings" in known:  # pydantic inherits no docstrings
        known["ToolSettings"]["properties"] |= limits["ToolLimits"]["properties"]
    return {key.name: key for key in _keys(schema, known, "", {})}


def explained(name: str) -> Key:
    """The key of a name, which may be one of TRL or verl, the end of one (``max_turns``), or an option of a plug-in."""
    known, ours = keys(), FOREIGN_KEYS.get(name, name)
    ends = [key for key in known if key.endswith(f".{name}")]
    if ours in known or len(ends) == 1:
        return known[ours if ours in known else ends[0]]
    if (inside := _nested_key(ours)) is not None:
        return inside
    lasts = [key.rpartition(".")[2] for key in known]
    near = f"Did you mean {', '.join(ends)}? " if ends else did_you_mean(name, [*known, *lasts, *FOREIGN_KEYS])
    raise ConfigError(f"looking for the key {name}: there is none. {near}condensegrpo config --list shows all.")


def _nested_key(name: str) -> Key | None:
    """The key of an entry of a list, of a free mapping, or of an option of a plug-in; None: it is none of them."""
    known, pattern = keys(), re.sub(r"\.\d+(?=\.|$)", "[]", name)
    section, dot, path = pattern.partition(".options.")
    kind = next((kind for kind, place in KINDS.items() if place.section == section), None)
    if dot and kind is not None:
        return _option(name, kind, path.replace("[]", "").split("."))
    listed, entry, field = pattern.partition("[]")
    if entry and field in ("", ".name", ".options") and listed in known and known[listed].type.startswith("list"):
        return known[listed]
    return next((key for key in known.values() if key.type == FREE_MAPPING and name.startswith(f"{key.name}.")), None)


def _option(name: str, kind: str, path: Sequence[str]) -> Key:
    """An option that installed plug-ins of a kind take, or a key in it, with those plug-ins and their defaults."""
    if "options" in path:  # of a reward within a reward, or of a condenser within a condenser
        path = path[path.index("options") + 1 :]
    if not path:
        return keys()[f"{KINDS[kind].section}.options"]
    option, *inside = path
    known, takers = installed_options(kind), dict[str, str]()  # plug-ins that take it, with its default
    for plugin, options in known.items():
        if options is not None and option in options and _leads_to(options[option].annotation, inside):
            default = options[option].default
            takers[plugin] = "required" if default is Parameter.empty else f"default {default!r:.40}"
    if not takers and None not in known.values():
        every = {each for options in known.values() for each in options or ()}
        near = "" if option in every else did_you_mean(option, every)
        raise ConfigError(
            f"looking for the key {name}: none of the installed {kind} has such an option. {near}docs/reference lists "
            f"the options of each."
        )
    if inside:
        stated = ", ".join(takers)
    elif len(defaults := set(takers.values())) == 1:
        stated = f"{', '.join(takers)}; {defaults.pop()}"
    else:
        stated = "; ".join(f"{taker}, {default}" for taker, default in takers.items())
    return Key(name, f"option of {stated or 'a plug-in'}", "", "docs/reference lists the options of each.")


def _leads_to(annotation: object, path: Sequence[str]) -> bool:
    """Whether a path of keys leads into the values of a type."""
    if not path:
        return True
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (dict, Mapping) and inner:
        return _leads_to(inner[-1], path[1:])
    if inner:  # Annotated, a union, a list: its indices are no part of the path
        return any(_leads_to(each, path) for each in inner)
    if isinstance(annotation, type) and (known := keys_of(annotation)):
        return path[0] in known and _leads_to(get_type_hints(annotation)[path[0]], path[1:])
    return any(word in str(annotation) for word in ("Mapping", "dict", "Any", "object"))


def foreign_names(name: str) -> list[str]:
    """The keys of TRL and verl that a key stands for."""
    return [other for other, ours in FOREIGN_KEYS.items() if ours == name]


def _keys(
    section: Mapping[str, Any], sections: Mapping[str, Any], path: str, defaults: Mapping[str, Any]
) -> Iterator[Key]:
    """The keys of a section; ``defaults``: those that the section around it sets."""
    for name, entry in section["properties"].items():
        listed = entry.get("items", {}) if entry.get("type") == "array" else entry
        kinds = listed.get("anyOf", [listed])
        inner = [known for each in kinds if "properties" in (known := _followed(each, sections))]
        default = defaults.get(name, entry.get("default", {} if entry.get("type") == "object" else None))
        about = _line(entry.get("description", ""))
        is_entry = {"type": "string"} in kinds or (
            listed is not entry and all(len(each["properties"]) == 2 for each in inner)
        )
        if inner and not is_entry:
            kind = "section" if listed is entry else "list of sections"
            about = _line(inner[0].get("description", "")) + " " * bool(about) + about
            yield Key(f"{path}{name}", f"{kind} or null" if len(kinds) > len(inner) else kind, "", about)
            yield from _keys(inner[0], sections, f"{path}{name}.", default if isinstance(default, dict) else {})
        else:
            is_required = name in section.get("required", ()) and name not in defaults
            plain = default if isinstance(default, str) else json.dumps(default, ensure_ascii=False)
            yield Key(f"{path}{name}", _type(entry, sections), "required" if is_required else plain, about)


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _followed(entry: Mapping[str, Any], sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """An entry, or the one that it refers to."""
    followed: Mapping[str, Any] = sections[entry["$ref"].rpartition("/")[2]] if "$ref" in entry else entry
    return followed


def _type(entry: Mapping[str, Any], sections: Mapping[str, Any]) -> str:
    entry = _followed(entry, sections)
    if "properties" in entry:
        return "{name, options}"
    if "anyOf" in entry:
        return " or ".join(_type(each, sections) for each in entry["anyOf"])
    if "enum" in entry or "const" in entry:
        return " or ".join(map(str, entry.get("enum", [entry.get("const")])))
    if entry.get("type") == "array":
        items = [_type(each, sections) for each in entry.get("prefixItems", [entry.get("items", {})])]
        return f"[{', '.join(items)}]" if "prefixItems" in entry else f"list of {items[0]}"
    bounds = ", ".join(f"{sign} {entry[bound]:g}" for bound, sign in BOUNDS.items() if bound in entry)
    return f"{TYPES.get(entry.get('type', ''), entry.get('type', 'anything'))} {bounds}".rstrip()
