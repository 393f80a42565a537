"""The proxy: agents that run elsewhere, condensed before a served model and recorded as sessions."""

import asyncio
import gc
import io
import json
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession
from answering import Behaviour, completion, endpoint
from command import ENVIRONMENT, ROOT, run, succeed
from forked import ForkedCommand
from talk import agent, all_tasks_end, engine, said, shown, tokenizer
from test_agent import UP, ask, assistant, call, counts, listening, numbered, user
from test_agent import said as said_by
from test_openai_sampler import exact

from condensegrpo.algorithms.segments import broken_invariants
from condensegrpo.cli.serve import _recorded
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import Generation, SamplingParams, StopReason, Trajectory
from condensegrpo.episodes.encoding import TextEncoder
from condensegrpo.integrations.proxy import Proxy, Session
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.tasks import agent_endpoint

BUDGET = 1400  # tokens of a prompt
PAGE = (ROOT / "docs" / "how-to" / "condense-for-any-agent.md").read_text(encoding="utf-8")
TOKEN = "a-token-of-the-proxy"


# --- the command, with an agent that knows nothing of it --------------------------------------------------------------


async def converse(url: str, key: str, *, stream: bool = False) -> list[Any]:
    """An agent as there are many: it declares a tool, answers its calls, and sends the whole history every time."""
    messages: list[Any] = [{"role": "system", "content": f"Count. {key}"}, user("count to 30")]
    count = 0
    while True:
        reply = await (streamed if stream else replied)(url, key, messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return messages
        for each in reply["tool_calls"]:
            count += json.loads(each["function"]["arguments"])["by"]
            result = f"{'a long page of the log. ' * 9}at {count}"
            messages.append({"role": "tool", "tool_call_id": each["id"], "content": result})


async def replied(url: str, key: str, messages: list[Any]) -> Any:
    status, body = await ask(url, key, messages, tools=[UP])
    assert status == 200, body
    return body["choices"][0]["message"]


async def streamed(url: str, key: str, messages: list[Any]) -> Any:
    body = {"messages": messages, "tools": [UP], "stream": True}
    async with (
        ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(f"{url}/chat/completions", json=body) as response,
    ):
        assert response.content_type == "text/event-stream"
        events = [line.removeprefix("data: ") for line in (await response.text()).splitlines() if line]
    assert events[-1] == "[DONE]"
    delta = json.loads(events[0])["choices"][0]["delta"]
    calls = [{name: each[name] for name in ("id", "type", "function")} for each in delta.get("tool_calls", ())]
    return {"role": "assistant", "content": delta["content"], "tool_calls": calls}


def counting_to_30(prompt: str) -> str:
    seen = re.findall(r"at (\d+)", prompt)
    return "done" if seen and seen[-1] == "30" else f"up {call(1)}"


@contextmanager
def started(upstream: str, folder: Path, *arguments: str) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """The command ``proxy`` as a person starts it: URL, token, and Ctrl-C, which returns what it printed."""
    tokenizer().save_pretrained(folder / "model")
    line = ["proxy", "model", "--upstream", upstream, "--port", "0", "--budget", str(BUDGET), *arguments]
    process = ForkedCommand(line, cwd=folder, environment=ENVIRONMENT)

    def end() -> str:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        return out + err

    try:
        printed, deadline = "", time.monotonic() + 60
        while "Ctrl-C ends" not in printed:
            assert process.poll() is None, printed
            assert time.monotonic() < deadline, printed
            time.sleep(0.02)
            with suppress(FileNotFoundError):  # it is not there yet
                printed = process.errors()
        ((url, token),) = re.findall(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", printed)
        yield url, token, end
    finally:
        process.kill()


def test_the_address_at_a_host_of_ipv6_is_one_that_clients_take(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def models(url: str, token: str) -> int:
        async with ClientSession(headers={"Authorization": f"Bearer {token}"}) as client:
            return (await client.get(f"{url}/models")).status

    options = ("--condenser", "full", "--host", "::1")
    with started("http://127.0.0.1:9/v1", tmp_path, *options) as (url, token, end):
        assert url.startswith("http://[::1]:")
        assert asyncio.run(models(url, token)) == 200
        end()


def test_an_agent_holds_a_conversation_of_30_turns_that_exceeds_the_budget_four_times(tmp_path: Path) -> None:
    prompts: list[list[int]] = []

    def answer(request: Any) -> bytes:
        prompts.append(request["prompt"])
        ids = said(counting_to_30(shown(request["prompt"])))
        return exact(ids, [-0.25] * len(ids))

    options = ("--condenser", "last_k keep_last=3", "rollout.tools.format=tagged")
    with endpoint(Behaviour(answer=answer)) as upstream, started(upstream, tmp_path, *options) as (url, token, end):
        plain = asyncio.run(converse(url, token))
        streamed_one = asyncio.run(converse(url, f"{token}:second", stream=True))
        printed = end()
    assert f"\nlast_k condenses prompts of more than {BUDGET} tokens; shorter ones pass as they are\n" in printed
    assert "session-0: 31 replies, answered." in printed
    folder = tmp_path / "runs" / "proxy"
    assert not load_config(folder / "config.yaml").rollout.limits.ends_at_cut
    read = read_trajectories(folder / "trajectories" / "step_000000.parquet")
    trajectories = sorted((scored.trajectory for scored in read), key=lambda each: each.id)
    assert [each.problem_id for each in trajectories] == ["session-0", "second"]
    assert [tuple(turn.prompt_ids) for each in trajectories for turn in each.turns] == list(map(tuple, prompts))
    for trajectory, messages in zip(trajectories, (plain, streamed_one), strict=True):
        raw = tokenizer().encode("".join(str(message["content"]) for message in messages), add_special_tokens=False)
        assert len(raw) > 4 * BUDGET
        assert (trajectory.stop, trajectory.answer, len(trajectory.turns)) == (StopReason.ANSWERED, "done", 31)
        assert trajectory.max_context_tokens <= BUDGET
        assert broken_invariants(trajectory) == ()
        assert all(turn.logprobs == (-0.25,) * len(turn.output_ids) for turn in trajectory.turns)
        condensed = [turn.condensation.condenser for turn in trajectory.turns if turn.condensation is not None]
        assert len(condensed) > 3
        assert set(condensed) == {"last_k"}
    assert all(token not in file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())
    printed = succeed("inspect", str(folder), "--plain")
    assert "session-0" in printed
    assert "– not judged" in printed
    assert "✗ wrong" not in printed
    succeed("inspect", str(folder), "--check")


def test_any_chat_endpoint_can_be_condensed_for_and_is_recorded_as_text(tmp_path: Path) -> None:
    options = ("--condenser", "truncate", "sampler.name=openai_chat")
    with (
        endpoint(Behaviour(body=completion("hello"))) as upstream,
        started(upstream, tmp_path, *options) as (url, token, end),
    ):
        assert asyncio.run(said_by(url, token, [user("go")])) == "hello"
        status, body = asyncio.run(ask(url, f"{token}:tools", [user("go")], tools=[UP]))
        assert (status, "Set rollout.tools.format=tagged" in body["error"]["message"]) == (502, True)
        printed = end()
        assert "session-0: 1 reply, answered." in printed
        assert "tools: 0 replies, sampler_error. the sampler: " in printed
    (scored,) = read_trajectories(tmp_path / "runs/proxy/trajectories/step_000000.parquet")
    assert scored.trajectory.turns[0].is_text
    succeed("inspect", str(tmp_path / "runs/proxy"), "--tokens", "--plain")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--upstream", "localhost", "--condenser", "full"), "url is 'localhost'"),
        (("--upstream", "http://h/v1", "--condenser", "full, truncate"), "found 2 condensers, wanted one"),
        (("--upstream", "http://h/v1", "--condenser", "ful"), "full"),
        (("--upstream", "http://h/v1", "--condenser", "fold"), "with fold the policy decides by branch, return"),
        (("--upstream", "http://h/v1", "--condenser", "full", "rollout.limit=3"), "rollout.limit"),
    ],
)
def test_a_wrong_option_is_an_error_before_anything_is_written(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    tokenizer().save_pretrained(tmp_path / "model")
    done = run("proxy", "model", *arguments, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_page_names_the_commands_options() -> None:
    (line,) = re.findall(r"^condensegrpo proxy (.*)$", PAGE, re.MULTILINE)
    words = re.findall(r"--[\w-]+", line)
    shown_help = succeed("proxy", "--help")
    assert {"--upstream", "--condenser", "--budget"} <= set(words)
    assert all(word in shown_help for word in words)


# --- sessions ---------------------------------------------------------------------------------------------------------


Proxied = tuple[str, list[Trajectory]]  # the URL of a proxy in this process, and what it has recorded


@asynccontextmanager
async def proxied(
    sampler: Sampler, *, budget: int = 600, condenser: Condenser | None = None, **options: Any
) -> AsyncIterator[Proxied]:
    written: list[Trajectory] = []
    limits = {"max_context_tokens": budget, "turn_seconds": 120.0, "max_turns": 100, "ends_at_cut": False}
    played = engine(sampler, condenser=condenser, condense_when="over_budget", **limits)  # type: ignore[arg-type]  # settings of several types
    served = Proxy(engine=played, tool_format="tagged", token=TOKEN, finished=written.append, **options)
    async with served.serving("127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}/v1", written


def contents(trajectory: Trajectory) -> list[str]:
    return [message.text for turn in trajectory.turns for message in (*turn.context, turn.reply)]


async def named(url: str, session: str, text: str) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Session-Id": session}
    body = {"messages": [user(text)]}
    async with ClientSession(headers=headers) as client, client.post(f"{url}/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


def test_later_messages_of_the_user_survive_through_the_proxy() -> None:
    """Each is answered after a call whose long result the condenser drops."""

    def works(prompt: str) -> str:
        return "ok" if prompt.rfind("page") > prompt.rfind("do ") else call(1)

    async def scenario() -> list[Trajectory]:
        async with proxied(agent(works), budget=900, condenser=LastK(keep_last=1)) as (url, written):
            messages: list[Any] = [user("do 0")]
            for number in range(1, 5):
                messages.append(await replied(url, TOKEN, messages))
                (each,) = messages[-1]["tool_calls"]
                messages.append({"role": "tool", "tool_call_id": each["id"], "content": "page " * 30})
                messages += [await replied(url, TOKEN, messages), user(f"do {number}")]
            await replied(url, TOKEN, messages)
        return written

    (trajectory,) = asyncio.run(scenario())
    assert any(turn.condensation for turn in trajectory.turns)
    shown = [message.text for message in trajectory.turns[-1].context]
    assert [text for text in shown if text.startswith("do ")] == ["do 0", "do 1", "do 2", "do 3", "do 4"]
    assert sum("page" in text for text in shown) < 4


PICTURES = {"chat/completions": "image_url", "messages": "image", "responses": "input_image"}
REFUSED: dict[str, list[dict[str, Any]]] = {  # beside pictures and unknown roles
    "chat/completions": [{"n": 2}, {"logprobs": True}],
    "messages": [{"tool_choice": {"type": "tool", "name": "up"}}],
    "responses": [{"top_logprobs": 5}],
}


@pytest.mark.parametrize("path", PICTURES)
def test_bad_requests_and_a_stream_that_is_cut_cost_a_session_nothing(path: str) -> None:
    name = "input" if path == "responses" else "messages"
    contents = ({"role": "user", "content": [{"type": PICTURES[path]}]}, {"role": "critic", "content": "x"})
    refused = [*({name: [each]} for each in contents), *REFUSED[path], {name: [user("x" * (10 << 20))]}, {}]

    async def scenario() -> tuple[list[tuple[int, Any]], list[Trajectory]]:
        async def post(*messages: Any, key: str = TOKEN, cut: bool = False, **fields: Any) -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {key}", "X-Session-Id": "s", "Content-Type": "application/json"}
            body = {"model": "policy", name: messages, "stream": cut, **fields}
            if path == "messages":
                body["max_tokens"] = 64
            data = io.BytesIO(json.dumps(body).encode())
            async with ClientSession(headers=headers) as client, client.post(f"{url}/{path}", data=data) as answer:
                if not cut:
                    return answer.status, await answer.json()
                while b"reply" not in (line := await answer.content.readline()):
                    assert line, "the stream ended before its text"
                answer.close()
                return answer.status, None

        async with proxied(agent(numbered()), budget=4000) as (url, written):
            assert (await post(user("go")))[0] == 200
            answers = [await post(user("go"), key=TOKEN if each else "wrong", **each) for each in refused]
            history = (user("go"), assistant("reply 0"), user("on"))
            assert await post(*history, cut=True) == (200, None)
            assert (await post(*history, assistant("reply 1"), user("further")))[0] == 200
        return answers, written

    answers, (trajectory,) = asyncio.run(scenario())
    assert [status for status, _ in answers] == [400] * (len(refused) - 2) + [413, 401]
    for _, body in answers:
        assert body["error"]["message"]
        assert body.get("type") == ("error" if path == "messages" else None)
    assert [turn.reply.text for turn in trajectory.turns] == ["reply 0", "reply 1", "reply 2"]
    assert [turn.condensation for turn in trajectory.turns] == [None] * 3
    assert broken_invariants(trajectory) == ()


def test_a_request_belongs_to_the_conversation_that_it_continues() -> None:
    """Three agents begin alike at the same time, and one of them rewrites its history."""

    async def scenario() -> list[Trajectory]:
        async with proxied(agent(numbered())) as (url, written):
            first = [user("go")]
            replies = await asyncio.gather(*(said_by(url, TOKEN, first) for _ in range(3)))
            for reply in reversed(replies):
                await said_by(url, TOKEN, [*first, assistant(f"{reply} and more"), user(f"after {reply}")])
            newest = replies[0]  # the session that was used last but is not the newest one
            await said_by(url, TOKEN, [user("go"), assistant(newest), user(f"after {newest}")])
            other = await said_by(url, TOKEN, [user("stay")])
            await said_by(url, TOKEN, [user("stay"), user("a summary of mine")])
            assert other
        return written

    *same, rewriting = sorted(asyncio.run(scenario()), key=lambda each: int(each.id.split("/")[1]))
    assert sorted(len(each.turns) for each in same) == [2, 2, 3]
    for each in same:
        texts = contents(each)
        assert f"after {texts[1]}" in texts[4]
    assert rewriting.turns[1].condensation is not None
    assert rewriting.turns[1].condensation.condenser == "agent"


@pytest.mark.parametrize("replies", [("Yes", "Yes, I will."), (call(1), call(2))])
def test_sessions_that_begin_alike_are_told_apart_by_their_replies(replies: tuple[str, str]) -> None:
    """One reply begins as the other does, or both are calls without a text."""
    left = list(replies)

    async def scenario() -> list[Trajectory]:
        async with proxied(agent(lambda prompt: "done" if "next" in prompt else left.pop(0))) as (url, written):
            first = [user("go")]
            bodies = [await ask(url, TOKEN, first, tools=[UP]) for _ in replies]
            said = [body["choices"][0]["message"] for _, body in bodies]
            for number, reply in enumerate(said):
                calls = []
                for each in reply.get("tool_calls", ()):
                    written_anew = json.dumps(json.loads(each["function"]["arguments"]), indent=1)
                    each["function"]["arguments"] = written_anew  # as a client that parsed it sends it back
                    calls.append({"role": "tool", "tool_call_id": each["id"], "content": "ok"})
                await ask(url, TOKEN, [*first, reply, *calls, user(f"next {number}")], tools=[UP])
        return written

    written = asyncio.run(scenario())
    assert sorted(replies.index(each.turns[0].reply.text) for each in written) == [0, 1]
    for trajectory in written:
        number = replies.index(trajectory.turns[0].reply.text)
        assert f"next {number}" in trajectory.turns[1].context[-1].text
        assert trajectory.turns[1].condensation is None


def test_sessions_are_named_by_a_header_or_behind_the_token() -> None:
    async def scenario() -> list[Trajectory]:
        async with proxied(agent(numbered())) as (url, written):
            for session in ("a", "b", "a"):
                assert (await named(url, session, f"to {session}"))[0] == 200
            await said_by(url, f"{TOKEN}:b", [user(f"my key is {TOKEN}")])
            for key in ("wrong", f"{TOKEN}x", "", f"x{TOKEN}"):
                assert (await ask(url, key, [user("go")]))[0] == 401
            async with ClientSession() as client:
                async with client.get(f"{url}/models") as answer:
                    assert answer.status == 401
                async with client.get(f"{url}/models", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                    assert (await answer.json())["data"][0]["id"]
        return written

    a, b = asyncio.run(scenario())
    assert [(each.problem_id, len(each.turns)) for each in (a, b)] == [("a", 2), ("b", 2)]
    assert contents(b)[2] == "my key is ***"


def test_an_upstream_that_fails_ends_the_session_with_its_reason_and_the_next_request_begins_one() -> None:
    class Failing(ScriptedSampler):
        async def sample(self, prompt_ids: Any, params: SamplingParams) -> Generation:
            if "fail" in shown(prompt_ids):
                raise SamplerError("sampling a reply: 3 attempts failed; the last: asking http://gpu/v1: 503")
            return await super().sample(prompt_ids, params)

    async def scenario() -> list[Trajectory]:
        async with proxied(Failing(lambda _: said("ok"))) as (url, written):
            await said_by(url, f"{TOKEN}:s", [user("go")])
            status, body = await ask(url, f"{TOKEN}:s", [user("go"), assistant("ok"), user("fail")])
            assert (status, body["error"]["type"]) == (502, "server_error")
            assert "the session has ended (sampler_error): the sampler: SamplerError" in body["error"]["message"]
            assert "503" in body["error"]["message"]
            status, body = await ask(url, f"{TOKEN}:s", [user("x" * 700)])
            assert (status, "context_overflow" in body["error"]["message"]) == (400, True)
            status, body = await ask(url, f"{TOKEN}:t", [user("go")], n=2)
            assert (status, body["error"]["param"]) == (400, "n")
            assert (await ask(url, f"{TOKEN}:s", [user("go")]))[0] == 200
        return written

    ended = [(trajectory.stop, len(trajectory.turns)) for trajectory in asyncio.run(scenario())]
    assert ended == [(StopReason.SAMPLER_ERROR, 1), (StopReason.CONTEXT_OVERFLOW, 0), (StopReason.ANSWERED, 1)]


def test_all_requests_of_a_session_that_cannot_begin_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Session) -> None:
        await asyncio.sleep(0.2)
        raise OSError("too many open files")

    async def scenario() -> list[Any]:
        async with proxied(agent(numbered())) as (url, _):
            monkeypatch.setattr(Session, "start", fail)
            return await asyncio.gather(*(ask(url, f"{TOKEN}:s", [user("go")]) for _ in range(3)))

    for status, body in asyncio.run(scenario()):
        assert status == 502
        assert "too many open files" in body["error"]["message"]


def test_a_request_that_comes_while_its_session_closes_is_told_why_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of the last request has left: nobody was told yet."""
    close = Session.close

    async def scenario() -> tuple[int, Any]:
        asked, left, closing = asyncio.Event(), asyncio.Event(), asyncio.Event()

        class Failing(ScriptedSampler):
            async def sample(self, prompt_ids: Any, params: SamplingParams) -> Generation:
                asked.set()
                await left.wait()
                raise SamplerError("no room")

        async def slow(session: Session) -> None:
            await close(session)
            closing.set()
            await asyncio.sleep(0.5)

        monkeypatch.setattr(Session, "close", slow)
        async with proxied(Failing(lambda _: said("ok"))) as (url, written):
            first = asyncio.create_task(ask(url, f"{TOKEN}:s", [user("go")]))
            await asked.wait()
            first.cancel()
            await asyncio.sleep(0.2)
            left.set()
            await closing.wait()
            async with asyncio.timeout(10):
                answered: tuple[int, Any] = await ask(url, f"{TOKEN}:s", [user("go")])
            assert len(written) == 1  # it began no session of its own
        return answered

    status, body = asyncio.run(scenario())
    assert status == 502
    assert "the session has ended (sampler_error): the sampler: SamplerError: no room" in body["error"]["message"]


@pytest.mark.parametrize(("options", "limit"), [({}, 8), ({"max_bytes": 2 << 20}, 2)])
def test_a_body_that_cannot_be_read_is_refused_in_the_form_of_openai(options: Any, limit: int) -> None:
    async def scenario() -> list[tuple[int, str]]:
        headers, answers = {"Authorization": f"Bearer {TOKEN}"}, []
        async with proxied(agent(numbered()), **options) as (url, _), ClientSession(headers=headers) as client:
            for body in (
                io.BytesIO(b"x" * ((limit << 20) + 1)),
                b'{"messages": [{"role": "user", "content": "\xff"}]}',
            ):
                async with client.post(f"{url}/chat/completions", data=body) as answer:
                    answers.append((answer.status, (await answer.json())["error"]["message"]))
        return answers

    long, damaged = asyncio.run(scenario())
    assert long == (413, f"the body exceeds {limit} MiB")
    assert damaged[0] == 400
    assert "no UTF-8" in damaged[1]


def test_a_session_that_cannot_be_written_is_counted_and_the_next_one_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> list[Trajectory]:
        async with proxied(agent(numbered())) as (url, written):
            await asyncio.gather(*(named(url, name, "go") for name in ("lost", "kept")))
        return written

    lost, kept = sorted(asyncio.run(scenario()), key=lambda each: each.problem_id, reverse=True)
    tokenizer().save_pretrained(tmp_path / "model")
    config, run = load_config(find_config("quickstart")), tmp_path / "run"
    folder, printed = run / "trajectories", ""
    with _recorded(config, str(tmp_path / "model"), run) as record:
        folder.rmdir()
        folder.touch()  # no file can be made below it, as on a full disk
        record(lost)
        while "lost: not recorded, 1 session so far. writing" not in printed:
            time.sleep(0.02)
            printed += capsys.readouterr().err
        folder.unlink()
        folder.mkdir()
        record(kept)
    assert "1 session not recorded: lost" in capsys.readouterr().err
    (scored,) = read_trajectories(folder / "step_000000.parquet")
    assert scored.trajectory.problem_id == "kept"


def test_a_large_request_is_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    in_main = list[bool]()
    beside = TextEncoder._encode_large

    def recorded(encoder: TextEncoder, text: str) -> Any:
        in_main.append(threading.current_thread() is threading.main_thread())
        return beside(encoder, text)

    async def scenario() -> None:
        async with proxied(agent(numbered()), budget=10**6) as (url, _):
            messages = [user("word " * 20_000)]
            for text in ("more <|im_end|> " * 6000, "last"):
                reply = await said_by(url, TOKEN, messages)
                messages += [assistant(reply), user(text)]

    monkeypatch.setattr(TextEncoder, "_encode_large", recorded)
    asyncio.run(scenario())
    assert in_main
    assert not any(in_main)


def test_a_key_that_is_no_text_is_refused() -> None:
    async def scenario() -> bytes:
        async with proxied(agent(numbered())) as (url, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
            status = await reader.readline()
            writer.close()
        return status

    assert asyncio.run(scenario()).split()[1] == b"401"


@pytest.mark.parametrize(("seconds", "share", "closed"), [(3600.0, 8, 12), (0.3, 1, 20)])
def test_connections_without_a_request_are_limited_and_closed(
    seconds: float, share: int, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer may have eight, or each of them 0.3 seconds."""
    monkeypatch.setattr(agent_endpoint, "SILENT_SECONDS", seconds)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(agent_endpoint, "SILENT_SHARE", share)

    async def scenario() -> tuple[int, int]:
        async with proxied(agent(numbered())) as (url, _):
            opened = [await asyncio.open_connection("127.0.0.1", urlsplit(url).port) for _ in range(20)]
            for _, writer in opened:
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
            ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
            async with asyncio.timeout(20):
                while sum(end.done() for end in ends) < closed:
                    await asyncio.sleep(0.02)
            done = sum(end.done() for end in ends)
            for _, writer in opened:
                writer.close()
            await asyncio.sleep(0.2)
            status, _ = await ask(url, TOKEN, [user("go")])
            await asyncio.gather(*ends, return_exceptions=True)
        return status, done

    assert asyncio.run(scenario()) == (200, closed)


def test_connections_that_cannot_be_accepted_are_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    caplog.clear()  # of what earlier tests left

    async def scenario() -> None:
        async with proxied(agent(numbered())):
            for _ in range(1000):
                fault = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many")}
                asyncio.get_running_loop().call_exception_handler(fault)

    asyncio.run(scenario())
    assert [record.message for record in caplog.records] == ["accepting connections of agents: [Errno 24] Too many"]


def test_a_route_that_is_not_there_is_refused_with_those_that_are() -> None:
    async def scenario() -> list[tuple[int, str]]:
        answers = []
        async with proxied(agent(numbered())) as (url, _), ClientSession() as client:
            for path in ("/completions", "/chat/completions"):
                async with client.get(f"{url}{path}") as answer:
                    answers.append((answer.status, (await answer.json())["error"]["message"]))
        return answers

    routes = (
        "only POST /v1/chat/completions, POST /v1/messages, POST /v1/responses, POST /v1/messages/count_tokens "
        "and GET /v1/models"
    )
    assert asyncio.run(scenario()) == [
        (404, f"there is no GET /v1/completions here, {routes}"),
        (405, f"there is no GET /v1/chat/completions here, {routes}"),
    ]


def test_a_reply_that_was_cut_off_reaches_the_agent_and_the_session_goes_on() -> None:
    async def scenario() -> list[Trajectory]:
        async with proxied(ScriptedSampler(lambda _: said("o" * 100))) as (url, written):
            _, answer = await named(url, "s", "go")
            (choice,) = answer["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("o" * 80, "length")
            await said_by(url, f"{TOKEN}:s", [user("go"), assistant("o" * 80), user("on")])
        return written

    (trajectory,) = asyncio.run(scenario())
    assert [turn.condensation for turn in trajectory.turns] == [None, None]
    assert broken_invariants(trajectory) == ()


def test_an_idle_session_is_written_and_closed() -> None:
    async def scenario() -> tuple[int, int]:
        async with proxied(agent(numbered()), idle_seconds=0.1) as (url, written):
            await named(url, "a", "go")
            async with asyncio.timeout(60):
                while not written:
                    await asyncio.sleep(0.02)
            early = len(written)
            await named(url, "a", "go")
        return early, len(written)

    assert asyncio.run(scenario()) == (1, 2)


def test_at_the_end_a_reply_under_way_is_sent_and_recorded() -> None:
    async def scenario() -> tuple[Any, list[Trajectory]]:
        asked = asyncio.Event()

        def reply(prompt_ids: tuple[int, ...]) -> list[int]:
            asked.set()
            return said("late")

        async with proxied(ScriptedSampler(reply, seconds=0.3)) as (url, written):
            request = asyncio.create_task(said_by(url, TOKEN, [user("go")]))
            await asked.wait()
        return await request, written

    reply, (trajectory,) = asyncio.run(scenario())
    assert (reply, trajectory.answer) == ("late", "late")


def test_floods_are_refused_and_32_sessions_at_a_time_leave_nothing() -> None:
    before = listening()

    async def counts_up(url: str, number: int) -> int:
        messages: list[Any] = [user(f"agent {number}")]
        count = 0
        while True:
            reply = await replied(url, f"{TOKEN}:{number}", messages)
            messages.append(reply)
            if not reply.get("tool_calls"):
                return len(messages)
            count += 1
            result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": f"at {count}"}
            messages.append(result)

    async def scenario() -> tuple[list[int], list[int], list[int], list[Trajectory]]:
        async with proxied(agent(counts), budget=2000, sessions=32) as (url, written):
            lengths = await asyncio.gather(*(counts_up(url, number) for number in range(32)))
            more = [(await ask(url, f"{TOKEN}:{number}", [user("go")]))[0] for number in (32, 33)]
            flood = await asyncio.gather(*(ask(url, f"{TOKEN}:0", [user(f"{number}")]) for number in range(60)))
            left = asyncio.create_task(ask(url, f"{TOKEN}:1", [user("gone")]))
            await asyncio.sleep(0.01)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        await all_tasks_end()
        return list(lengths), more, [status for status, _ in flood], written

    lengths, more, flood, written = asyncio.run(scenario())
    assert lengths == [8] * 32
    assert more == [429, 429]
    assert set(flood) == {200, 429}
    assert flood.count(200) >= 32
    assert len(written) == 32
    assert listening() == before
