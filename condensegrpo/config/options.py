"""Builds plug-ins. Their options are validated from their own signatures.

    class LastK:
        def __init__(self, *, keep_last: Annotated[int, Ge(0)] = 1) -> None: ...

    keep_last: -1   ─▶   setting up the condenser 'last_k': the option keep_last is -1, wanted at least 0

Values are converted as JSON would convert them: 1 is a float, a list is a tuple; "3", true and 3.0 are no integers, and
NaN is no float. A parameter without an annotation, or with one that pydantic cannot read, takes any value.
"""

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from inspect import Parameter
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from condensegrpo.config.section import UNKNOWN, expectation, key_suggestion, sections_in
from condensegrpo.core.credentials import without_credentials
from condensegrpo.core.errors import PluginError
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.plugins import installed, load_plugin
from condensegrpo.core.wording import did_you_mean

NOTHING: Mapping[str, object] = {}
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
OF_OTHERS = {"completions", "solution_str"}  # arguments of reward functions for TRL and verl
OF_REWARDS = {"trajectory", "problem"}
COLUMN = re.compile(r".*_[A-Z]+")  # a parameter of an estimator or a loss that is no option


def build_plugin(kind: str, name: str, options: Mapping[str, object], supplied: Mapping[str, object] = NOTHING) -> Any:  # noqa: ANN401  a plug-in is whatever its entry point names
    """Load a plug-in and call it with its options. A function of a trajectory and its problem is a reward by itself.

    Args:
        kind: a member of ``core.plugin_kinds.KINDS``.
        name: of an installed plug-in, or ``path/to/file.py:Name``.
        options: from the configuration.
        supplied: arguments that the assembly offers, passed where the signature has a parameter of the name and the
            options do not set it.
    """
    factory, arguments = _factory_and_arguments(kind, name, options, supplied)
    if _is_reward(kind, factory):
        return partial(factory, **arguments) if arguments else factory
    with _setting_up(kind, name, options):
        return factory(**arguments)


def check_plugin(
    kind: str, name: str, options: Mapping[str, object], supplied: Mapping[str, object] = NOTHING
) -> dict[str, object]:
    """The validated arguments that ``build_plugin`` would pass, checked without calling the plug-in.

    A plug-in may have a static ``check_options``, which raises ValueError for a combination that it does not support:
    building it may take a model.
    """
    factory, arguments = _factory_and_arguments(kind, name, options, supplied)
    if check := getattr(factory, "check_options", None):
        with _setting_up(kind, name, options):
            check(**arguments)
    return arguments


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
    parameters = {name: each for name, each in _parameters(function).items() if name in names}
    return _checked(parameters, where + at_definition(function), options)


def installed_options(kind: str) -> dict[str, dict[str, Parameter] | None]:
    """The options of the installed plug-ins of a kind, by name; None for one whose extra is not installed.

    They are all parameters of a class, and those of a function that have a name or a default.
    """
    found = dict[str, dict[str, Parameter] | None]()
    for point in installed(kind):
        try:
            plugin = load_plugin(kind, point.name)
        except PluginError:
            found[point.name] = None
            continue
        found[point.name] = {
            name: each
            for name, each in _parameters(getattr(plugin, "function", plugin)).items()
            if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            and not COLUMN.fullmatch(name)
            and (isinstance(plugin, type) or each.kind is each.KEYWORD_ONLY or each.default is not each.empty)
        }
    return found


def _is_reward(kind: str, factory: object) -> bool:
    return kind == "rewards" and inspect.isfunction(factory) and _parameters(factory).keys() >= OF_REWARDS


def _setting_up(kind: str, name: str, options: Mapping[str, object]) -> AbstractContextManager[None]:
    given = f" with {without_credentials(dict(options))}" if options else ""
    return plugin_code(f"{_where(kind, name)}{given}", PluginError)


def _where(kind: str, name: str) -> str:
    """How the errors of a plug-in begin: ``setting up the tool format 'mine.py:Mine'``."""
    return f"setting up the {kind.removesuffix('s').replace('_', ' ')} {name!r}"


def _parameters(factory: Callable[..., object]) -> dict[str, Parameter]:
    try:
        return dict(inspect.signature(factory, eval_str=True).parameters)
    except Exception:  # an annotation names what exists for type checkers only: it stays a text, and takes anything
        return dict(inspect.signature(factory).parameters)


def _factory_and_arguments(
    kind: str, name: str, options: Mapping[str, object], supplied: Mapping[str, object]
) -> tuple[Callable[..., object], dict[str, object]]:
    """The class or function of a name, and its validated arguments: options, and supplied ones of its signature."""
    factory, where = load_plugin(kind, name), _where(kind, name)
    if not callable(factory):
        raise PluginError(f"{where}: found {factory!r:.80}, wanted a class or function.")
    where += at_definition(factory)
    parameters, is_reward = _parameters(factory), _is_reward(kind, factory)
    if is_reward:
        parameters = {each: parameters[each] for each in parameters if each not in OF_REWARDS}
    missing = {option for option, each in parameters.items() if each.default is each.empty and option not in options}
    if kind == "rewards" and not isinstance(factory, type) and OF_OTHERS & missing:
        raise PluginError(
            f"{where}: it is a function of ({', '.join(parameters)}). A reward is one of (trajectory, problem)."
        )
    makes = inspect.isfunction(factory) and not is_reward
    hint = " A function is called once, with its options, and returns the plug-in." if makes else ""
    if makes and kind == "rewards":
        hint += " A function of (trajectory, problem), by these names, is a reward by itself."
    return factory, _checked(parameters, where, options, supplied=supplied, hint=hint)


def _checked(
    parameters: Mapping[str, Parameter],
    where: str,
    options: Mapping[str, object],
    *,
    supplied: Mapping[str, object] = NOTHING,
    hint: str = "",
) -> dict[str, object]:
    """Options, and what is supplied for parameters that they do not set, each validated by its parameter's annotation.

    Args:
        hint: ends the message where one is missing.
    """
    named = {
        name: each for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    offered = {name: value for name, value in supplied.items() if name in named}
    visible = {name: each for name, each in named.items() if name not in offered}
    for option in options:
        if option not in named and not open_ended:
            known = (
                name if each.default is each.empty else f"{name}={each.default!r}" for name, each in visible.items()
            )
            raise PluginError(
                f"{where}: it has no option {option!r}. {did_you_mean(option, visible)}"
                f"Its options are: {', '.join(known) or 'none'}."
            )
    for name, each in visible.items():
        if each.default is each.empty and name not in options:
            raise PluginError(f"{where}: the option {name} is missing. Its options are: {', '.join(visible)}.{hint}")
    return {
        name: _validated(value, named[name].annotation, f"{where}: the option {name}") if name in named else value
        for name, value in {**offered, **options}.items()
    }


def _validated(value: object, annotation: Any, where: str) -> object:  # noqa: ANN401  an annotation is any object
    if annotation is Parameter.empty or isinstance(annotation, str):  # one that nothing can read takes any value
        return value
    try:  # a list of it: pydantic takes no configuration for a dataclass itself, but for what contains one
        adapter = TypeAdapter[list[object]](list[annotation], config=STRICT)
        return adapter.validate_python([value], strict=True)[0]
    except ValidationError as error:
        fault = error
    except (TypeError, PydanticUserError, SchemaError):  # a protocol that is not checked at run time, for one
        return value
    try:
        return adapter.validate_json(json.dumps([value]), strict=True)[0]  # a list for a tuple, a text for a path
    except ValidationError as error:
        fault = error
    except (TypeError, ValueError):
        pass  # not a value of JSON
    raise PluginError(f"{where}{_fault(fault, annotation)}") from fault


def _fault(error: ValidationError, annotation: object) -> str:
    """What was found and what was wanted; of a union, what each member wanted."""
    faults = error.errors(include_url=False)
    first = faults[0]
    _, *place = first["loc"]  # without that in the list of the adapter
    if first["type"] in UNKNOWN:
        within = "".join(f"[{part!r}]" for part in place[:-1])
        return f"{within} has no key {place[-1]!r}. {key_suggestion([*sections_in(annotation)], place)}"
    path = "".join(f"[{part!r}]" for part in place if len(faults) == 1)
    expected = dict.fromkeys(expectation(fault["msg"]) for fault in faults)
    found = without_credentials(first["input"], str(place[-1]) if place else "")
    return f"{path} is {found!r:.200}, wanted {' or '.join(expected)}."
