"""The task ``openenv`` against real servers of the package ``openenv``, which has an environment of its own."""

import asyncio
import base64
import contextlib
import gc
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import WSMsgType, web
from command import ROOT
from PIL import Image
from scripted_training import train_on_replies
from talk import add, agent, engine, play_all, results
from waiting import connections, eventually, free_port, wait_for_port

from condensegrpo.config.options import build_plugin
from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import EnvironmentLost, PluginError
from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.integrations.openenv import _takes_text

PYTHON = Path(sys.prefix) / "others" / "openenv" / "bin" / "python"
PAGE = (ROOT / "docs" / "how-to" / "connect-openenv.md").read_text(encoding="utf-8")
SERVER = '''
import asyncio, os, sys, time
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, MCPEnvironment, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

COUNT = 0


class Order(Action):
    order: str
    number: int = 0


class Seen(Observation):
    text: str
    number: int = 0


class Screen(Seen):
    screen: list | str


class Orders(Environment):
    """Does what it is told."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, greeting="", **others):
        return Seen(text=f"{greeting} {seed}")

    def step(self, action, **others):
        name, _, rest = action.order.partition(" ")
        if name == "sleep":
            time.sleep(float(rest))
        if name == "raise":
            raise ValueError(rest)
        if name == "die" and "SHOP_NAME" in os.environ:
            print("out of paper", file=sys.stderr, flush=True)
            os._exit(3)
        if name == "secret":
            rest = ",".join(sorted(name for name in os.environ if name.startswith("SHOP_")))
        if name == "show":
            return Screen(text="a screen", screen=rest if rest else [[[255, 0, 0], [0, 0, 255]]])
        text = "x" * (int(rest) << 20) if name == "large" else rest
        return Seen(text=text, number=action.number, reward=0.25, done=name == "end")

    @property
    def state(self):
        return State()


class Shop(MCPEnvironment):
    """Tools; who pays for a lamp has done well."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("shop")

        @server.tool
        def price(item: str) -> int:
            """What an item costs."""
            return {"lamp": 25}[item]

        @server.tool
        async def later(file: str) -> str:
            """Waits for a file."""
            while not os.path.exists(file):
                await asyncio.sleep(0.01)
            return "now"

        @server.tool
        def pay(item: str) -> str:
            """Pays."""
            return "thanks"

        super().__init__(server)

    def reset(self, **others):
        return Observation(metadata={"status": "open"})

    async def step_async(self, action, **others):
        seen = await super().step_async(action, **others)
        if isinstance(action, CallToolAction):
            seen.reward, seen.done = 0.5, action.tool_name == "pay"
        return seen

    def _step_impl(self, action, **others):
        raise ValueError("only tools")

    @property
    def state(self):
        return State()


class Guarded:
    """Refuses requests without the token."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if "SHOP_TOKEN" not in os.environ or dict(scope.get("headers", [])).get(b"token") == b"t0p-secret":
            return await self.app(scope, receive, send)
        if scope["type"] != "lifespan":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})


async def serve(port, style, capacity):
    parts = {"orders": (Orders, Order, Seen), "shop": (Shop, CallToolAction, CallToolObservation)}[style]
    app = Guarded(create_app(*parts, max_concurrent_envs=int(capacity)))
    await uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="warning")).serve()


async def main(*servers):
    await asyncio.gather(*(serve(*servers[at : at + 3]) for at in range(0, len(servers), 3)))


asyncio.run(main(*sys.argv[1:]))
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not PYTHON.exists():
        pytest.skip(f"openenv is not installed in {PYTHON.parents[1]}: run make others")
    file = tmp_path_factory.mktemp("server") / "server.py"
    file.write_text(SERVER, encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def addresses(script: str) -> Iterator[dict[str, str]]:
    """Of the servers of orders and of the shop, which one process runs for the tests of the module."""
    ports = {style: free_port() for style in ("orders", "shop")}
    process = subprocess.Popen(
        [PYTHON, script, *(text for style, port in ports.items() for text in (str(port), style, "32"))]
    )
    for port in ports.values():
        wait_for_port(port)
    yield {style: f"http://127.0.0.1:{port}" for style, port in ports.items()}
    process.kill()
    process.wait()


@pytest.fixture
def orders(addresses: dict[str, str]) -> dict[str, Any]:
    return {"url": addresses["orders"]}


@pytest.fixture
def shop(addresses: dict[str, str]) -> dict[str, Any]:
    return {"url": addresses["shop"]}


def command(script: str, style: str, capacity: int) -> dict[str, Any]:
    return {"command": [str(PYTHON), script, "{port}", style, str(capacity)]}


def started(script: str) -> list[list[str]]:
    """The commands of processes that tasks started: guards, and servers that have a parent other than this process."""
    return [line for line, ppid in children() if script in line and (ppid != os.getpid() or "-P" in line)]


def guards(script: str) -> list[list[str]]:
    """The commands of the guards alone."""
    return [line for line, ppid in children() if script in line and "-P" in line and ppid == os.getpid()]


def children() -> list[tuple[list[str], int]]:
    """The commands of the processes of this process, and the parent of each."""
    lines = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append((process.cmdline(), process.ppid()))
    return lines


def sleeping() -> bool:
    return any("sleep" in line for line, _ in children())


def task(folder: Path, orders: list[str], *servers: dict[str, Any], **options: Any) -> Any:
    """Every row has the replies of an episode, separated by semicolons."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "greeting": "hi", "seed": 7}) + "\n" for text in orders))
    file.with_name("none.jsonl").write_text(json.dumps({"prompt": "none"}))
    named = {f"s{number}": server for number, server in enumerate(servers)}
    given = {"data": str(file), "eval_data": str(file.with_name("none.jsonl")), "servers": named, **options}
    return build_plugin("tasks", "openenv", given)


def reply(prompt: str) -> str:
    """The next reply of the row; a name and arguments (``price {"item": "lamp"}``) call a tool."""
    replies = prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0].partition("\n")[0].split(";")
    said = replies[min(prompt.count("<|im_start|>assistant") - 1, len(replies) - 1)]
    name, _, arguments = said.partition(" {")
    return f'<tool>{{"name": "{name}", "args": {{{arguments}}}</tool>' if arguments else said


def play(task: Any, say: Callable[[str], str] = reply, **options: Any) -> list[Trajectory]:
    """All training problems at the same time."""
    limits = {"max_turns": 9, "max_context_tokens": 60_000, "tool_seconds": 30, "turn_seconds": 30.0, **options}
    parts = engine(agent(say), **limits)

    return play_all(parts, task.problems("train"), task.environment)


def test_a_reply_fills_a_field_of_the_action_and_rewards_are_the_outcome(
    tmp_path: Path, orders: dict[str, Any]
) -> None:
    played = task(tmp_path, ["say one;<action> say two </action>;end"], orders, show=["text"], system="Obey.")
    (trajectory,) = play(played)
    assert (trajectory.stop, trajectory.outcome) == (StopReason.FINISHED, 0.75), trajectory.detail
    assert results(trajectory) == ["one", "two", ""]  # the last one too, which is empty
    first = trajectory.turns[0].context
    assert [message.text for message in first] == ["Obey.", "say one;<action> say two </action>;end\nhi 7"]
    (again,) = play(task(tmp_path, ["say one;end"], orders, action={"number": 3}, outcome="last"))
    assert (again.outcome, results(again)[0]) == (0.25, '{"text": "one", "number": 3}')


def test_fields_of_an_observation_are_shown_as_pictures(tmp_path: Path, orders: dict[str, Any]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    played = task(tmp_path, ["none"], orders, pictures=["screen"])

    async def shown(*replies: str) -> list[Message]:
        episode = played.environment(played.problems("train")[0])
        await episode.start()
        try:
            steps = [await episode.step(Message(role="assistant", content=reply)) for reply in replies]
        finally:
            await episode.close()
        return [step.observations[0] for step in steps]

    data = base64.b64encode(file.getvalue()).decode()
    plain, rows, encoded = asyncio.run(shown("say hello", "show", f"show data:image/png;base64,{data}"))
    assert (plain.text, plain.media) == ('{"text": "hello", "number": 0}', ())
    assert rows.text_without_media == encoded.text_without_media == '{"text": "a screen", "number": 0}'
    pixels = Image.open(io.BytesIO(rows.media[0].data or b""))
    assert (pixels.size, pixels.getpixel((1, 0))) == ((2, 1), (0, 0, 255))
    assert (encoded.media[0].data, encoded.media[0].type) == (file.getvalue(), "image/png")
    with pytest.raises(EnvironmentLost, match="the field screen of an observation"):
        asyncio.run(shown("show bm90IGEgcGljdHVyZQ=="))


@pytest.mark.parametrize(
    ("screen", "fault"),
    [
        ([[[0.5, 0.9, 1.0]]], "has pixels scaled to 0..1, wanted integers 0..255"),
        ([[[0, 0, 256]]], "has other values, wanted integers 0..255"),
        ([[1, 2]], r"has the shape \(1, 2\)"),
        ("é" * 80, "is no base64"),
    ],
)
def test_a_field_that_is_no_picture_is_a_lost_environment(
    screen: object, fault: str, tmp_path: Path, orders: dict[str, Any]
) -> None:
    with pytest.raises(EnvironmentLost, match=fault):
        task(tmp_path, ["none"], orders, pictures=["screen"]).pictures_of_observation({"screen": screen})


def test_an_action_that_the_server_refuses_is_no_step_and_an_environment_that_raises_ends_the_episode(
    tmp_path: Path, orders: dict[str, Any]
) -> None:
    options = {"action_field": "number", "action": {"order": "end"}}
    (trajectory,) = play(task(tmp_path, ["many;4"], orders, **options))
    assert results(trajectory)[0].startswith("Error: Invalid message; number: Input should be a valid integer")
    assert (trajectory.stop, trajectory.outcome) == (StopReason.FINISHED, 0.25)
    raised, endless = play(task(tmp_path, ["raise what;end", "say again"], orders), max_turns=3)
    assert raised.stop is StopReason.ENVIRONMENT_ERROR
    assert "what" in raised.detail
    assert (endless.stop, len(endless.turns)) == (StopReason.TURN_LIMIT, 3)


def test_tools_of_an_environment_are_called_limited_and_end_the_episode(tmp_path: Path, shop: dict[str, Any]) -> None:
    asked = [
        'price {"item": "lamp"};price {"item": "car"};price {};pay {"item": "lamp"}',
        f'later {{"file": "{tmp_path}/late"}};price {{"item": "lamp"}};done',
        "nothing",
    ]

    def say(prompt: str) -> str:
        if "later did not finish" in prompt:
            (tmp_path / "late").touch()
        return reply(prompt)

    played = task(tmp_path, asked, shop, show=["metadata"])
    paid, slow, none = play(played, say, tool_seconds=4, max_output_tokens=300)
    known, unknown, missing, _ = results(paid)
    assert known == "25"
    assert unknown.startswith("Error: Error calling tool 'price'")
    assert missing.startswith("Error: price: missing a required argument: 'item'")
    assert (paid.stop, paid.outcome) == (StopReason.FINISHED, 1.5)
    assert paid.turns[0].context[-1].text.endswith('\n{"status": "open"}')
    # the answer that came too late is not that of the next call, and what it paid counts
    assert not slow.detail
    assert results(slow) == ["Error: later did not finish within 4 seconds", "25"]
    assert (slow.stop, slow.answer, slow.outcome) == (StopReason.ANSWERED, "done", 1.0)
    assert (none.stop, none.answer, none.outcome) == (StopReason.ANSWERED, "nothing", None)


def test_a_tool_of_the_run_has_no_name_of_the_environment(tmp_path: Path, shop: dict[str, Any]) -> None:
    (trajectory,) = play(task(tmp_path, ["end"], shop), tools={"price": add})
    assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert "'price', which another tool is called too" in trajectory.detail


def test_a_policy_that_thinks_for_long_keeps_its_session(tmp_path: Path) -> None:
    """A ping of the server is answered meanwhile."""
    thinks, answered = threading.Event(), threading.Event()

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        await socket.receive()
        await socket.send_json(RESET)
        await asyncio.to_thread(thinks.wait, 60)
        await socket.ping()
        if (await socket.receive()).type is WSMsgType.PONG:
            answered.set()
        await socket.receive()
        await socket.send_json({**RESET, "data": {**RESET["data"], "done": True}})
        await socket.receive()
        return socket

    async def schema(_: web.Request) -> web.Response:
        return web.json_response(ORDERS)

    def slow(prompt: str) -> str:
        thinks.set()
        assert answered.wait(20)
        return reply(prompt)

    with serving([web.get("/schema", schema), web.get("/ws", session)]) as server:
        (trajectory,) = play(task(tmp_path, ["end"], server), slow)
    assert trajectory.stop is StopReason.FINISHED, trajectory.detail


def with_replies(played: Any, *replies: str) -> Any:
    """The same servers, other rows."""
    rows = zip(played._splits.train, replies, strict=True)
    train = tuple(replace(problem, data={"prompt": text}) for problem, text in rows)
    played._splits = replace(played._splits, train=train)
    return played


def test_a_server_of_a_command_is_shared_guarded_started_again_and_leaves_nothing(
    tmp_path: Path, script: str, orders: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty-two episodes of a server with eight sessions wait for each other; it dies and ends its episodes only."""
    threads, files = threading.active_count(), psutil.Process().num_fds()
    for name, value in (("SHOP_NAME", "x"), ("SHOP_OTHER", "x"), ("SHOP_TOKEN", "t0p-secret")):
        monkeypatch.setenv(name, value)
    given = {"environment": ["SHOP_NAME", "SHOP_TOKEN"], "headers": {"token": "${SHOP_TOKEN}"}}
    server = {**command(script, "orders", 8), **given}
    played = task(tmp_path, [f"sleep 0.02;say {number};secret;end" for number in range(32)], server, show=["text"])
    trajectories = play(played)
    assert [results(trajectory) for trajectory in trajectories] == [
        ["0.02", str(number), "SHOP_NAME,SHOP_TOKEN", ""] for number in range(32)
    ]
    (guard,) = guards(script)
    port = int(guard[guard.index(script) + 1])
    assert eventually(lambda: not connections(port))
    (refused,) = play(task(tmp_path, ["end"], {"url": f"http://127.0.0.1:{port}"}))
    assert "the OpenEnv server s0 answered 401 Unauthorized" in refused.detail
    servers = [{**each, "sessions": 1} for each in (server, orders)]
    both = task(tmp_path, ["end", "end"], *servers, show=["text"])
    assert [trajectory.stop for trajectory in play(both)] == [StopReason.FINISHED] * 2
    for each in guards(script):
        wait_for_port(int(each[each.index(script) + 1]))
    asked = ["sleep 0.5;die;end"] * 2  # the other server ignores it
    died, other = sorted(
        play(with_replies(both, *asked)), key=lambda trajectory: trajectory.stop is StopReason.FINISHED
    )
    assert died.stop is StopReason.ENVIRONMENT_ERROR
    assert re.search("the OpenEnv server s0 ended the session: it ended with exit code 3: out of paper", died.detail)
    assert (other.stop, results(other)) == (StopReason.FINISHED, ["0.5", "", ""]), other.detail
    again = play(with_replies(both, "end", "end"))
    assert [trajectory.stop for trajectory in again] == [StopReason.FINISHED] * 2
    assert len(guards(script)) == 2  # with that of the other task
    assert "t0p" not in repr((refused, died, *again, *trajectories))
    del played, both
    gc.collect()
    assert eventually(lambda: not started(script))
    assert eventually(lambda: threading.active_count() <= threads)
    assert eventually(lambda: psutil.Process().num_fds() <= files)


@contextlib.contextmanager
def speaking(schema: object, *answers: object) -> Iterator[dict[str, Any]]:
    """A server of another version: its answers to the requests of a session are these, several where a list is one."""

    async def described(_: web.Request) -> web.Response:
        return web.json_response(schema)

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for answer in answers:
            await socket.receive()
            for message in answer if isinstance(answer, list) else [answer]:
                if isinstance(message, bytes):
                    await socket.send_bytes(message)
                else:
                    await socket.send_str(message if isinstance(message, str) else json.dumps(message))
        await socket.receive()
        return socket

    with serving([web.get("/schema", described), web.get("/ws", session)]) as server:
        yield server


@contextlib.contextmanager
def serving(routes: Sequence[web.RouteDef]) -> Iterator[dict[str, Any]]:
    """A server in a thread of its own."""

    async def served() -> tuple[web.AppRunner, str]:
        application = web.Application()
        application.add_routes(routes)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, "http://{}:{}".format(*runner.addresses[0][:2])

    with BackgroundLoop("server") as loop:
        runner, url = loop.run(served())
        yield {"url": url}
        loop.run(runner.cleanup())


ORDERS = {"action": {"properties": {"order": {"type": "string"}}}}
RESET = {"type": "observation", "data": {"observation": {"text": "Go."}, "reward": None, "done": False}}
LISTED = {"type": "observation", "data": {"observation": {"tools": [{"name": "price"}]}, "reward": None, "done": False}}


@pytest.mark.parametrize(
    ("schema", "answers", "message"),
    [
        (
            {"detail": "no"},
            [],
            "s0 has the schema None, wanted the messages of OpenEnv 0.2 or newer",
        ),
        (ORDERS, [{"observation": {}, "done": False}], r"sent .*\"done\": false.*, wanted the messages of OpenEnv 0.2"),
        (ORDERS, [RESET, {"type": "observation", "data": {"observation": {}}}], "sent .*, wanted the messages"),
        (ORDERS, [RESET, "[" * 100_000], r"sent \[+, wanted the messages"),
        (ORDERS, [{**RESET, "data": {**RESET["data"], "reward": 10**400}}], "sent .*, wanted the messages"),
        (ORDERS, [RESET, b"123"], "the OpenEnv server s0 sent binary data, wanted"),
        (ORDERS, [[RESET, RESET], RESET], "the OpenEnv server s0 sent .*Go.*, wanted"),  # nothing asked for the second
        (
            {"action": {"properties": {}}},
            [RESET, LISTED],
            "lists {'name': 'price'}, wanted a tool with name and input_schema, whose properties are an object",
        ),
        (
            {"action": {"properties": {"x": {}, "y": {}}, "required": ["x", "y"]}},
            [RESET],
            "have the fields x, y: name the one that a reply fills in task.options.action_field",
        ),
    ],
)
def test_a_server_that_speaks_otherwise_ends_the_episode(
    tmp_path: Path, schema: object, answers: list[object], message: str
) -> None:
    with speaking(schema, *answers) as server:
        (trajectory,) = play(task(tmp_path, ["say"], server))
    assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert re.search(message, trajectory.detail), trajectory.detail


def test_large_results_are_shortened_or_end_the_episode(tmp_path: Path, orders: dict[str, Any]) -> None:
    scripts = ["large 1;end", "large 17;end", "say one;end"]
    shortened, refused, other = play(task(tmp_path, scripts, orders, show=["text"]), max_context_tokens=200_000)
    assert (len(results(shortened)[0]), shortened.stop) == (100_034, StopReason.FINISHED)
    assert refused.stop is StopReason.ENVIRONMENT_ERROR
    assert "the OpenEnv server s0: its answer exceeds 16 MiB" in refused.detail
    assert other.stop is StopReason.FINISHED


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": "/no/such/server {port}"}, "s0 ended with exit code 1: .*No such file"),
        ({"command": [sys.executable, "-c", "exit('no room')", "{port}"]}, "s0 ended with exit code 1: no room"),
        (
            {"command": "sleep 60{port}"},
            r"cannot be reached: ClientConnectorError.*tried for 0\.5 seconds: task",
        ),
        (
            {"url": "http://127.0.0.1:9"},
            r"cannot be reached: ClientConnectorError.*tried for 0\.5 seconds: task",
        ),
    ],
)
def test_a_server_that_does_not_start_says_why(tmp_path: Path, server: dict[str, Any], message: str) -> None:
    played = task(tmp_path, ["say"], server, start_seconds=0.5 if "tried" in message else 60)
    (trajectory,) = play(played)
    assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert re.search(message, trajectory.detail), trajectory.detail
    del played
    gc.collect()
    assert eventually(lambda: not sleeping())


def test_sessions_that_are_opened_while_their_episodes_are_given_up_leave_nothing(tmp_path: Path) -> None:
    files = psutil.Process().num_fds()
    played = task(tmp_path, [f"say {number}" for number in range(8)], {"command": "sleep 61{port}"})
    trajectories = play(played, turn_seconds=1.0)
    assert {trajectory.detail for trajectory in trajectories} == {
        "starting the environment: no result within 1 second (rollout.limits.turn_seconds)"
    }
    del played
    gc.collect()
    assert eventually(lambda: not sleeping())
    assert eventually(lambda: psutil.Process().num_fds() <= files)


def test_an_episode_that_is_given_up_while_it_is_reset_is_closed_when_its_session_is(tmp_path: Path) -> None:
    resetting, ended = threading.Event(), threading.Event()

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        resetting.set()
        await asyncio.sleep(0.5)
        ended.set()
        return socket

    async def schema(_: web.Request) -> web.Response:
        return web.json_response(ORDERS)

    async def given_up(played: Any) -> bool:
        episode = played.environment(played.problems("train")[0])
        starting = asyncio.create_task(episode.start())
        await asyncio.to_thread(resetting.wait, 20)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await episode.close()
        return ended.is_set()

    with serving([web.get("/schema", schema), web.get("/ws", session)]) as server:
        assert asyncio.run(given_up(task(tmp_path, ["say"], server)))


def test_a_step_that_takes_too_long_ends_the_episode(tmp_path: Path, orders: dict[str, Any]) -> None:
    (slow,) = play(task(tmp_path, ["sleep 2"], orders), turn_seconds=1.0)
    (other,) = play(task(tmp_path, ["say one;end"], orders))  # of a server that is not done with it
    assert slow.stop is StopReason.ENVIRONMENT_ERROR
    assert "no result within 1 second (rollout.limits.turn_seconds)" in slow.detail
    assert other.stop is StopReason.FINISHED


@pytest.mark.parametrize("redirected", ["/schema", "/ws"])
def test_no_redirect_gets_the_headers_of_a_server(tmp_path: Path, redirected: str) -> None:
    given = list[str | None]()

    async def schema(_: web.Request) -> web.Response:
        return web.json_response(ORDERS)

    async def moved(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async def elsewhere(request: web.Request) -> web.Response:
        given.append(request.headers.get("token"))
        return web.json_response(ORDERS)

    handlers = {"/schema": schema, redirected: moved, "/elsewhere": elsewhere}
    with serving([web.get(path, handler) for path, handler in handlers.items()]) as server:
        (trajectory,) = play(task(tmp_path, ["say"], {**server, "headers": {"token": "t0p-secret"}}))
    assert "the OpenEnv server s0 answered 307 (a redirect), wanted" in trajectory.detail
    assert given == []


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for servers, message in (
        ([], "there is no server: name one in task.options.servers"),
        ([{}], "wanted one of command and url: found"),
        ([{"command": "uvicorn app:app"}], "wanted a command that says where to listen, as in --port {port}"),
        ([{"url": "http://ana:pw@host"}], "wanted an url without user and password"),
        ([{"url": "http://host", "headers": {"token": "${NO_SUCH_VARIABLE}"}}], "that is not set"),
    ):
        with pytest.raises(PluginError, match=message):
            task(tmp_path, ["say"], *servers)
    with pytest.raises(PluginError, match="found eval_data without data"):
        task(tmp_path, ["say"], {"url": "http://host"}, data=None)


def test_a_field_that_actions_do_not_have_is_no_matter_of_the_policy() -> None:
    options = {"servers": {"s": {"url": "ws://host"}}, "action_field": "order", "action": {"nummer": 3}}
    actions = {"properties": {"order": {}, "number": {}, "metadata": {}}, "additionalProperties": False}
    words = build_plugin("tasks", "openenv", options)
    with pytest.raises(ValueError, match=r"names 'nummer', the actions of the OpenEnv server s .* number, order"):
        words.field_of("s", actions)
    assert words.field_of("s", {**actions, "additionalProperties": True}) == "order"
    right = build_plugin("tasks", "openenv", {**options, "action": {"number": 3, "metadata": {"run": "a"}}})
    assert right.field_of("s", actions) == "order"


def test_a_field_that_may_be_a_list_gets_the_list_of_a_reply() -> None:
    """Pydantic writes ``list[float] | None`` as an anyOf; the server was sent a text and refused every action."""
    numbers, text = {"type": "array", "items": {"type": "number"}}, {"type": "string"}
    named = {"Move": {"type": "object"}, "Way": {"enum": ["left"], "type": "string"}}
    for schema in (numbers, {"anyOf": [numbers, {"type": "null"}]}, {"$ref": "#/$defs/Move"}, {"$ref": "#/$defs/no"}):
        assert not _takes_text(schema, named)
    maybe = ({"anyOf": [text, {"type": "null"}]}, {"type": ["string", "null"]})
    for schema in ({}, text, *maybe, {"$ref": "#/$defs/Way"}):
        assert _takes_text(schema, named)


def test_seeds_of_the_splits_are_disjoint() -> None:
    seeds = build_plugin(
        "tasks", "openenv", {"servers": {"s": {"url": "ws://host"}}, "arguments": {"a": 1}, "eval_arguments": {"b": 2}}
    )
    train, held_out = seeds.problems("train"), seeds.problems("eval")
    assert (train[0].data, held_out[0].data) == ({"a": 1, "seed": 1_000_000}, {"a": 1, "b": 2, "seed": 0})
    assert (len(train), len(held_out), train[1].question) == (100_000, 256, "s with seed 1000001")


@pytest.mark.parametrize("style", ["words", "shop"])
def test_the_examples_of_the_page_train_and_evaluate(tmp_path: Path, shop: dict[str, Any], style: str) -> None:
    """The replies are scripted: right for one of two words, and worth 0.5 in the shop, which runs already."""
    blocks = re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)
    names = ("mirror.py", "words.jsonl", "held_out.jsonl", "mirror.yaml")
    for name, block in zip(names, blocks, strict=True):
        (tmp_path / name).write_text(block.replace("uvicorn mirror", f"{PYTHON.parent}/uvicorn mirror"))
    replies, options = ["<action>pmal</action>"] * 3, []  # another word has three tries
    if style == "shop":
        replies = ['<tool>{"name": "pay", "args": {"item": "lamp"}}</tool>']
        options = [f"task.options={json.dumps({'servers': {'shop': shop}})}", "rollout.tools.format=tagged"]
    trained = train_on_replies(tmp_path, "mirror", replies, *options)
    assert [line["reward"] for line in trained] == [0.5] * 2
