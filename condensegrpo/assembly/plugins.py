"""Builds plug-ins. Their options are validated from their own signatures.

    class LastK:
        def __init__(self, *, keep_last: Annotated[int, Ge(0)] = 1) -> None: ...

    keep_last: -1   ─▶   setting up the condenser 'last_k': the option keep_last is -1, wanted at least 0

Values are converted as JSON would convert them: 1 is a float, a list is a tuple; "3", true and 3.0 are no integers, and
NaN is no float. A parameter without an annotation, or with one that pydantic cannot read, takes any value.
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Protocol, get_args, get_type_hints, runtime_checkable

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from condensegrpo.core.credentials import without_credentials
from condensegrpo.core.errors import PluginError
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.wording import did_you_mean

NOTHING: Mapping[str, object] = {}
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
SHORTER = {
    "Input should be ": "",
    "Value error, ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid array": "a list",
    "a valid": "a",
    "a integer": "an integer",
}
OF_OTHERS = {"completions", "solution_str"}  # arguments of reward functions for TRL and verl
OF_REWARDS = {"trajectory", "problem"}
ANYTHING = TypeAdapter[list[object]](list[object])


@runtime_checkable
class ChecksOptions(Protocol):
    """A plug-in that can refuse a combination of options before it is built, which may take a model."""

    def check_options(self, **options: object) -> None:
        """Raise ValueError for a combination that it does not support."""


def build_plugin(kind: str, name: str, options: Mapping[str, object], supplied: Mapping[str, object] = NOTHING) -> Any:  # noqa: ANN401  a plug-in is whatever its entry point names
    """Load a plug-in and call it with its options. A function of a trajectory and its problem is a reward by itself.

    Args:
        kind: a member of ``core.plugins.KINDS``.
        name: of an installed plug-in, or ``path/to/file.py:Name``.
        options: from the configuration.
        supplied: arguments that the assembly offers, passed where the signature has a parameter of the name and the
            options do not set it.
    """
    factory, where = load_plugin(kind, name), _where(kind, name)
    arguments = _arguments(kind, factory, where, options, supplied)
    if _is_reward(kind, factory):
        return partial(factory, **arguments) if arguments else factory
    return _called(factory, where, options, arguments)


def check_plugin(
    kind: str, name: str, options: Mapping[str, object], supplied: Mapping[str, object] = NOTHING
) -> dict[str, object]:
    """The validated arguments that ``build_plugin`` would pass, checked without calling the plug-in.

    The ``check_options`` of a plug-in that has one is called with the arguments.
    """
    factory, where = load_plugin(kind, name), _where(kind, name)
    given = _arguments(kind, factory, where, options, supplied)
    if isinstance(factory, ChecksOptions):
        _called(factory.check_options, where, options, given)
    return given


def validated(
    function: Callable[..., object], where: str, options: Mapping[str, object], *, names: Collection[str]
) -> dict[str, object]:
    """The validated options of a function that gets other arguments from elsewhere.

    Args:
        function: whose signature says which values its options take.
        where: begins the message of an error.
        options: from the configuration.
        names: of the parameters that are options.
    """
    parameters = {name: each for name, each in _signature(function).parameters.items() if name in names}
    return _checked(parameters, where + at_definition(function), options)


def _is_reward(kind: str, factory: object) -> bool:
    return kind == "rewards" and inspect.isfunction(factory) and _signature(factory).parameters.keys() >= OF_REWARDS


def _where(kind: str, name: str) -> str:
    return f"setting up the {kind.removesuffix('s')} {name!r}"


def _called(
    factory: Callable[..., object], where: str, options: Mapping[str, object], arguments: Mapping[str, object]
) -> object:
    given = f" with {without_credentials(dict(options))}" if options else ""
    with plugin_code(f"{where}{given}", PluginError):
        return factory(**arguments)


def _arguments(
    kind: str,
    factory: Callable[..., object],
    where: str,
    options: Mapping[str, object],
    supplied: Mapping[str, object],
) -> dict[str, object]:
    """The validated arguments of a call: the options, and what is supplied where the signature has it."""
    if not callable(factory):
        raise PluginError(f"{where}: found {factory!r:.80}, wanted a class or function.")
    parameters = dict(_signature(factory).parameters)
    if _is_reward(kind, factory):
        for name in OF_REWARDS:
            del parameters[name]
    given = {name for name, each in parameters.items() if each.default is each.empty and name not in options}
    if kind == "rewards" and not isinstance(factory, type) and OF_OTHERS & given:
        raise PluginError(
            f"{where}{at_definition(factory)}: it is a function of ({', '.join(parameters)}). A reward is one of "
            f"(trajectory, problem)."
        )
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {name: each for name, each in parameters.items() if each.kind not in variadic}
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    offered = {name: value for name, value in supplied.items() if name in named}
    makes = inspect.isfunction(factory) and not _is_reward(kind, factory)
    hint = " A function is called once, with its options, and returns the plug-in." if makes else ""
    where += at_definition(factory)
    return _checked(named, where, options, offered=offered, open_ended=open_ended, hint=hint)


def _checked(
    parameters: Mapping[str, inspect.Parameter],
    where: str,
    options: Mapping[str, object],
    *,
    offered: Mapping[str, object] = NOTHING,
    open_ended: bool = False,
    hint: str = "",
) -> dict[str, object]:
    """Options, and what is offered for parameters that they do not set, each validated by its parameter's annotation.

    Args:
        open_ended: whether options without a parameter are passed on as they are.
        hint: ends the message where one is missing.
    """
    visible = [name for name in parameters if name not in offered]
    defaults = {
        name: "" if (each := parameters[name]).default is each.empty else f"={each.default!r}" for name in visible
    }
    for option in options:
        if option not in parameters and not open_ended:
            raise PluginError(
                f"{where}: it has no option {option!r}. {did_you_mean(option, visible)}"
                f"Its options are: {', '.join(name + default for name, default in defaults.items()) or 'none'}."
            )
    given = {**offered, **options}
    missing = [name for name, each in parameters.items() if each.default is each.empty and name not in given]
    if missing:
        raise PluginError(f"{where}: the option {missing[0]} is missing. Its options are: {', '.join(visible)}.{hint}")
    return {
        name: _validated(value, parameters[name].annotation, f"{where}: the option {name}")
        if name in parameters
        else value
        for name, value in given.items()
    }


def _signature(factory: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(factory, eval_str=True)
    except Exception:  # an annotation names what exists for type checkers only: it stays a text, and takes anything
        return inspect.signature(factory)


def _validated(value: object, annotation: object, where: str) -> object:
    adapter = _adapter(annotation)
    try:
        return adapter.validate_python([value], strict=True)[0]
    except ValidationError as error:
        fault = error
    except (TypeError, PydanticUserError):  # a protocol that is not checked at run time, or a name in quotes
        return value
    try:
        return adapter.validate_json(json.dumps([value]), strict=True)[0]  # a list for a tuple, a text for a path
    except ValidationError as error:
        fault = error
    except (TypeError, ValueError):
        pass  # not a value of JSON
    raise PluginError(f"{where}{_fault(fault, annotation)}.") from fault


def _adapter(annotation: Any) -> TypeAdapter[list[object]]:  # noqa: ANN401  an annotation is any object
    """Of a list with the value: pydantic takes no configuration for a dataclass itself, but for what contains one."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return ANYTHING
    try:
        return TypeAdapter(list[annotation], config=STRICT)
    except (PydanticUserError, SchemaError):
        return ANYTHING


def _fault(error: ValidationError, annotation: object) -> str:
    """What was found and what was wanted; of a union, what each member wanted."""
    faults = error.errors(include_url=False)
    first = faults[0]
    _, *place = first["loc"]  # without that in the list of the adapter
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        *outer, key = place
        within = "".join(f"[{part!r}]" for part in outer)
        known = _keys_at(outer, annotation)
        keys = f". {did_you_mean(str(key), known)}Its keys are: {', '.join(known)}" if known else ""
        return f"{within} has no key {key!r}{keys}"
    path = "".join(f"[{part!r}]" for part in place if len(faults) == 1)
    expected = dict.fromkeys(_expectation(fault["msg"]) for fault in faults)
    found = without_credentials(first["input"], str(place[-1]) if place else "")
    return f"{path} is {found!r:.200}, wanted {' or '.join(expected)}"


def _keys_at(path: Sequence[object], annotation: object) -> list[str]:
    """The keys of the dataclasses at a path within an annotation; none: it has no dataclass there."""
    kinds = _dataclasses(annotation)
    for part in path:
        within = [get_type_hints(kind)[part] for kind in kinds if part in get_type_hints(kind)]
        if within:  # else an index or a key of a mapping
            kinds = [kind for each in within for kind in _dataclasses(each)]
    return [field.name for kind in kinds for field in fields(kind)]


def _dataclasses(annotation: object) -> list[type]:
    """The dataclasses that an annotation consists of, such as that of ``list[Stage] | None``."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return [annotation]
    return [kind for each in get_args(annotation) for kind in _dataclasses(each)]


def _expectation(message: str) -> str:
    """What pydantic's message asks for, shorter: "Input should be greater than or equal to 0" is "at least 0"."""
    for long, short in SHORTER.items():
        message = message.replace(long, short)
    return message
