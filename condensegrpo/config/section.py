"""A section of a configuration: frozen, checked, and its faults told by key, found and wanted."""

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from condensegrpo.config.yaml_tree import numbers
from condensegrpo.core.errors import ConfigError


class Section(BaseModel):
    """The base of all sections: unknown keys are errors, and every key's docstring is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def parse(kind: type[S], tree: object, *, source: str) -> S:
    """The checked section of a tree.

    Raises:
        ConfigError: every fault, one a line: the key, what was found and what was wanted.
    """
    try:
        return kind.model_validate(numbers(tree))
    except ValidationError as error:
        lines = "\n".join(f"  {_fault(kind, fault)}" for fault in error.errors())
        raise ConfigError(f"reading {source}:\n{lines}") from error


def _fault(kind: type[BaseModel], fault: Any) -> str:  # noqa: ANN401  pydantic's ErrorDetails
    place = [str(part) for part in fault["loc"]]
    key = ".".join(place) or "(the whole)"
    if fault["type"] == "extra_forbidden":
        known = _keys_of(kind, place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{key}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{key}: missing"
    return f"{key}: found {fault['input']!r}; {fault['msg'].removeprefix('Value error, ')}"


def _keys_of(section: type[BaseModel], place: Sequence[str]) -> list[str]:
    for part in place:
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        candidates = [annotation, *get_args(annotation)]
        inner = [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if inner:
            section = inner[0]
    return list(section.model_fields)
