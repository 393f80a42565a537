"""The task ``bfcl``: multi-turn episodes of the Berkeley Function Calling Leaderboard (BFCL v4, Apache-2.0).

    the user's message ─▶ calls ─▶ results ─▶ more calls … ─▶ a reply without a call ─▶ the user's next message …

The functions work on simulators: a file system, a trading account, a car. In others of the same state the episode calls
the ground truth. Each time a reply has no call, the benchmark's own checkers compare the two: the states must be equal,
and the results of the policy's calls must contain those of the ground truth. The outcome is 1 if all checks passed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Lt

from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.episodes.toolformats import parsed_arguments, quoted
from condensegrpo.integrations.bfcl_simulators import Simulators, json_schema
from condensegrpo.storage.bfcl import PACKAGE, bfcl_folder, bfcl_rows
from condensegrpo.tasks.answer_environment import pinned_messages
from condensegrpo.tasks.splits import SplitTask, is_held_out, split

Category = Literal["base", "miss_func", "miss_param", "long_context"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
SYSTEM = (
    "Do what the user asks for by calling functions, as many as it takes. When it is done, or cannot be done because a "
    "function or a value is missing, reply without a call: the user goes on from there."
)
Documents = Mapping[str, Sequence[EnvironmentTool]]  # the functions of each class of simulators


@dataclass(kw_only=True, eq=False)
class Bfcl(SplitTask):
    """The task ``bfcl``: 200 scenarios in each of four categories. No scenario is in both splits.

    Raises:
        DataMissing: the package is not installed.
        DataError: its data is damaged, or all scenarios are held out.
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
        self._documents = _documents()

    def environment(self, problem: Problem) -> "BfclEpisode":
        """A fresh episode."""
        return BfclEpisode(problem.data, self._documents, self.system)


class BfclEpisode:
    """One episode: the simulators of the policy, and those of the ground truth."""

    stop_strings: Sequence[str] = ()  # one of ``AnswersCalls``, so that the calls of a reply are made in order

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
    folder = bfcl_folder(file)
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


def _documents() -> Documents:
    files = import_module("bfcl_eval.constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return {name: _functions(file) for name, file in files.items()}


def _functions(file: str) -> tuple[EnvironmentTool, ...]:
    folder = bfcl_folder(f"multi_turn_func_doc/{file}") / "multi_turn_func_doc"
    return tuple(
        EnvironmentTool(name=row["name"], description=row["description"], parameters=json_schema(row["parameters"]))
        for row in bfcl_rows(folder / file, "name", "description", "parameters")
    )
