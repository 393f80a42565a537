"""What verifiers itself makes of a taskset, and what the task ``verifiers`` refuses of others.

    python verifiers_runner.py SERVER PLAN OTHERS

    PLAN    {"module": "shop", "class": "Questions", "config": {…}, "replies": […]}, or null: nothing is played
    OTHERS  {"others.py:Name": {…}, …}      configs by taskset

prints, in its last line, the trace of the first task, played by verifiers' runner with its harness ``null`` and a
model that says the replies, and for every other taskset why SERVER (the path of verifiers_server.py) refuses its
config. Run by the interpreter of an environment that has verifiers. What verifiers caches goes to $HOME.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.generic import concrete_type


def without_uv() -> None:
    """Let the harness's program run in this environment: uv would download another one."""
    digest = hashlib.sha256(CHAT_PROGRAM_SOURCE.encode()).hexdigest()
    program = Path(SubprocessRuntime.scripts_dir) / f"{digest}.py"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(CHAT_PROGRAM_SOURCE)
    SubprocessRuntime._interpreters[str(program)] = sys.executable


async def served(replies: list[dict[str, Any]]) -> tuple[web.AppRunner, str]:
    """A model that says one reply after another."""
    said = iter(replies)

    async def complete(request: web.Request) -> web.StreamResponse:
        message = next(said)
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
        delta = {"role": "assistant", **message, **({"tool_calls": calls} if calls else {})}
        head = {"id": "one", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}
        choices = ({"delta": delta}, {"delta": {}, "finish_reason": "tool_calls" if calls else "stop"})
        events = [json.dumps({**head, "choices": [{"index": 0, **choice}]}) for choice in choices]
        body = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
        return web.Response(text=body, content_type="text/event-stream")

    application = web.Application()
    application.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def played(plan: dict[str, Any]) -> dict[str, Any]:
    kind = getattr(importlib.import_module(plan["module"]), plan["class"])
    config = concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset)
    runner, url = await served(plan["replies"])
    agent = vf.AgentConfig(
        harness={"id": "null"},
        runtime=vf.SubprocessConfig(),
        model="scripted",
        client=vf.EvalClientConfig(base_url=url, api_key_var="NONE"),
    )
    trace = await vf.Agent(agent).run(next(iter(kind(config(**plan["config"])))))
    await runner.cleanup()
    return {**trace.to_record(), "reward": trace.reward}


async def refusal(server: ModuleType, taskset: str, config: dict[str, Any]) -> str:
    try:
        await server.Taskset(taskset=taskset, config=config, eval_config={}, max_examples=None).problems("train", 0)
    except Exception as error:
        return str(server.fault_of(error))
    return ""


async def main(server: str, plan: dict[str, Any] | None, others: dict[str, dict[str, Any]]) -> None:
    spec = importlib.util.spec_from_file_location("verifiers_server", server)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verifiers_server"] = module
    spec.loader.exec_module(module)
    refused = {name: await refusal(module, name, config) for name, config in others.items()}
    found = {"trace": plan and await played(plan), "refused": refused}
    print(f"\n{json.dumps(found)}")  # the taskset may have printed something


if __name__ == "__main__":
    without_uv()
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])))
