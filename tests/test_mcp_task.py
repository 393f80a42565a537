"""The task ``mcp`` against real servers of the package ``mcp``, over pipes and over HTTP on the loopback interface."""

import asyncio
import contextlib
import gc
import gzip
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from command import ROOT, succeed
from scripted_training import train_on_replies
from talk import agent, engine, play_all, results
from waiting import connections, eventually, free_port, wait_for_port

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import EnvironmentLost, PluginError
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.integrations.mcp import McpServer, ServerPool
from condensegrpo.integrations.mcp_client import HttpConnection, ProcessConnection, Refused
from condensegrpo.integrations.servers import ChildProcess

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")
PAGE = (ROOT / "docs" / "how-to" / "connect-mcp.md").read_text(encoding="utf-8")
SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("words")


@server.tool()
def price(item: str) -> int:
    """What an item costs."""
    return {"lamp": 25, "chair": 40}[item]


@server.tool()
async def later(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "now"


@server.tool()
def large(mebibytes: int) -> str:
    """Much text."""
    return "x" * (mebibytes << 20)


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"123456", format="png")


@server.tool()
def secret() -> str:
    """What the server knows of its environment."""
    return ",".join(sorted(name for name in os.environ if name.startswith("SHOP_")))


@server.tool()
def die() -> str:
    """Ends the server."""
    print("out of paper", file=sys.stderr, flush=True)
    os._exit(3)


if len(sys.argv) > 1:
    server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
'''


PLAIN = """
import json, os, sys, time

def say(number, **answer):
    print(json.dumps({"jsonrpc": "2.0", "id": number, **answer}), flush=True)

for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        say(asked["id"], result={})
    elif asked["method"] == "tools/list":
        say(asked["id"], result={"tools": [{"name": "price", "inputSchema": {"properties": None, "required": None}}]})
    elif asked["method"] == "tools/call":
        say({}, result={})
        say([asked["id"]], result={})
        print("[" * 100_000, flush=True)
        say(asked["id"], error={"message": f"no entry with {os.environ.get('SHOP_PAT')}"})
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("server") / "server.py"
    file.write_text(SERVER, encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def address(script: str) -> Iterator[str]:
    """A server over HTTP."""
    port = free_port()
    process = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    wait_for_port(port)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def task(folder: Path, questions: list[str], servers: dict[str, Any], **options: Any) -> Any:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": "25"}) + "\n" for text in questions))
    given = {"data": str(file), "eval_data": str(file.with_name("none.jsonl")), "servers": servers, **options}
    file.with_name("none.jsonl").write_text(json.dumps({"question": "none", "answer": "25"}))
    return build_plugin("tasks", "mcp", given)


def reply(prompt: str) -> str:
    """The next call of the question, which has one a line (``price {"item": "lamp"}``); after the last, an answer."""
    question = prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    done = prompt.count("<result>") - prompt.partition("<|im_start|>user\n")[0].count("<result>")
    calls = question.splitlines()
    if done == len(calls):
        return "<answer>25</answer>"
    name, _, arguments = calls[done].partition(" ")
    return f'<tool>{{"name": "{name}", "args": {arguments or "{}"}}}</tool>'


def play(task: Any, **options: Any) -> list[Trajectory]:
    """All training questions at the same time."""
    parts = engine(agent(reply), max_turns=9, max_context_tokens=20_000, **{"tool_seconds": 30, **options})

    return play_all(parts, task.problems("train"), task.environment)


def test_tools_of_a_command_are_called_limited_and_refused(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_PAT", "t0p-secret")
    monkeypatch.setenv("SHOP_OTHER", "hidden")
    words = {"command": [sys.executable, script], "environment": ["SHOP_PAT"]}
    asked = [
        'price {"item": "lamp"}\nprice {"item": "car"}\nprice {}\nsecret',
        'large {"mebibytes": 17}\nlarge {"mebibytes": 1}\npicture',
        *(f'price {{"item": "chair"}}\nlater {{"seconds": 0.{number}}}' for number in range(1, 3)),
    ]
    first, second, *others = play(task(tmp_path, asked, {"words": words}))
    assert (first.stop, first.answer) == (StopReason.ANSWERED, "25"), first.detail
    known, unknown, missing, secret = results(first)
    assert (known, secret) == ("25", "SHOP_PAT")
    assert unknown.startswith("Error: Error executing tool price")
    assert missing.startswith("Error: price: missing a required argument: 'item'")
    refused, shortened, picture = results(second)
    assert refused == "Error: its answer exceeds 16 MiB"
    assert "characters left out" in shortened
    assert picture == "[image image/png, 6 bytes, not shown]"
    assert [results(other) for other in others] == [["40", "now"]] * 2


@pytest.mark.parametrize("per", ["run", "episode"])
def test_a_server_that_dies_ends_its_trajectories_and_nothing_is_left(tmp_path: Path, script: str, per: str) -> None:
    """The first episodes of the run may lose their server too; the next ones get a new one."""
    servers = {"words": {"command": f"{sys.executable} {script}", "prefix": "w_"}}
    mcp = task(tmp_path, ["w_die", 'w_price {"item": "lamp"}\nw_later {"seconds": 0.5}'], servers, per=per)
    died, other = play(mcp)
    assert died.stop is StopReason.ENVIRONMENT_ERROR
    assert "the MCP server words ended with exit code 3: out of paper" in died.detail
    assert other.stop is (StopReason.ENVIRONMENT_ERROR if per == "run" else StopReason.ANSWERED), other.detail
    assert eventually(lambda: not children(script))
    if per == "run":
        again = play(task_with(mcp, 'w_price {"item": "lamp"}'))
        assert results(again[0]) == ["25"]
        assert len(children(script)) == 1
    del mcp
    gc.collect()
    assert eventually(lambda: not children(script))


def task_with(mcp: Any, question: str) -> Any:
    """The same servers, other questions."""
    mcp._splits = replace(mcp._splits, train=(replace(mcp._splits.train[0], question=question),))
    return mcp


def children(script: str) -> list[psutil.Process]:
    """Servers that run."""
    running = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and script in child.cmdline():
                running.append(child)
    return running


def test_thirty_two_episodes_share_a_server_at_an_address_and_leave_no_socket(tmp_path: Path, address: str) -> None:
    asked = [f'price {{"item": "lamp"}}\nlater {{"seconds": 0.{number:02}}}' for number in range(32)]
    mcp = task(tmp_path, asked, {"words": {"url": address, "tools": ["later", "price"]}})
    trajectories = play(mcp)
    assert [results(trajectory) for trajectory in trajectories] == [["25", "now"]] * 32
    assert '"name": "die"' not in trajectories[0].turns[0].context[0].text
    port = int(address.split(":")[2].split("/")[0])
    assert [one for one in connections(port) if one.status == psutil.CONN_ESTABLISHED]
    del mcp
    gc.collect()
    assert eventually(lambda: not connections(port))


def test_more_requests_than_the_usual_limit_of_connections_are_under_way_at_once() -> None:
    calls, everybody = list[int](), asyncio.Event()

    async def answered(request: web.Request) -> web.Response:
        body = await request.json()
        calls.append(body["id"])
        if len(calls) == 101:  # aiohttp opens 100 by default: the last one would wait for the others
            everybody.set()
        await everybody.wait()
        return web.json_response({"jsonrpc": "2.0", "id": body["id"], "result": {}})

    async def scenario() -> list[Any]:
        application = web.Application()
        application.add_routes([web.post("/", answered)])
        async with TestServer(application) as server:
            connection = HttpConnection("words", str(server.make_url("/")), {})
            try:
                return await asyncio.wait_for(asyncio.gather(*(connection.request("ping", {}) for _ in range(101))), 30)
            finally:
                everybody.set()
                await connection.close()

    assert asyncio.run(scenario()) == [{}] * 101


@pytest.mark.parametrize(
    ("kind", "body", "wanted"),
    [
        ("application/json", b"x" * (64 << 20), "its answer exceeds 16 MiB"),
        ("text/event-stream", b"x" * (64 << 20), "its answer exceeds 16 MiB"),
        ("text/event-stream", b"\n" * (64 << 20), "its answer exceeds 16 MiB"),
        ("application/json", b"[" * 200_000, r"its answer is no JSON: \[\["),
        ("application/json", b'{"id": ' + b"9" * 6000 + b"}", "its answer is no JSON"),
    ],
)
def test_an_answer_that_grows_or_cannot_be_read_is_an_error_of_its_call(kind: str, body: bytes, wanted: str) -> None:
    compressed = gzip.compress(body, 1)

    async def answered(_: web.Request) -> web.Response:
        return web.Response(body=compressed, content_type=kind, headers={"Content-Encoding": "gzip"})

    async def scenario() -> None:
        application = web.Application()
        application.add_routes([web.post("/", answered)])
        async with TestServer(application) as server:
            connection = HttpConnection("words", str(server.make_url("/")), {})
            with pytest.raises(Refused, match=wanted):
                await connection.request("tools/call", {})
            await connection.close()

    began = time.process_time()
    asyncio.run(scenario())
    assert time.process_time() - began < 2


@pytest.mark.parametrize("status", [400, 404])
def test_a_session_that_a_server_has_forgotten_is_opened_again(status: int) -> None:
    """404 is the specification's; servers with the TypeScript SDK's example at their heart answer 400."""
    known = set[str]()

    async def answered(request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "initialize":
            known.add("1")
        elif request.headers["Mcp-Session-Id"] not in known:
            fault = {"code": -32000, "message": "Bad Request: No valid session ID provided"}
            return web.json_response({"jsonrpc": "2.0", "error": fault, "id": None}, status=status)
        result = {"tools": []} if body["method"] == "tools/list" else {"content": []}
        reply = {"jsonrpc": "2.0", "id": body.get("id"), "result": result}
        return web.json_response(reply, headers={"Mcp-Session-Id": "1"})

    async def used(pool: ServerPool) -> Any:
        return await pool.call((await pool.open(pool.shared))["words"], "price", {})

    async def scenario() -> None:
        application = web.Application()
        application.add_routes([web.post("/", answered)])
        async with TestServer(application) as server:
            pool = ServerPool({"words": McpServer(url=str(server.make_url("/")))}, 20)
            try:
                assert await used(pool) == {"content": []}
                known.clear()  # as a server that was started again
                with pytest.raises(EnvironmentLost, match=f"answered {status}.*No valid session"):
                    await used(pool)
                assert await used(pool) == {"content": []}
            finally:
                await asyncio.to_thread(pool.close)

    asyncio.run(scenario())


def test_servers_that_start_while_their_episodes_are_given_up_are_ended(tmp_path: Path) -> None:
    sleeping = {"command": ["sleep", "61"]}
    mcp = task(tmp_path, [f"price {number}" for number in range(8)], {"a": sleeping, "b": sleeping}, per="episode")
    files = psutil.Process().num_fds()
    trajectories = play(mcp, turn_seconds=1.0)
    assert {trajectory.detail for trajectory in trajectories} == {
        "starting the environment: no result within 1 second (rollout.limits.turn_seconds)"
    }
    del mcp
    gc.collect()
    assert eventually(lambda: not children("61"))
    assert eventually(lambda: psutil.Process().num_fds() <= files)


def plain(seconds: float) -> McpServer:
    """A server that ends so long after its input."""
    command = (sys.executable, "-c", PLAIN, str(seconds))
    return McpServer(command=command, environment=("SHOP_PAT",))


def test_lines_that_answer_nothing_are_skipped_and_no_credential_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_PAT", "t0p-secret")
    words = {"command": [sys.executable, "-c", PLAIN, "0"], "environment": ["SHOP_PAT"]}
    (trajectory,) = play(task(tmp_path, ["price"], {"words": words}))
    assert results(trajectory) == ["Error: no entry with ***"], trajectory.detail


def test_servers_that_were_lost_together_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them takes long to end: the next episode opens both before it has."""
    monkeypatch.setenv("SHOP_PAT", "t0p-secret")
    pool = ServerPool({"slow": plain(0.7), "fast": plain(0)}, 20)

    async def scenario() -> None:
        for server in (await pool.open(pool.shared)).values():
            server.connection.lost = "gone"
        first, second = await asyncio.gather(pool.open(pool.shared), pool.open(pool.shared))
        assert first == second
        assert [server.connection.lost for server in second.values()] == ["", ""]

    asyncio.run(scenario())
    pool.close()
    pool.close()  # a second time


def test_a_server_that_was_lost_has_ended_before_it_is_started_again(tmp_path: Path) -> None:
    """As one needs that holds a lock, or a port."""
    holder = """
import fcntl, sys
lock = open(sys.argv[2], "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("locked")
"""
    command = (sys.executable, "-c", holder + PLAIN, "0.5", str(tmp_path / "lock"))
    pool = ServerPool({"words": McpServer(command=command)}, 20)

    async def scenario() -> None:
        (lost,) = (await pool.open(pool.shared)).values()
        lost.connection.lost = "gone"
        (again,) = (await pool.open(pool.shared)).values()
        assert again.connection.lost == ""

    asyncio.run(scenario())
    pool.close()


def test_an_error_that_comes_too_late_is_not_reported_at_the_exit(caplog: pytest.LogCaptureFixture) -> None:
    """A server reads no longer and then ends: the request fails, and its answer would be that the server was lost."""
    gc.collect()
    caplog.clear()  # of what earlier tests left

    async def scenario() -> None:
        command = ("sh", "-c", "exec <&-; sleep 1; exit 1")
        connection = ProcessConnection("words", await ChildProcess.started("words", command, {}, None))
        await asyncio.sleep(0.3)
        with pytest.raises(EnvironmentLost, match="words ended with exit code 1"):
            await connection.request("ping", {})
        await connection.close()
        gc.collect()

    asyncio.run(scenario())
    assert [record.message for record in caplog.records] == []


def test_a_process_that_a_server_leaves_behind_holds_no_file_open(tmp_path: Path) -> None:
    held = tmp_path / "held"
    command = ["sh", "-c", f"setsid sh -c 'echo $$ > {held}; exec sleep 30' & exec {sys.executable} -c \"$0\" 0", PLAIN]
    mcp = task(tmp_path, [f"price {number}" for number in range(3)], {"words": {"command": command}}, per="episode")
    play(task(tmp_path, ["price"], {"words": {"command": "false"}}))  # what the first episode opens
    files = psutil.Process().num_fds()
    trajectories = play(mcp)
    assert {trajectory.stop for trajectory in trajectories} == {StopReason.ANSWERED}, trajectories[0].detail
    del mcp
    gc.collect()
    closed = eventually(lambda: psutil.Process().num_fds() <= files, seconds=20)
    psutil.Process(int(held.read_text())).kill()
    assert closed


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": ["/no/such/server"]}, "starting the MCP server words: .*No such file"),
        ({"command": [sys.executable, "-c", "print('hello')"]}, "the MCP server words ended with exit code 0"),
        ({"command": ["sleep", "60"]}, r"the MCP server words did not start within 0\.5 seconds"),
        ({"url": "http://127.0.0.1:9/mcp"}, "the MCP server words cannot be reached: ClientConnectorError"),
    ],
)
def test_a_server_that_does_not_start_says_why(tmp_path: Path, server: dict[str, Any], message: str) -> None:
    mcp = task(tmp_path, ["price"], {"words": server}, start_seconds=0.5 if "sleep" in str(server) else 60.0)
    (trajectory,) = play(mcp)
    assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert re.search(message, trajectory.detail), trajectory.detail


def test_names_that_collide_and_wrong_options_are_refused(tmp_path: Path, address: str) -> None:
    two = {"one": {"url": address}, "two": {"url": address}}
    (trajectory,) = play(task(tmp_path, ["price"], two))
    assert "the MCP servers one and two both have a tool 'price': set task.options.servers.two.prefix" in (
        trajectory.detail
    )
    (trajectory,) = play(task(tmp_path, ["price"], {"one": {"url": address, "tools": ["cost"]}}))
    assert "the MCP server one has no tool 'cost', its tools are: price, later" in trajectory.detail
    for server, message in (
        ({}, "wanted one of command and url: found"),
        (
            {"url": "http://host/mcp", "tool": ["price"]},
            r"the option servers\['words'\] has no key 'tool'. Did you mean 'tools'\?",
        ),
        ({"url": "http://ana:pw@host/mcp"}, "wanted an url without user and password"),
        ({"command": "x", "environment": ["NO_SUCH_VARIABLE"]}, "an environment variable that is not set"),
        ({"url": "http://host/mcp", "headers": {"Authorization": "Bearer ${NO_SUCH_VARIABLE}"}}, "that is not set"),
    ):
        with pytest.raises(PluginError, match=message):
            task(tmp_path, ["price"], {"words": server})


def test_the_example_of_the_page_trains_and_evaluates(tmp_path: Path) -> None:
    """The replies are scripted: the answer is right for one of the two questions."""
    blocks = re.findall(r"```\w+\n(.*?)```", PAGE.split("\n## ")[0], re.DOTALL)
    for name, block in zip(("shop.py", "questions.jsonl", "held_out.jsonl", "shop.yaml"), blocks, strict=True):
        (tmp_path / name).write_text(block.replace("command: python ", f"command: {sys.executable} "))
    replies = ['<tool>{"name": "price", "args": {"item": "lamp"}}</tool>', "<answer>25</answer>"]
    trained = train_on_replies(tmp_path, "shop", replies)
    assert [(line["reward"], line["tool_calls_valid"]) for line in trained] == [(0.5, 1.0)] * 2


def test_the_example_with_a_tiny_model_needs_none_on_the_disk(tmp_path: Path) -> None:
    for name, block in re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(block.replace("command: python ", f"command: {sys.executable} "))
    (tmp_path / "questions.jsonl").write_text('{"question": "What does a lamp cost?", "answer": "25"}\n')
    (tmp_path / "held_out.jsonl").write_text('{"question": "What does a desk cost?", "answer": "90"}\n')
    succeed("train", "tiny.yaml", "train.problems_per_step=1", "--dry-run", cwd=tmp_path)
