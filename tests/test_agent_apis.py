"""Agents that speak Anthropic's Messages and OpenAI's Responses, through the official clients, unmodified."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from talk import agent, engine
from test_agent import UP, contents, counting, counts, function, numbered, play, rows

from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.integrations.proxy import Proxy
from condensegrpo.tasks.agent_endpoint import DIALECTS
from condensegrpo.tasks.agent_request import RequestRefused, read_request

CHAT, MESSAGES, RESPONSES = DIALECTS
SCHEMA = UP["function"]["parameters"]
A_TOOL = {"name": "up", "description": "Counts up.", "input_schema": SCHEMA}
R_TOOL = {"type": "function", "name": "up", "description": "Counts up.", "parameters": SCHEMA, "strict": False}
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch="
Agent = Callable[[Problem, str, str], Awaitable[str]]
anthropic: Any = None
openai: Any = None


@pytest.fixture(scope="module", autouse=True)
def clients() -> None:
    """Import the clients in the worker that runs this file: that takes seconds."""
    global anthropic, openai
    anthropic, openai = (
        pytest.importorskip(name, reason=f"{name} is not installed: make install") for name in ("anthropic", "openai")
    )


@asynccontextmanager
async def of_anthropic(url: str, key: str) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as client:
        yield client


@asynccontextmanager
async def of_openai(url: str, key: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        yield client


async def message(client: Any, *, stream: bool = False, **fields: Any) -> Any:
    asked = {"model": "policy", "max_tokens": 64, **fields}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


async def response(client: Any, *, stream: bool = False, **fields: Any) -> Any:
    asked = {"model": "policy", **fields}
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        return await events.get_final_response()


def with_messages(*, stream: bool = False, **fields: Any) -> Agent:
    async def counts_up(problem: Problem, url: str, key: str) -> str:
        """As Claude Code: a system prompt of blocks, and the whole history in every request."""
        messages: list[Any] = [{"role": "user", "content": problem.question}]
        at = requests = 0
        async with of_anthropic(url, key) as client:
            while True:
                requests += 1
                system = [
                    {"type": "text", "text": f"{BILLING}{requests};"},
                    {"type": "text", "text": "Count.", "cache_control": {"type": "ephemeral"}},
                ]
                asked = {"system": system, "tools": [A_TOOL], "messages": messages, **fields}
                reply = await message(client, stream=stream, **asked)
                messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
                calls = [block for block in reply.content if block.type == "tool_use"]
                if not calls:
                    assert reply.stop_reason == "end_turn"
                    return f"{reply.content[-1].text} at {at}"
                assert reply.stop_reason == "tool_use"
                at += sum(each.input["by"] for each in calls)
                results = [{"type": "tool_result", "tool_use_id": each.id, "content": f"at {at}"} for each in calls]
                messages.append({"role": "user", "content": results})

    return counts_up


def with_responses(*, stream: bool = False, stored: bool = False) -> Agent:
    async def counts_up(problem: Problem, url: str, key: str) -> str:
        """As Codex: the items of every reply come back; or, ``stored``, as an agent that names the last response."""
        history: list[Any] = [{"role": "user", "content": problem.question}]
        at, newest, last = 0, history, None
        async with of_openai(url, key) as client:
            while True:
                asked = {"input": newest, "previous_response_id": last} if stored else {"input": history}
                reply = await response(client, stream=stream, instructions="Count.", tools=[R_TOOL], **asked)
                calls = [item for item in reply.output if item.type == "function_call"]
                if not calls:
                    return f"{reply.output_text} at {at}"
                at += sum(json.loads(each.arguments)["by"] for each in calls)
                newest = [
                    {"type": "function_call_output", "call_id": each.call_id, "output": f"at {at}"} for each in calls
                ]
                history = [*history, *(item.model_dump(exclude_none=True) for item in reply.output), *newest]
                last = reply.id

    return counts_up


def with_chat(problem: Problem, url: str, key: str) -> Awaitable[str]:
    return counting(problem, url, key)


AGENTS = {
    "messages": with_messages(),
    "messages streamed": with_messages(stream=True),
    "responses": with_responses(),
    "responses streamed": with_responses(stream=True),
    "responses by id": with_responses(stored=True),
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_one_row_whatever_it_speaks(tmp_path: Path, name: str) -> None:
    """Its turns are those of an agent of chat completions, and each prompt continues the last one."""
    trajectory = play(function(rows(tmp_path), AGENTS[name]), counts)
    assert trajectory.answer == "done at 3", trajectory.detail
    same = play(function(rows(tmp_path), with_chat), counts)
    assert [each[1:] for each in contents(trajectory)] == [each[1:] for each in contents(same)]
    assert [turn.output_ids for turn in trajectory.turns] == [turn.output_ids for turn in same.turns]
    assert [turn.condensation for turn in trajectory.turns] == [None] * 4


def thinking(prompt: str) -> str:
    return f"<think>I have {prompt.count('at ')}.</think>{counts(prompt)}"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_blocks_and_items_and_come_back_in_one_row(tmp_path: Path, stream: bool) -> None:
    data, seen = rows(tmp_path), list[str]()

    async def asks(problem: Problem, url: str, key: str) -> str:
        asked = {"messages": [{"role": "user", "content": "go"}]}
        async with of_anthropic(url, key) as client:
            thought = {"type": "enabled", "budget_tokens": 1024}
            for fields in ({}, {"thinking": thought, "max_tokens": 2048}):
                reply = await message(client, stream=stream, **asked, **fields)
                seen.extend(getattr(block, block.type) for block in reply.content)
        async with of_openai(url, key) as client:
            reply = await response(client, stream=stream, input="go")
        seen.extend((reply.output[0].summary[0].text, reply.output_text))
        return "asked"

    assert play(function(data, asks), lambda prompt: "<think>hm</think>yes").answer == "asked"
    assert seen == ["yes", "hm", "yes", "hm", "yes"]
    enabled = with_messages(stream=stream, thinking={"type": "adaptive"})
    for each in (enabled, with_responses(stream=stream)):
        trajectory = play(function(data, each), thinking)
        assert trajectory.answer == "done at 3", trajectory.detail
        assert [turn.condensation for turn in trajectory.turns] == [None] * 4
        assert trajectory.turns[1].reply.reasoning == "I have 1."


def test_a_message_says_why_it_ended(tmp_path: Path) -> None:
    replies = iter(["one STOP", "much too long a reply", "two"])

    async def asks(problem: Problem, url: str, key: str) -> str:
        ended = list[Any]()
        async with of_anthropic(url, key) as client:
            for _ in range(3):
                reply = await message(client, messages=[{"role": "user", "content": "go"}], stop_sequences=["STOP"])
                ended.append((reply.content[0].text, reply.stop_reason, reply.stop_sequence))
        return json.dumps(ended)

    trajectory = play(
        function(rows(tmp_path), asks), lambda prompt: next(replies), max_output_tokens=9, ends_at_cut=False
    )
    assert trajectory.answer is not None, trajectory.detail
    assert json.loads(trajectory.answer) == [
        ["one ", "stop_sequence", "STOP"],
        ["much too ", "max_tokens", None],
        ["two", "end_turn", None],
    ]


def test_a_tool_of_one_text_is_called_with_it_and_tools_of_the_vendor_are_not_shown(tmp_path: Path) -> None:
    patch = {"type": "custom", "name": "patch", "description": "Applies a patch."}

    async def patches(problem: Problem, url: str, key: str) -> str:
        history: list[Any] = [{"role": "user", "content": "go"}]
        async with of_openai(url, key) as client:
            for _ in range(2):
                reply = await response(client, input=history, tools=[patch, {"type": "web_search"}], store=False)
                history += [item.model_dump(exclude_none=True) for item in reply.output]
                if reply.output[-1].type == "custom_tool_call":
                    made = reply.output[-1]
                    done = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "at 1"}
                    history.append(done)
        return f"{made.name} {made.input}"

    def policy(prompt: str) -> str:
        assert "web_search" not in prompt
        return "done" if "at 1" in prompt else '<tool>{"name": "patch", "args": {"input": "+ a\\n- b"}}</tool>'

    trajectory = play(function(rows(tmp_path), patches), policy)
    assert trajectory.answer == "patch + a\n- b", trajectory.detail
    assert [turn.condensation for turn in trajectory.turns] == [None, None]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
A_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "type 'image', wanted text"),
    ({"messages": [{"role": "critic", "content": "go"}]}, "messages[0].role is 'critic', known: user"),
    ({"tool_choice": {"type": "tool", "name": "up"}}, "tool_choice.type is 'tool'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is"),
    ({"messages": []}, "there is no message"),
    ({"tools": [{"name": 3, "input_schema": {}}]}, "tools[0].name is 3, wanted a text"),
    ({"system": 3}, "system is 3"),
    ({"messages": 3}, "messages is 3, wanted a list"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3, wanted a list"),
    ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "a part of type [], wanted text"),
]
R_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "type 'input_image', wanted text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type is 'item_reference'"),
    ({"input": [{"role": "critic", "content": "go"}]}, "input[0].role is 'critic'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.type is 'json_schema'"),
    ({"background": True}, "background is true, and this endpoint takes false"),
    ({"conversation": "conv_1"}, 'conversation is "conv_1", and this endpoint takes nothing'),
    ({"previous_response_id": "resp_1"}, "previous_response_id 'resp_1' is of no response"),
    ({"previous_response_id": []}, "previous_response_id [] is of no response"),
    ({"input": []}, "there is no message"),
    ({"instructions": 3}, "instructions is 3, wanted a text"),
]


@pytest.mark.parametrize(
    ("dialect", "fields", "said"),
    [(MESSAGES, *each) for each in A_REFUSED] + [(RESPONSES, *each) for each in R_REFUSED],
)
def test_what_is_not_there_is_refused_with_its_name(dialect: Any, fields: dict[str, Any], said: str) -> None:
    good = {"messages": [{"role": "user", "content": "go"}]} if dialect is MESSAGES else {"input": "go"}

    async def refused() -> str:
        with pytest.raises(RequestRefused) as error:
            read_request(json.dumps({**good, **fields}), dialect)
        return str(error.value)

    assert said in asyncio.run(refused())


def test_a_refusal_has_the_form_of_its_api_and_the_episode_goes_on(tmp_path: Path) -> None:
    async def tries(problem: Problem, url: str, key: str) -> str:
        go = [{"role": "user", "content": "go"}]
        async with of_anthropic(url, key) as client:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await message(client, messages=[{"role": "user", "content": [PICTURE]}])
            assert refused.value.body["error"]["type"] == "invalid_request_error"
        async with of_anthropic(url, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await message(client, messages=go)
            assert unknown.value.body["type"] == "error"
        async with of_openai(url, key) as client:
            with pytest.raises(openai.BadRequestError, match="background is true"):
                await response(client, input="go", background=True)
            unstored = await response(client, input="go", store=False)
            with pytest.raises(openai.NotFoundError, match="of no response that was stored here"):
                await response(client, input="on", previous_response_id=unstored.id)
            return str((await response(client, input="go")).output_text)

    trajectory = play(function(rows(tmp_path), tries), numbered())
    assert trajectory.answer == "reply 1", trajectory.detail


def test_tokens_are_counted_as_the_prompt_has_them(tmp_path: Path) -> None:
    counted = list[int]()

    async def counting_tokens(problem: Problem, url: str, key: str) -> str:
        asked: dict[str, Any] = {"system": "Count.", "tools": [A_TOOL], "messages": [{"role": "user", "content": "go"}]}
        async with of_anthropic(url, key) as client:
            counted.append((await client.messages.count_tokens(model="policy", **asked)).input_tokens)
            await message(client, **asked)
            assert [each.id async for each in client.models.list()] == ["policy"]
        return "counted"

    trajectory = play(function(rows(tmp_path), counting_tokens), numbered())
    assert trajectory.answer == "counted", trajectory.detail
    assert counted == [len(trajectory.turns[0].prompt_ids)]


@pytest.mark.parametrize("name", ["messages streamed", "responses"])
def test_the_proxy_speaks_them_too(name: str) -> None:
    finished = list[Trajectory]()

    async def through() -> str:
        proxy = Proxy(
            engine=engine(agent(counts), max_context_tokens=4000, turn_seconds=120.0),
            tool_format="tagged",
            token="the-token",
            finished=finished.append,
        )
        async with proxy.serving("127.0.0.1", 0) as port:
            url = f"http://127.0.0.1:{port}/v1"
            said = await AGENTS[name](Problem(id="p", question="count to 3"), url, "the-token:named")
            async with of_anthropic(url, "the-token") as client:
                go = [{"role": "user", "content": "go"}]
                counted.append((await client.messages.count_tokens(model="policy", messages=go)).input_tokens)
                await message(client, messages=go)
            with pytest.raises(anthropic.AuthenticationError):
                async with of_anthropic(url, "another") as client:
                    await message(client, messages=go)
            return said

    counted = list[int]()
    assert asyncio.run(through()) == "done at 3"
    trajectory, other = finished
    assert (trajectory.problem_id, len(trajectory.turns)) == ("named", 4)
    assert [turn.condensation for turn in trajectory.turns] == [None] * 4
    assert counted == [len(other.turns[0].prompt_ids)]
