"""Agents that call the policy as an OpenAI model: what they are sent, what is recorded, what stays of them."""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import ClientSession
from command import ROOT, succeed
from recipe_world import make_model
from talk import agent, engine

from condensegrpo.condensers.last_k import LastK
from condensegrpo.core.plugins import load
from condensegrpo.core.protocols import Problem
from condensegrpo.core.trajectory import SpanStatus, Stop, Trajectory
from condensegrpo.episodes.episode import run_episode
from condensegrpo.sandbox.limits import SandboxLimits
from condensegrpo.storage.trackers import read_metrics
from condensegrpo.tasks.agent import Agent
from condensegrpo.tasks.agent_request import RequestRefused, read_request

UP = {
    "type": "function",
    "function": {
        "name": "up",
        "description": "Counts up.",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
    },
}
PAGE = (ROOT / "docs" / "how-to" / "train-an-agent.md").read_text(encoding="utf-8")
PROGRAM, SOLVER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def rows(folder: Path) -> str:
    file = folder / "rows.jsonl"
    lines = [{"question": f"count to {number}", "answer": str(number), "start": 1} for number in range(2, 40)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(file)


def call(by: int) -> str:
    return f'<tool>{{"name": "up", "args": {{"by": {by}}}}}</tool>'


def counts(prompt: str) -> str:
    """A policy that counts up by 1 until the tool says 3."""
    newest = re.findall(r"at (\d+)", prompt)
    return "done" if newest and newest[-1] == "3" else f"up {call(1)}"


async def plays(task: Agent, policy: Callable[[str], str] = counts, sample: int = 0, **options: Any) -> Trajectory:
    return await run_episode(
        task.problems("train")[0],
        environment=task.environment,
        engine=engine(agent(policy), **{"max_context_tokens": 4000, "turn_seconds": 20.0, **options}),
        group_id="1/0",
        sample=sample,
        seed=lambda number: number,
    )


def play(task: Agent, policy: Callable[[str], str] = counts, **options: Any) -> Trajectory:
    return asyncio.run(plays(task, policy, **options))


def function(data: str, program: Any, **options: Any) -> Agent:
    return Agent(program=program, data=data, tool_format="tagged", **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def ask(url: str, key: str, messages: Sequence[Any], **fields: Any) -> Any:
    async with (
        ClientSession() as session,
        session.post(
            f"{url}/chat/completions",
            json={"messages": messages, **fields},
            headers={"Authorization": f"Bearer {key}"},
        ) as response,
    ):
        return response.status, await response.json()


async def said(url: str, key: str, messages: Sequence[Any], **fields: Any) -> str:
    status, body = await ask(url, key, messages, **fields)
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


async def counting(problem: Problem, url: str, key: str) -> str:
    """An agent with a tool that keeps its history as clients of OpenAI do."""
    messages: list[Any] = [{"role": "system", "content": f"Count. {key}"}, user(problem.question)]
    at = 0
    while True:
        _, body = await ask(url, key, messages, tools=[UP])
        reply = body["choices"][0]["message"]
        messages.append(reply)
        if "tool_calls" not in reply:
            return f"{reply['content']} at {at}"
        for each in reply["tool_calls"]:
            at += json.loads(each["function"]["arguments"])["by"]
            messages.append({"role": "tool", "tool_call_id": each["id"], "content": f"at {at}"})


def test_an_agent_is_recorded_as_the_engine_records_an_environment(tmp_path: Path) -> None:
    trajectory = play(function(rows(tmp_path), counting))
    assert (trajectory.stop, trajectory.answer) == (Stop.ANSWERED, "done at 3"), trajectory.detail
    assert [turn.observations[0].content for turn in trajectory.turns[:3]] == [
        f"<result>at {count}</result>" for count in (1, 2, 3)
    ]
    assert [(turn.tool_attempts, turn.tool_successes) for turn in trajectory.turns] == [(1, 1)] * 3 + [(0, 0)]
    assert all(turn.condensation is None for turn in trajectory.turns)
    assert all(
        turn.added_ids(last) is not None for last, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False)
    )
    system = trajectory.turns[0].context[0].text
    assert '"name": "up", "description": "Counts up."' in system
    assert system.startswith("Count. [removed]")  # its key


def files(folder: Path) -> str:
    """The folder ``counter`` of the guide, and its configuration beside it."""
    (folder / "counter").mkdir()
    (folder / "counter" / "agent.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "counter.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0], encoding="utf-8")
    return str(folder / "counter")


def test_the_program_of_the_guide_is_played_and_judged(tmp_path: Path) -> None:
    task = Agent(
        program=(sys.executable, "agent.py", "{question}"),
        folder=files(tmp_path),
        data=rows(tmp_path),
        answer_file="answer.txt",
        outcome=(sys.executable, "-c", "print(int(open('answer.txt').read()) / 10)"),
        tool_format="tagged",
    )
    trajectory = play(task)
    assert (trajectory.stop, trajectory.answer, trajectory.outcome) == (Stop.ANSWERED, "3", 0.3), trajectory.detail
    assert len(trajectory.turns) == 4


def test_the_function_of_the_guide_is_played(tmp_path: Path) -> None:
    (tmp_path / "solver.py").write_text(SOLVER, encoding="utf-8")
    task = load("tasks", f"{tmp_path}/solver.py:solver")(data=rows(tmp_path), tool_format="tagged")
    assert play(task, numbered()).answer == "reply 1"


def test_the_configuration_of_the_guide_trains(tmp_path: Path) -> None:
    """Two steps; a random policy gets a reward for what it says, so that there is something to learn."""
    files(tmp_path)
    rows(tmp_path)
    make_model(tmp_path / "model", steps=20)
    script = "import random; print(random.random())"
    succeed(
        "train",
        "counter.yaml",
        f"model.path={tmp_path / 'model'}",
        "task.data=rows.jsonl",
        f"task.options.outcome=[python3, -c, '{script}']",
        "reward.name=environment",
        "rollout.limits={max_turns: 12, max_context_tokens: 1000, max_output_tokens: 24}",
        "train={steps: 2, problems_per_step: 2, samples_per_problem: 2, eval_every: 0}",
        "evaluate.problems=2",
        "learner.threads=1",
        cwd=tmp_path,
    )
    lines = [line for line in read_metrics(tmp_path / "runs/counter/metrics.jsonl") if "rows" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert any(line["grad_norm"] > 0 for line in lines)


def numbered() -> Callable[[str], str]:
    count = iter(range(100))
    return lambda prompt: f"reply {next(count)}"


def contents(trajectory: Trajectory) -> list[list[str]]:
    return [[message.text for message in turn.context] for turn in trajectory.turns]


def test_text_that_the_agent_adds_to_a_reply_follows_it_untrained_and_the_prompt_continues(tmp_path: Path) -> None:
    """As smolagents does: the stop string that was cut off, and ``Calling tools: […]`` behind what the policy said."""

    async def adds(problem: Problem, url: str, key: str) -> str:
        first = [user("go")]
        reply = await said(url, key, first, stop=["0"])
        assert reply == "reply "
        then = [*first, assistant(f"{reply}0\nCalling tools: [x]"), user("Observation: 4")]
        second = await said(url, key, then)
        return await said(url, key, [*then, assistant(second), user("more")])

    trajectory = play(function(rows(tmp_path), adds), numbered())
    assert contents(trajectory) == [
        ["go"],
        ["go", "reply 0", "Calling tools: [x]\n\nObservation: 4"],
        ["go", "reply 0", "Calling tools: [x]\n\nObservation: 4", "reply 1", "more"],
    ]
    assert [turn.condensation for turn in trajectory.turns] == [None] * 3
    assert trajectory.answer == "reply 2"


def test_what_an_agent_changes_in_its_history_is_a_declared_condensation(tmp_path: Path) -> None:
    async def edits(problem: Problem, url: str, key: str) -> float:
        first = [user("go")]
        kept = [*first, assistant(await said(url, key, first)), user("a")]
        long = [*kept, assistant(await said(url, key, kept)), user("b")]
        shorter = [*first, assistant("short"), user("a, b")]  # reply 0 is changed, reply 1 left out
        last = await said(url, key, shorter)
        await said(url, key, [*shorter, assistant(last), user("c")])
        await said(url, key, long)
        return 0.5

    trajectory = play(function(rows(tmp_path), edits), numbered())
    assert trajectory.outcome == 0.5
    assert contents(trajectory) == [
        ["go"],
        ["go", "reply 0", "a"],
        ["go", "short", "a, b"],
        ["go", "short", "a, b", "reply 2", "c"],
        ["go", "reply 0", "a", "reply 1", "b"],
    ]
    declared = [turn.condensation for turn in trajectory.turns]
    assert [each and each.condenser for each in declared] == [None, None, "agent", None, "agent"]
    assert declared[2] is not None
    assert declared[2].reason == ("the agent rewrote its history: replies left out, replies or results changed")
    assert [(span.first, span.last, span.status) for span in declared[2].spans] == [
        (0, 0, SpanStatus.REWRITTEN),
        (1, 1, SpanStatus.DROPPED),
    ]


def test_a_conversation_inside_another_and_parallel_requests_are_turns_with_their_own_context(tmp_path: Path) -> None:
    async def nests(problem: Problem, url: str, key: str) -> str:
        main = [user("main")]
        main = [*main, assistant(await said(url, key, main)), user("go on")]
        inner = await asyncio.gather(*(said(url, key, [user(f"inner {number}")]) for number in (1, 2)))
        return await said(url, key, main) + " after " + ", ".join(sorted(inner))

    trajectory = play(function(rows(tmp_path), nests), numbered())
    assert trajectory.answer == "reply 3 after reply 1, reply 2"
    first, *inner, last = contents(trajectory)
    assert (first, sorted(inner), last) == (["main"], [["inner 1"], ["inner 2"]], ["main", "reply 0", "go on"])
    assert [turn.condensation is not None for turn in trajectory.turns] == [False, True, True, True]
    spans = trajectory.turns[3].condensation.spans if trajectory.turns[3].condensation else ()
    assert [(span.first, span.last, span.status.value) for span in spans] == [(0, 0, "rewritten"), (1, 2, "dropped")]


def test_an_agent_may_ask_the_same_again_and_is_given_another_reply(tmp_path: Path) -> None:
    async def again(problem: Problem, url: str, key: str) -> str:
        replies = [await said(url, key, [user("go")]) for _ in range(2)]
        return " or ".join(replies) + await said(url, key, [user("go"), assistant(replies[1]), user("on")])

    trajectory = play(function(rows(tmp_path), again), numbered())
    assert trajectory.answer == "reply 0 or reply 1reply 2"
    assert contents(trajectory) == [["go"], ["go"], ["go", "reply 1", "on"]]
    assert [turn.condensation is None for turn in trajectory.turns] == [True, False, True]


def test_the_condenser_of_the_run_condenses_an_agent_and_what_it_rewrote(tmp_path: Path) -> None:
    async def talks(problem: Problem, url: str, key: str) -> None:
        messages = [user("go")]
        for number in range(4):
            messages = [*messages, assistant(await said(url, key, messages)), user(f"{number}")]
        messages[1] = assistant("edited")
        await said(url, key, messages)

    trajectory = play(function(rows(tmp_path), talks), numbered(), condenser=LastK(keep_last=1))
    assert contents(trajectory)[3:] == [["go", "reply 2", "2"], ["go", "reply 3", "3"]]
    assert [turn.condensation and turn.condensation.condenser for turn in trajectory.turns[2:]] == [
        "chosen",
        "chosen",
        "agent",
    ]
    assert trajectory.stop is Stop.FORMAT  # neither answer nor outcome


def test_replies_stream_and_end_before_a_stop_string(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: make vllm brings it")

    async def streams(problem: Problem, url: str, key: str) -> str:
        texts, calls = list[str](), list[str]()
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            chunks: Any = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": [{"type": "text", "text": "go"}]}],
                tools=[UP],
                stop=["Observation:"],
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in chunks:
                for choice in chunk.choices:
                    texts.append(choice.delta.content or "")
                    calls += [each.function.arguments for each in choice.delta.tool_calls or ()]
        return "".join(texts) + "".join(calls)

    trajectory = play(function(rows(tmp_path), streams), lambda prompt: f"up {call(1)}Observation: 5")
    assert trajectory.answer == 'up{"by": 1}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": "go"}, "messages"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_name(fields: dict[str, Any], param: str) -> None:
    async def refused() -> str | None:
        with pytest.raises(RequestRefused) as error:
            read_request(json.dumps({"messages": [user("go")], **fields}))
        return error.value.param

    assert asyncio.run(refused()) == param


def test_a_refusal_is_an_error_of_openai_and_the_episode_goes_on(tmp_path: Path) -> None:
    async def tries(problem: Problem, url: str, key: str) -> str:
        status, body = await ask(url, key, [user("go")], n=2)
        assert (status, body["error"]["param"]) == (400, "n")
        await said(url, key, [user("go")])
        status, body = await ask(url, key, [user("on")], tools=[UP])
        assert (status, body["error"]["param"]) == (400, "tools")
        return str((await ask(url, "wrong", [user("go")]))[0])

    assert play(function(rows(tmp_path), tries), numbered()).answer == "401"


def test_an_agent_without_a_request_and_one_that_crashes_say_why(tmp_path: Path) -> None:
    async def silent(problem: Problem, url: str, key: str) -> str:
        return "bye"

    async def refused(problem: Problem, url: str, key: str) -> None:
        await ask(url, key, [user("go")], n=3)

    async def crashes(problem: Problem, url: str, key: str) -> None:
        await said(url, key, [user("go")])
        raise KeyError("level")

    data = rows(tmp_path)
    for program, detail, turns in (
        (silent, "the agent ended without a request", 0),
        (refused, "n is 3, and a policy in training takes 1", 0),
        (crashes, "KeyError: 'level'", 1),
    ):
        trajectory = play(function(data, program), numbered())
        assert trajectory.stop is Stop.ENVIRONMENT_ERROR
        assert detail in trajectory.detail
        assert len(trajectory.turns) == turns
    script = "import os, sys; sys.exit('bad key ' + os.environ['OPENAI_API_KEY'])"
    failed = play(function(data, (sys.executable, "-c", script)), numbered())
    assert failed.stop is Stop.ENVIRONMENT_ERROR
    assert "ended with status 1: bad key [removed]" in failed.detail
    missing = play(function(data, ("no-such-program",)), numbered())
    assert "starting 'no-such-program'" in missing.detail
    slow = function(data, (sys.executable, "-c", "import time; time.sleep(60)"), limits=SandboxLimits(seconds=0.2))
    assert "exceeded its limit seconds=0.2" in play(slow, numbered()).detail


def listening() -> set[int]:
    """The ports at which this process accepts connections."""
    sockets = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}


def test_thirty_two_agents_that_crash_flood_hang_and_call_after_their_end_leave_nothing(tmp_path: Path) -> None:
    """Half are programs, one of which leaves a process that has a session of its own; some are cancelled."""
    before = listening()
    late: list[asyncio.Task[Any]] = []
    statuses: list[int] = []

    async def after_the_end(url: str, key: str) -> None:
        await asyncio.sleep(0.3)
        statuses.append((await ask(url, key, [user("late")]))[0])

    async def floods(problem: Problem, url: str, key: str) -> float:
        answers = await asyncio.gather(*(ask(url, key, [user(f"{number}")]) for number in range(30)))
        late.append(asyncio.create_task(after_the_end(url, key)))
        return float(sum(status == 200 for status, _ in answers))

    async def hangs(problem: Problem, url: str, key: str) -> None:
        await said(url, key, [user("go")])
        await asyncio.sleep(600)

    data = rows(tmp_path)
    orphan = "import subprocess; subprocess.Popen(['sleep', '987'], start_new_session=True)"
    program = (sys.executable, "-c", f"{orphan}\n{PROGRAM}", "go")
    tasks = [
        function(data, counting),
        function(data, floods, requests=5),
        function(data, hangs),
        *[function(data, program, outcome="exit_status")] * 5,
    ]

    async def all_of_them() -> list[Any]:
        played = [
            asyncio.create_task(plays(tasks[number % len(tasks)], counts if number % len(tasks) != 1 else numbered()))
            for number in range(32)
        ]
        hanging = played[2 :: len(tasks)]
        await asyncio.wait(set(played) - set(hanging))
        for each in hanging:
            each.cancel()
        results = await asyncio.gather(*played, return_exceptions=True)
        await asyncio.gather(*late, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) == 1
        return results

    results = asyncio.run(all_of_them())
    outcomes = [each.outcome if isinstance(each, Trajectory) else str(type(each).__name__) for each in results]
    assert outcomes == [None, 5.0, "CancelledError", 1.0, 1.0, 1.0, 1.0, 1.0] * 4, results
    assert set(statuses) <= {401}
    own = psutil.Process()
    assert [each.cmdline() for each in psutil.process_iter() if "987" in each.cmdline()] == []
    assert [
        each for each in own.children(recursive=True) if "condensegrpo.sandbox.program" in str(each.cmdline())
    ] == []
    assert listening() == before
