"""The program of the task ``verifiers``: a taskset of verifiers with its tools and rewards, over stdin and stdout.

It runs in an environment that has verifiers 0.4, and imports nothing of this package. It answers as a server of the
Model Context Protocol, so that ``mcp.ServerPool`` starts, shares and ends it; its tools are the methods of ``Taskset``:

    problems {split, first}              a page of tasks
    start    {episode, split, index}     begin an episode; the tools of the taskset
    call     {episode, tool, arguments}  what a tool returns
    finish   {episode, messages}         end an episode; its reward
    end      {episode}                   end an episode without one

All of them run in the main thread: rewards may compare with math-verify, which times out by signals and elsewhere
counts every answer as wrong.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from mcp import Client
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult
from pydantic import TypeAdapter
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import taskset_class

PAGE = 2**20  # characters, after which no further task is put into an answer
LINE = 2**30  # bytes of a request
BOX = ("image", "skills", "artifacts", "agent_user")  # fields of a task that only a sandbox can have
VERSION = "2025-06-18"
_trace: ContextVar[vf.Trace] = ContextVar("trace")  # of the episode whose tool is called


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool of a toolset."""

    description: Mapping[str, Any]  # as MCP lists it, under the name that the policy reads
    call: Callable[[dict[str, Any]], Awaitable[CallToolResult]]


@dataclass(kw_only=True)
class Episode:
    """A task that is being solved."""

    task: vf.Task
    trace: vf.Trace
    tools: dict[str, Tool] = field(default_factory=dict)
    toolsets: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


class Taskset:
    """The tasks and the episodes that are under way."""

    def __init__(
        self, *, taskset: str, config: Mapping[str, Any], eval_config: Mapping[str, Any], max_examples: int | None
    ) -> None:
        """Nothing is imported before the first request. For the arguments see the task ``verifiers``."""
        self._name, self._limit = taskset, max_examples
        self._configs = {"train": config, "eval": {**config, **eval_config}}
        self._episodes = dict[int, Episode]()
        self._shared = dict[str, asyncio.Task[dict[str, Tool]]]()  # tools that all tasks of a split share
        self._stack = contextlib.AsyncExitStack()

    async def problems(self, split: str, first: int) -> Mapping[str, Any]:
        """The data of some tasks as JSON, from the one with number ``first`` on, and whether there are more."""
        taskset, tasks = self._loaded(split)
        if not first:
            toolsets = all_toolsets(taskset, tasks[0])
            merged(*[await tools_of(toolset) for toolset in toolsets if not toolset.config.url])
        page = list[str]()
        while first + len(page) < len(tasks) and sum(map(len, page)) < PAGE:
            page.append(tasks[first + len(page)].data.model_dump_json(exclude_defaults=True))
        return {"problems": page, "more": first + len(page) < len(tasks)}

    async def start(self, episode: int, split: str, index: int) -> Mapping[str, Any]:
        """Begin an episode."""
        taskset, tasks = self._loaded(split)
        task = tasks[index]
        begun = self._episodes[episode] = Episode(task=task, trace=new_trace(task))
        if overrides(task, "setup"):
            await invoke(task.setup, {"trace": begun.trace})
        shared = self._shared.get(split)
        if shared is None or (shared.done() and shared.exception() is not None):
            toolsets = taskset.toolsets(taskset.config)
            self._shared[split] = asyncio.create_task(open_toolsets(toolsets, None, self._stack))
        of_episode = await open_toolsets(task.toolsets(task.config), task, begun.toolsets)
        begun.tools = merged(await asyncio.shield(self._shared[split]), of_episode)
        begun.trace.tools = [
            vf.Tool(name=name, description=tool.description["description"], parameters=tool.description["inputSchema"])
            for name, tool in begun.tools.items()
        ]
        return {"tools": [tool.description for tool in begun.tools.values()]}

    async def call(self, episode: int, tool: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """What a tool returns, as MCP has it."""
        begun = self._episodes[episode]
        _trace.set(begun.trace)
        result = await begun.tools[tool].call(arguments)
        return dict(result.model_dump(mode="json", by_alias=True, exclude_none=True))

    async def finish(self, episode: int, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """End an episode: the sum of its rewards, each times its weight."""
        ended = self._episodes.pop(episode)
        await ended.toolsets.aclose()
        for message in TypeAdapter(vf.Messages).validate_python(messages):
            add_message(ended.trace, message, sampled=message.role == "assistant")
        ended.trace.stop("agent_completed")
        if overrides(ended.task, "finalize"):
            await invoke(ended.task.finalize, {"trace": ended.trace})
        await ended.task.score(ended.trace)
        return {"reward": ended.trace.reward}

    async def end(self, episode: int) -> Mapping[str, Any]:
        """End an episode that has no reward."""
        if episode in self._episodes:
            await self._episodes.pop(episode).toolsets.aclose()
        return {}

    async def close(self) -> None:
        """End everything."""
        for episode in list(self._episodes):
            await self.end(episode)
        await self._stack.aclose()

    @cache  # noqa: B019  one object, which lives as long as the process
    def _loaded(self, split: str) -> tuple[vf.Taskset, Sequence[vf.Task]]:
        """The taskset as a split has it, and its tasks."""
        module, kind = found(self._name)
        named = {} if ":" in self._name else {"id": self._name}
        config = concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        taskset, limit = kind(config.model_validate({**named, **self._configs[split]})), self._limit
        if limit is None and not taskset.bounded:
            raise ValueError("the taskset has tasks without end: set task.options.max_examples")
        tasks = list(taskset if limit is None else taskset.take(limit))
        if not tasks:
            raise ValueError("the taskset has no task")
        if faults := list(dict.fromkeys(unsupported(module, taskset, tasks))):
            raise ValueError(f"the taskset needs what condensegrpo does not have: {'; '.join(faults)}")
        return taskset, tasks


def found(name: str) -> tuple[ModuleType, type[vf.Taskset]]:
    """The module and the class of a taskset."""
    where, _, attribute = name.rpartition(":")
    if not where:
        return vf.import_taskset(name), taskset_class(name)
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))
        where = Path(where).stem
    module = importlib.import_module(where)
    kind = getattr(module, attribute, None)
    if not isinstance(kind, type) or not issubclass(kind, vf.Taskset):
        raise TypeError(f"{name} is {kind!r:.80}, wanted a class that inherits verifiers.v1.Taskset")
    return module, kind


def unsupported(module: ModuleType, taskset: vf.Taskset, tasks: Sequence[vf.Task]) -> Iterator[str]:
    """What the tasks need that this program does not do."""
    for name in getattr(module, "__all__", ()):
        kind = getattr(module, name)
        if isinstance(kind, type) and issubclass(kind, vf.Env | vf.Harness):
            base = "environment" if issubclass(kind, vf.Env) else "harness"
            yield f"its own {base} {name} (a simulated user, several agents or another program)"
    task = tasks[0]  # all are of one class
    if task.NEEDS_CONTAINER:
        yield "a container (NEEDS_CONTAINER)"
    for hook in (*task.hooks("stop"), *discover_decorated(task, "intercept")):
        yield f"the stop or intercept function {hook.__name__}"
    hooks = [getattr(task, name) for name in ("setup", "finalize") if overrides(task, name)]
    judges = [judge.score for judge in task.plugged_judges()]
    for hook in (*hooks, *task.hooks("reward"), *task.hooks("metric"), *judges):
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            yield f"a sandbox (the parameter runtime of {hook.__qualname__})"
    for toolset in all_toolsets(taskset, task):
        if getattr(toolset.config, "colocated", False) or toolset.config.runtime.type != "subprocess":
            yield f"a sandbox (of the toolset {type(toolset).__name__})"
    yield from next(filter(None, map(unsupported_data, tasks)), ())


def unsupported_data(task: vf.Task) -> Sequence[str]:
    """What the data of one task need that this program does not do."""
    data = task.data
    faults = [f"the {name} of task {data.idx}" for name in BOX if getattr(data, name)]
    if data.prompt is None:
        faults.append(f"a user who opens the conversation (task {data.idx} has no prompt)")
    elif not isinstance(data.prompt, str):
        parts = [part for each in data.prompt if isinstance(each.content, list) for part in each.content]
        if any(part.type != "text" for part in parts):
            faults.append(f"pictures (task {data.idx})")
    return faults


def overrides(task: vf.Task, name: str) -> bool:
    """Whether a task has its own ``setup`` or ``finalize``."""
    return getattr(type(task), name) is not getattr(vf.Task, name)


def all_toolsets(taskset: vf.Taskset, task: vf.Task) -> Sequence[vf.Toolset]:
    """The toolsets of all tasks, and those of one; none is set up."""
    return (*taskset.toolsets(taskset.config), *task.toolsets(task.config))


async def open_toolsets(
    toolsets: Sequence[vf.Toolset], task: vf.Task | None, stack: contextlib.AsyncExitStack
) -> dict[str, Tool]:
    """Set toolsets up, for one task or None for all; their tools by name."""
    offered = list[dict[str, Tool]]()
    for toolset in toolsets:
        if not toolset.config.url:
            share_state(toolset)
            await stack.enter_async_context(toolset._exit_stack)
            await toolset.setup()
            if task is not None:
                await toolset.setup_task(task.data)
        offered.append(await tools_of(toolset))
    return merged(*offered)


def share_state(toolset: vf.Toolset) -> None:
    """Let a toolset take the state of the trace and put it back, as it would over HTTP in a process of its own."""
    theirs = toolset._state_adapter

    async def pull() -> vf.State:
        state = _trace.get().state
        return theirs.validate_json(TypeAdapter(type(state)).dump_json(state))

    async def push(before: bytes) -> None:
        after, trace = theirs.dump_json(toolset.state), _trace.get()
        if after != before:
            trace.state = TypeAdapter(type(trace.state)).validate_json(after)

    toolset._pull_state, toolset._push_state = pull, push


async def tools_of(toolset: vf.Toolset) -> dict[str, Tool]:
    """The tools of a toolset, under the names that verifiers shows; what ``register`` raises if one has no schema."""
    call: Callable[..., Awaitable[CallToolResult]]
    if toolset.config.url:

        async def call(name: str, arguments: dict[str, Any]) -> CallToolResult:
            async with Client(toolset.config.url) as client:
                return await client.call_tool(name, arguments)

        async with Client(toolset.config.url) as client:
            listed = (await client.list_tools()).tools
    else:
        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        listed, call = await server.list_tools(), server.call_tool
    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    return {
        f"{prefix}{tool.name}": Tool(
            description={
                "name": f"{prefix}{tool.name}",
                "description": tool.description or "",
                "inputSchema": tool.input_schema,
            },
            call=partial(call, tool.name),
        )
        for tool in listed
    }


def merged(*tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """The tools of several toolsets; ValueError if two have one name."""
    together = dict[str, Tool]()
    for offered in tools:
        if twice := together.keys() & offered.keys():
            raise ValueError(f"two toolsets have a tool {sorted(twice)[0]!r}: give one of them another TOOL_PREFIX")
        together |= offered
    return together


def new_trace(task: vf.Task) -> vf.Trace:
    """The trace of a task, with the messages that it begins with."""
    data = task.data
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
    )
    system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
    for message in (*system, *prompt):
        add_message(trace, message, sampled=False)
    return trace


def add_message(trace: vf.Trace, message: vf.Message, *, sampled: bool) -> None:
    """Add a message after the last one."""
    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(vf.MessageNode(message=message, parent=parent, sampled=sampled))


def fault_of(error: BaseException) -> str:
    """An error in words, with the line that raised it unless it is one of this program."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = traceback.extract_tb(cause.__traceback__)
    elsewhere = frames and frames[-1].filename != __file__ and not frames[-1].filename.startswith("<")
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if elsewhere else ""
    return f"{type(error).__name__}: {error}{where}"


async def serve_taskset(taskset: Taskset) -> None:
    """Answer requests until stdin ends, or a taskset raises SystemExit. What the taskset prints goes to stderr.

    Not with the server of the SDK, which writes a reward of NaN as null, and goes on without answers after a lone
    surrogate or a SystemExit.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = asyncio.StreamReader(limit=LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    running = dict[int, asyncio.Task[None]]()

    async def answer(number: int, method: str, parameters: Mapping[str, Any]) -> None:
        reply: Mapping[str, Any]
        try:
            reply = {"result": await result(taskset, method, parameters)}
        except Exception as error:  # the boundary to a taskset
            reply = {"error": {"code": -32603, "message": fault_of(error)}}
        finally:
            del running[number]
        answers.write(json.dumps({"jsonrpc": "2.0", "id": number, **reply}).encode() + b"\n")
        answers.flush()

    while line := await requests.readline():
        message = json.loads(line)
        if "id" in message:
            running[message["id"]] = asyncio.create_task(answer(message["id"], message["method"], message["params"]))
        elif message["method"] == "notifications/cancelled" and message["params"]["requestId"] in running:
            running[message["params"]["requestId"]].cancel()
    for task in running.values():
        task.cancel()
    await taskset.close()


async def result(taskset: Taskset, method: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result of a request."""
    if method == "initialize":
        return {"protocolVersion": VERSION, "capabilities": {}, "serverInfo": {"name": "verifiers", "version": "1"}}
    if method == "tools/list":
        return {"tools": []}
    methods = {each.__name__: each for each in (taskset.problems, taskset.start, taskset.call, taskset.finish)}
    return await {**methods, "end": taskset.end}[parameters["name"]](**parameters["arguments"])


if __name__ == "__main__":
    asyncio.run(serve_taskset(Taskset(**json.loads(sys.argv[1]))))
