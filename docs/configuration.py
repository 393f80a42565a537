"""Writes the page of all keys: python docs/configuration.py > docs/configuration.md"""

import re
from typing import Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from condensegrpo.config.schema import RunConfig

HEAD = """\
# Every key of the configuration

Made from `condensegrpo/config/schema.py` by `python docs/configuration.py > docs/configuration.md`; a test compares
the two.

A YAML file holds what an experiment changes, `key=value` arguments change it further (`train.steps=20`,
`rollout.tools=[calculator]`, `model.new=null`), and everything else has the default below. Unknown keys are errors.
`condensegrpo train CONFIG --dry-run` checks all of it and prints the resolved configuration.
"""


def sections(model: type[BaseModel], place: str = "") -> list[tuple[str, type[BaseModel]]]:
    """A section and those inside it, each with its dotted place."""
    found = [(place, model)]
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ != "Plugin":
                found += sections(kind, f"{place}.{name}".lstrip("."))
    return found


def default(model: type[BaseModel], name: str) -> str:
    """The default of a key as it would be written."""
    value = model.model_fields[name].get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return f"`{value.model_dump(mode='json', exclude_unset=True)}`"
    if isinstance(value, dict):
        return f"`{ {str(key): one for key, one in value.items()} }`"
    return f"`{'null' if value is None else value}`"


def kind(annotation: object) -> str:
    """A type in the words of YAML."""
    if get_origin(annotation) is Union:
        return " or ".join(map(kind, get_args(annotation)))
    plain = isinstance(annotation, type) and not get_args(annotation)
    text = annotation.__name__ if plain else str(annotation)
    text = re.sub(r"Annotated\[str, FieldInfo\(.*\)\]", "name", text)
    for module in ("typing.", "condensegrpo.config.schema.", "condensegrpo.core.trajectory."):
        text = text.replace(module, "")
    return text.replace("|", "or").replace("NoneType", "null").replace("None", "null")


def range_of(bound: object) -> str:
    """A bound in words; empty for what is none."""
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


def main() -> None:
    """Print the page."""
    print(HEAD)
    for place, model in sections(RunConfig):
        print(f"## {place or 'Top level'}\n\n{model.__doc__}\n\n| key | type | default | |\n|---|---|---|---|")
        for name, field in model.model_fields.items():
            about = " ".join((field.description or "").split())
            bounds = ", ".join(filter(None, (range_of(bound) for bound in field.metadata)))
            print(f"| `{name}` | {kind(field.annotation)} | {default(model, name)} | {about} {bounds}".rstrip() + " |")
        print()


if __name__ == "__main__":
    main()
