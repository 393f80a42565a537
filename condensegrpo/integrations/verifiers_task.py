"""The task ``verifiers``: a taskset of the library verifiers (``verifiers.v1``), with its tools and its rewards.

The taskset runs in a process of its own (``verifiers_server``), of this environment or another one that has verifiers.
At the end of an episode its reward functions get the whole conversation, condensed or not; the weighted sum of what
they return is the outcome, which the reward ``environment`` pays.
"""

import itertools
import json
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import EnvironmentLost, PluginError
from condensegrpo.core.messages import History, Message, bare, without_meter
from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.episodes.toolformats import JSON_FORMATS
from condensegrpo.integrations.mcp import McpServer, OpenServer, ServerPool, offered_tool, text_of
from condensegrpo.integrations.mcp_client import Json, Refused
from condensegrpo.integrations.reset_rows import first_messages
from condensegrpo.integrations.servers import check_servers
from condensegrpo.tasks.answers import SHARE, SplitTask, read_answer, row_identity, split

PROGRAM = Path(__file__).with_name("verifiers_server.py")
_EPISODES = itertools.count()


@dataclass(kw_only=True, eq=False)
class Verifiers(SplitTask):
    """A taskset of the library verifiers, with its tools and rewards.

    Without ``eval_config`` a share of the tasks is held out by their hash.
    """

    taskset: str  # id of an installed package, as vf-eval takes it; package.module:Class or path/to/file.py:Class
    config: Mapping[str, Any] | None = None  # keys of its config
    eval_config: Mapping[str, Any] | None = None  # keys that differ in evaluation, such as {split: test}
    eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE  # of the tasks, held out if there is no ``eval_config``
    max_examples: Annotated[int, Ge(1)] | None = None  # tasks to load, from the first
    python: str | None = None  # interpreter of an environment with verifiers; None: this one
    variables: tuple[str, ...] = ()  # names of environment variables that the taskset gets besides PATH and the like
    start_seconds: Annotated[float, Gt(0)] = 60.0  # in which its process has started
    tool_format: str = "native"

    def __post_init__(self) -> None:
        if self.python is None:
            instead = "name the interpreter of another environment that has it in task.options.python"
            check_installed("verifiers", extra="verifiers", instead=instead)
        configs = {"config": self.config or {}, "eval_config": self.eval_config or {}}
        settings = json.dumps({"taskset": self.taskset, **configs, "max_examples": self.max_examples})
        command = (self.python or sys.executable, "-P", str(PROGRAM), settings)
        servers = {f"of the taskset {self.taskset}": McpServer(command=command, environment=self.variables)}
        check_servers(servers)
        self._pool = ServerPool(servers, self.start_seconds)
        self._end = weakref.finalize(self, self._pool.close)  # at the latest when the process exits
        with BackgroundLoop("taskset") as loop:
            try:
                train = loop.run(self._read("train"))
                held_out = None if self.eval_config is None else loop.run(self._read("eval"))
            except (EnvironmentLost, Refused) as error:
                self._end()
                raise PluginError(redacted(f"setting up the task verifiers with {self.taskset}: {error}")) from error
        self._splits = split(
            train,
            held_out,
            source=self.taskset,
            share=self.eval_share,
            identity=lambda problem: row_identity({**problem.data["task"], "idx": None}),
        )

    def environment(self, problem: Problem) -> "TasksetEpisode":
        """A fresh episode."""
        return TasksetEpisode(self._pool, problem, self.tool_format)

    async def _read(self, split: Split) -> list[Problem]:
        (server,), rows, more = (await self._pool.open(self._pool.shared)).values(), list[Json](), True
        while more:
            page = await self._pool.call(server, "problems", {"split": split, "first": len(rows)})
            rows, more = [*rows, *map(json.loads, page["problems"])], page["more"]
        return [
            Problem(
                id=f"{split}-{index}",
                question=_prompt(row)[-1].text,
                answer=None if row.get("answer") is None else str(row["answer"]),
                data={"split": split, "index": index, "task": row},
            )
            for index, row in enumerate(rows)
        ]


class TasksetEpisode(Environment):
    """One task of a taskset."""

    def __init__(self, pool: ServerPool, problem: Problem, tool_format: str) -> None:
        """Nothing is begun before ``start``."""
        self._pool, self._problem, self._format = pool, problem, JSON_FORMATS.get(tool_format)
        self._number = next(_EPISODES)
        self._server: OpenServer | None = None
        self._tools: Sequence[Json] = ()
        self._history = History(pinned=())

    async def start(self) -> tuple[Message, ...]:
        """The messages of the task, once its tools are set up."""
        (self._server,) = (await self._pool.open(self._pool.shared)).values()
        begun = await self._request("start", split=self._problem.data["split"], index=self._problem.data["index"])
        self._tools = begun["tools"]
        return _prompt(self._problem.data["task"])

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tools of the taskset."""
        return [offered_tool(tool, partial(self._use, tool["name"])) for tool in self._tools]

    def read_history(self, history: History) -> None:
        """Keep what was said so far, for the rewards."""
        self._history = history

    async def step(self, reply: Message) -> Step:
        """The end: the answer, and what the rewards of the taskset give."""
        said = [message for unit in self._history.units for message in self._said(unit.turn, unit.reply, unit.results)]
        said += self._said(len(said), reply, ())
        try:
            finished = await self._request("finish", messages=said)
        except Refused as error:
            raise RuntimeError(redacted(f"the rewards of the taskset: {error}")) from error
        return Step(done=True, answer=read_answer(reply.text, "reply"), outcome=finished["reward"])

    async def close(self) -> None:
        """End the tools of the episode, if its process is still there."""
        if self._server is not None and not self._server.connection.lost:
            await self._request("end")

    async def _use(self, tool: str, arguments: Mapping[str, Any], history: History) -> str:
        try:
            return text_of(await self._request("call", tool=tool, arguments=dict(arguments)))
        except Refused as error:
            return f"Error: {error}"

    async def _request(self, method: str, **arguments: object) -> Json:
        assert self._server is not None
        return await self._pool.call(self._server, method, {"episode": self._number, **arguments})

    def _said(self, turn: int, reply: Message, results: Sequence[Message]) -> list[Json]:
        """A reply and its results as verifiers has them: thoughts and calls beside the text, ids of calls unique."""
        thought, _, text = reply.text.rpartition("</think>")
        if reply.tool_calls and self._format is not None:
            text = text.partition(self._format.opening)[0]
        ids = {call.id: f"{call.id}_{turn}" for call in reply.tool_calls}
        calls = [{"id": ids[call.id], "name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
        said: dict[str, object] = {"role": "assistant", "content": text.strip() or None, "tool_calls": calls or None}
        said["reasoning_content"] = thought.removeprefix("<think>").strip() or None
        return [said, *(_observed(result, ids) for result in results)]


def _observed(result: Message, ids: Mapping[str, str]) -> Json:
    """A result of a call, or another observation."""
    called = ids.get(result.tool_call_id or "")
    if called is None:
        return {"role": "user", "content": without_meter(result.text)}
    return {"role": "tool", "tool_call_id": called, "name": result.name, "content": bare(result)}


def _prompt(task: Json) -> tuple[Message, ...]:
    system = task.get("system_prompt")
    prompt = first_messages(task["prompt"], "prompt")
    return (Message(role="system", content=system), *prompt) if system else prompt
