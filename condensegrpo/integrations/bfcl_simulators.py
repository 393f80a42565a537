"""The simulators of BFCL's multi-turn episodes, called by function name with arguments from JSON.

    call("tail", {"file_name": "log.txt", "lines": 1})    ─▶  {"last_lines": "Final line."}
    call("tail", {"file_name": "log.txt", "lines": "1"})  ─▶  Error: tail: lines is '1', wanted a value of type integer

Only documented functions are called, with arguments that fit their schema. No text is evaluated as code.
"""

import ast
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from decimal import localcontext
from importlib import import_module
from typing import Any

from condensegrpo.core.protocols.tool import EnvironmentTool

KINDS = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}
LARGEST = 10**18  # magnitude of a number
LARGEST_OF = {"exponent": 1000, "precision": 1000, "decimal_places": 1000}  # whose cost grows with their value


class Simulators:
    """The simulators of one episode."""

    def __init__(self, entry: Mapping[str, Any], documents: Mapping[str, Sequence[EnvironmentTool]]) -> None:
        """Make them in the state that an episode begins with.

        Args:
            entry: the row of the benchmark.
            documents: the functions of each class.
        """
        backend = import_module("bfcl_eval.constants.executable_backend_config")
        self.instances: dict[str, Any] = {}  # by class
        self._functions: dict[str, tuple[Callable[..., object], Mapping[str, Any]]] = {}  # with the schema
        for name in entry["involved_classes"]:
            instance = getattr(import_module(backend.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backend.STATELESS_CLASSES:
                state = deepcopy(entry["initial_config"].get(name, {}))
                instance._load_scenario(state, long_context="long_context" in entry["id"])
            self.instances[name] = instance
            for tool in documents[name]:
                self._functions[tool.name] = getattr(instance, tool.name), tool.parameters

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """What a documented function returns, as the benchmark writes it, or ``Error: …``."""
        function, schema = self._functions[name]
        mpmath = import_module("mpmath")
        try:
            check_value(arguments, schema, "the call")
            bound = inspect.signature(function).bind(**arguments)
            bound.apply_defaults()
            given = deepcopy(bound.arguments)  # some keep and change a default, which all episodes would share
            with localcontext(), mpmath.workdps(mpmath.mp.dps):  # some set the precision of the process
                return _text(function(**given))
        except Exception as error:  # the boundary to code of others; what it raises is an observation
            return f"Error: {name}: {error}"

    def read(self, source: str) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a call as the ground truth writes it: ``sort('log.txt')``, ``ls(a=True)``.

        Raises:
            ValueError: it is no call of a documented function with constants.
        """
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in self._functions:
            raise ValueError(f"reading the ground truth {source!r}: it is no call of a documented function")
        function, _ = self._functions[call.func.id]
        nodes = dict(zip(inspect.signature(function).parameters, call.args, strict=False))
        nodes |= {str(keyword.arg): keyword.value for keyword in call.keywords}
        return call.func.id, {name: ast.literal_eval(node) for name, node in nodes.items()}


def check_value(value: object, schema: Mapping[str, Any], name: str) -> None:
    """Check a value from JSON against a schema.

    Raises:
        ValueError: it does not fit, or is a number beyond ``LARGEST`` or ``LARGEST_OF``.
    """
    kind = schema["type"]
    if not isinstance(value, KINDS[kind]) or isinstance(value, bool) != (kind == "boolean"):
        raise ValueError(f"{name} is {value!r:.80}, wanted a value of type {kind}")
    if isinstance(value, int | float) and not abs(value) <= (most := LARGEST_OF.get(name, LARGEST)):
        raise ValueError(f"{name} is {value!r:.80}, wanted at most {most}")
    if isinstance(value, list):
        for item in value:
            check_value(item, schema["items"], name)
    if isinstance(value, dict):
        known = schema["properties"]
        if missing := [key for key in schema.get("required", ()) if key not in value]:
            raise ValueError(f"{name} lacks the argument {missing[0]!r}")
        if unknown := [key for key in value if key not in known]:
            raise ValueError(f"{name} has no argument {unknown[0]!r:.80}")
        for key, item in value.items():
            check_value(item, known[key], key)


def json_schema(document: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter of the benchmark's documents as JSON schema: ``dict`` is ``object``, ``float`` is ``number``."""
    kind = document["type"]
    schema = {**document, "type": {"dict": "object", "float": "number"}.get(kind, kind)}
    if "items" in document:
        schema["items"] = json_schema(document["items"])
    if "properties" in document:
        schema["properties"] = {name: json_schema(inner) for name, inner in document["properties"].items()}
    return schema


def _text(returned: object) -> str:
    if not isinstance(returned, dict):
        return str(returned)
    try:
        return json.dumps(returned)
    except TypeError:  # an object among its values
        return str(returned)
