"""The task ``bfcl``: multi-turn episodes of the Berkeley Function Calling Leaderboard (BFCL v4, Apache-2.0).

    the user's message ─▶ calls ─▶ results ─▶ more calls … ─▶ a reply without a call ─▶ the user's next message …

The functions work on simulators: a file system, a trading account, a car. In others of the same state the episode calls
the ground truth. Each time a reply has no call, the benchmark's own checkers compare the two: the states must be equal,
and the results of the policy's calls must contain those of the ground truth. The outcome is 1 if all checks passed.
"""

import ast
import inspect
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from decimal import localcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Lt

from condensegrpo.core.errors import DataError, DataMissing
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.episodes.toolformats import parsed_arguments, quoted
from condensegrpo.tasks.answers import SplitTask, is_held_out, pinned_messages, split

PACKAGE = "bfcl-eval==2026.3.23"
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
        """Name and arguments of a call as the ground truth writes it: ``sort('log.txt')``, ``ls(a=True)``."""
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in self._functions:
            raise ValueError(f"reading the ground truth {source!r}: it is no call of a documented function")
        function, _ = self._functions[call.func.id]
        nodes = dict(zip(inspect.signature(function).parameters, call.args, strict=False))
        nodes |= {str(keyword.arg): keyword.value for keyword in call.keywords}
        return call.func.id, {name: ast.literal_eval(node) for name, node in nodes.items()}


def check_value(value: object, schema: Mapping[str, Any], name: str) -> None:
    """Check a value from JSON against a schema."""
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


Category = Literal["base", "miss_func", "miss_param", "long_context"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
SYSTEM = (
    "Do what the user asks for by calling functions, as many as it takes. When it is done, or cannot be done because a "
    "function or a value is missing, reply without a call: the user goes on from there."
)
Documents = Mapping[str, Sequence[EnvironmentTool]]  # the functions of each class of simulators


@dataclass(kw_only=True, eq=False)
class Bfcl(SplitTask):
    """Multi-turn function calls of the Berkeley leaderboard (BFCL v4): 200 scenarios in each of four categories.

    No scenario is in both splits.
    """

    categories: tuple[Category, ...] = CATEGORIES
    eval_share: Annotated[float, Gt(0), Lt(1)] = 0.3  # of the scenarios, held out by the hash of their number
    system: str = SYSTEM  # the system message; empty for none

    def __post_init__(self) -> None:
        problems = [problem for category in self.categories for problem in _problems(category)]
        held_out = {each.id for each in problems if is_held_out(each.data["scenario"], share=self.eval_share)}
        self._splits = split(
            [problem for problem in problems if problem.id not in held_out],
            [problem for problem in problems if problem.id in held_out],
            source=PACKAGE,
        )
        backend = import_module("bfcl_eval.constants.executable_backend_config")
        files: Mapping[str, str] = backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING
        self._documents = {name: _functions(file) for name, file in files.items()}

    def environment(self, problem: Problem) -> "BfclEpisode":
        """A fresh episode."""
        return BfclEpisode(problem.data, self._documents, self.system)


class BfclEpisode(Environment):
    """One episode: the simulators of the policy, and those of the ground truth."""

    stop_strings: Sequence[str] = ()  # it answers calls itself, so that those of a reply are made in order

    def __init__(self, entry: Mapping[str, Any], documents: Documents, system: str) -> None:
        """No simulator is made before ``start``."""
        self._entry, self._documents, self._system = entry, documents, system
        self._withheld: Mapping[str, Sequence[str]] = entry.get("missed_function", {})  # until this message
        self._message = 0  # of the user, counted from 0
        self._called = False  # since that message
        self._results: list[str] = []  # of all calls
        self._passed = True

    async def start(self) -> tuple[Message, ...]:
        """The system message and the user's first message."""
        self._policy = Simulators(self._entry, self._documents)
        self._truth = Simulators(self._entry, self._documents)
        tools = {tool.name: tool for name in self._entry["involved_classes"] for tool in self._documents[name]}
        withheld = {name for names in self._withheld.values() for name in names}
        self._later = {name: tools.pop(name) for name in withheld}
        self._tools = tools
        return pinned_messages(system=self._system, question=self._say())

    def tools(self) -> Sequence[EnvironmentTool]:
        """The functions of the scenario that are not withheld."""
        return tuple(self._tools.values())

    async def step(self, reply: Message) -> Step:
        """Results of calls; without a call the user's next message, or after the last one the end."""
        if reply.tool_calls:
            self._called = True
            return Step(observations=tuple(self._result(call) for call in reply.tool_calls))
        passed = self._check()
        rewards = {} if passed is None else {"user_turn": float(passed)}
        self._passed &= passed is not False
        self._message, self._called = self._message + 1, False
        if self._message == len(self._entry["question"]):
            return Step(done=True, outcome=float(self._passed), turn_rewards=rewards)
        return Step(observations=(Message(role="user", content=self._say()),), turn_rewards=rewards, new_query=True)

    def _say(self) -> str:
        """The user's message. Functions that are added stand in it, as the benchmark does without a tool template."""
        if added := self._withheld.get(str(self._message)):
            self._tools |= {name: self._later[name] for name in added}
            schemas = "\n".join(json.dumps(self._later[name].schema) for name in added)
            prompts = import_module("bfcl_eval.constants.default_prompts")
            return f"{schemas}\n{prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC}"
        return "\n".join(message["content"] for message in self._entry["question"][self._message])

    def _result(self, call: ToolCall) -> Message:
        if call.name not in self._tools:
            text = f"Error: there is no function {quoted(call.name)}. The functions are: {', '.join(self._tools)}"
        else:
            try:
                text = self._policy.call(call.name, parsed_arguments(call.arguments))
            except ValueError as error:
                text = f"Error: {call.name}: {error}"
        self._results.append(text)
        return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)

    def _check(self) -> bool | None:
        """Whether the answer to the user's message passes; None where the ground truth calls nothing."""
        expected = [
            self._truth.call(*self._truth.read(source)) for source in self._entry["ground_truth"][self._message]
        ]
        if not expected:
            return None
        checker = import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
        return (
            self._called
            and bool(checker.state_checker(self._policy.instances, self._truth.instances)["valid"])
            and bool(checker.response_checker(self._results, expected, self._message)["valid"])
        )


def _problems(category: Category) -> list[Problem]:
    """The episodes of a category; ``data`` is the row of the benchmark with ground truth and scenario."""
    file = f"BFCL_v4_multi_turn_{category}.json"
    folder = bfcl_data()
    truths = {row["id"]: row["ground_truth"] for row in bfcl_rows(folder / "possible_answer" / file, "ground_truth")}
    return [
        Problem(
            id=row["id"],
            question=row["question"][0][0]["content"],
            answer="\n".join("; ".join(calls) for calls in truths[row["id"]]),  # a line for each message of the user
            data={**row, "ground_truth": truths[row["id"]], "scenario": row["id"].rpartition("_")[2]},
        )
        for row in bfcl_rows(folder / file, "id", "question", "involved_classes")
    ]


def _functions(file: str) -> tuple[EnvironmentTool, ...]:
    return tuple(
        EnvironmentTool(name=row["name"], description=row["description"], parameters=json_schema(row["parameters"]))
        for row in bfcl_rows(bfcl_data() / "multi_turn_func_doc" / file, "name", "description", "parameters")
    )


def bfcl_data() -> Path:
    """The folder of the benchmark's data in the installed package."""
    spec = find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise DataMissing(
            f"reading BFCL's data: the package bfcl_eval is not installed. Run `pip install --no-deps {PACKAGE}`"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def bfcl_rows(file: Path | zipfile.Path, *columns: str) -> list[dict[str, Any]]:
    """The rows of a file, each with these columns."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"reading BFCL's data in {file}: {error}. Fetch {PACKAGE} again") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not all(row.get(column) for column in columns):
            raise DataError(f"reading {file}: row {number} lacks one of {', '.join(columns)}. Fetch {PACKAGE} again")
    return rows
