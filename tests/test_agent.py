"""Agents that call the policy as an OpenAI model: what they are sent, what is recorded, what stays of them."""

import asyncio
import io
import json
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest
from aiohttp import ClientConnectorError, ClientSession, web
from command import ROOT, succeed
from recipe_world import make_model
from talk import agent, all_tasks_end, engine, play_one, shown, spelled
from talk import said as said_ids

from condensegrpo.algorithms.segments import broken_invariants, segments
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.options import check_plugin
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import SpanStatus, StopReason, Trajectory
from condensegrpo.storage.run_folder import read_metrics
from condensegrpo.tasks.agent import Agent, AgentLimits, run_program
from condensegrpo.tasks.agent_endpoint import CHAT, Inbox, serving
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
PROGRAM, SOLVER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]


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


async def plays(
    task: Agent,
    policy: Callable[[str], str] = counts,
    *,
    problem: Problem | None = None,
    ids: Callable[[str], list[int]] = said_ids,
    **options: Any,
) -> Trajectory:
    parts = engine(agent(policy, ids=ids), **{"max_context_tokens": 4000, "turn_seconds": 120.0, **options})
    return await play_one(parts, problem or task.problems("train")[0], task.environment)


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
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, "done at 3"), trajectory.detail
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
    assert system.startswith("Count. ***")  # its key


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
    assert (trajectory.stop, trajectory.answer, trajectory.outcome) == (StopReason.ANSWERED, "3", 0.3), (
        trajectory.detail
    )
    assert len(trajectory.turns) == 4


def test_rows_of_one_question_are_problems_by_their_other_columns(
    tmp_path: Path,
) -> None:
    every = [{"question": "Fix it.", "repo": f"repo-{n}", "answer": None} for n in range(8)]
    for name, chosen in (("a.jsonl", every), ("b.jsonl", [every[2], {**every[3], "repo": "other"}])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in chosen))
    task = Agent(program=("true",), data=str(tmp_path / "a.jsonl"), eval_data=str(tmp_path / "b.jsonl"))
    assert [problem.data["repo"] for problem in task.problems("train")] == [f"repo-{n}" for n in range(8) if n != 2]
    assert (task.left_out, task.alike) == (1, 7)


def test_limits_that_are_not_given_are_those_of_agents(tmp_path: Path) -> None:
    """They were those of the sandbox: a longer time limit took 8 GiB of memory to 512 MiB."""
    options = {"program": ["true"], "data": rows(tmp_path), "limits": {"seconds": 1200}}
    assert check_plugin("tasks", "agent", options)["limits"] == AgentLimits(seconds=1200)


def test_a_program_that_rewrites_its_judge_is_judged_by_the_original(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", tmp_path / "elsewhere"
    outside.mkdir()
    judge = "import json; print(0.5 if json.load(open('problem.json'))['id'] == '0' else 99)"
    for name, text in (
        ("check.py", judge),
        ("inner/check.py", "print(0.25)"),
        ("0.py", "print(0.75)"),
        ("work.py", ""),
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    (project / "problem.json").write_text('{"id": "a sample"}')
    usercustomize = "import os, site; os.makedirs(p := site.getusersitepackages()); open(f'{p}/usercustomize.py', 'w')"
    cheats = {
        "open('check.py', 'w').write('print(99)')": ("check.py", 0.5),
        "open('problem.json', 'w').write('{}')": ("check.py", 0.5),
        "import os; os.remove('check.py'); os.mkdir('check.py')": ("check.py", 0.5),
        f"{usercustomize}.write('print(99)')": ("check.py", 0.5),
        "open('json.py', 'w').write('print(99)')": ("check.py", 0.5),
        "open('0.py', 'w').write('print(99)')": ("{id}.py", 0.75),
        "open('inner/check.py', 'w').write('print(99)')": ("inner/check.py", 0.25),
        "import shutil; shutil.rmtree('inner'); open('inner', 'w')": ("inner/check.py", 0),
        "import shutil, os; shutil.rmtree('inner'); os.symlink('inner', 'inner')": ("inner/check.py", 0),
        f"import shutil, os; shutil.rmtree('inner'); os.symlink('{outside}', 'inner')": ("inner/check.py", 0),
        "open('work.py', 'w').write('print(1)')": ("work.py", 1),  # which is what it was to do
    }
    for cheat, (command, outcome) in cheats.items():
        task = Agent(
            program=(sys.executable, "-c", f"{PROGRAM}\n{cheat}", "go"),
            folder=str(project),
            data=rows(tmp_path),
            outcome=(sys.executable, "-I", command),
            protected=("{id}.py", "check.py", "inner") if command != "inner/check.py" else ("inner/check.py",),
            tool_format="tagged",
        )
        assert play(task, problem=replace(task.problems("train")[0], id="0")).outcome == outcome, cheat
    assert not list(outside.iterdir())


@pytest.mark.parametrize("name", ["none.py", "../rows.jsonl", "/etc/passwd"])
def test_what_is_protected_lies_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"protected names {name!r}, wanted a file or folder of the folder")):
        Agent(program=("true",), folder=files(tmp_path), data=rows(tmp_path), protected=(name,))


def test_a_start_that_is_cancelled_while_the_folder_is_copied_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    copying, copytree = threading.Event(), shutil.copytree

    def slow(*arguments: Any, **options: Any) -> Any:
        copying.set()
        time.sleep(0.5)
        return copytree(*arguments, **options)

    monkeypatch.setattr(shutil, "copytree", slow)
    task = Agent(program=("true",), folder=files(tmp_path), data=rows(tmp_path))

    async def cancelled() -> None:
        episode = task.environment(task.problems("train")[0])
        start = asyncio.create_task(episode.start())
        await asyncio.to_thread(copying.wait)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await episode.close()

    asyncio.run(cancelled())
    time.sleep(0.6)
    assert [*temporary.iterdir()] == []


def test_a_program_may_open_more_files_than_a_call_of_a_tool(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    command = (sys.executable, "-c", "files = [open('/dev/null') for _ in range(100)]")
    run = run_program(command, folder=tmp_path / "work", environment={}, limits=AgentLimits(), log=tmp_path / "log")
    assert asyncio.run(run) == 0, (tmp_path / "log.err").read_text()


def test_arguments_that_the_policy_wrote_as_a_text_reach_the_agent_as_an_object(tmp_path: Path) -> None:
    quoted = '<tool>{"name": "up", "args": "{\\"by\\": 1}"}</tool>'
    trajectory = play(function(rows(tmp_path), counting), lambda prompt: counts(prompt).replace(call(1), quoted))
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, "done at 3"), trajectory.detail
    assert all(turn.condensation is None for turn in trajectory.turns)


@pytest.mark.parametrize(("fails", "stop", "succeeded"), [(False, "answered", 1), (True, "environment_error", 0)])
def test_the_call_that_ends_an_agent_did_not_fail(tmp_path: Path, fails: bool, stop: str, succeeded: int) -> None:
    async def finishing(problem: Problem, url: str, key: str) -> str:
        """Nothing answers its call."""
        await ask(url, key, [user(problem.question)], tools=[UP])
        if fails:
            raise RuntimeError("lost")
        return "finished"

    trajectory = play(function(rows(tmp_path), finishing))
    assert [(turn.tool_attempts, turn.tool_successes) for turn in trajectory.turns] == [(1, succeeded)]
    assert trajectory.stop == stop


def test_what_a_program_leaves_is_removed_and_costs_its_outcome_if_judging_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    deep = "import os, pathlib\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\npathlib.Path('x').touch(0)"
    task = Agent(
        program=(sys.executable, "-c", f"{PROGRAM}\n{deep}", "go"),
        data=rows(tmp_path),
        outcome=("sleep", "60"),
        limits=AgentLimits(seconds=5),  # for the program too, on a busy machine
        tool_format="tagged",
    )
    trajectory = play(task)
    assert (trajectory.stop, trajectory.outcome) == (StopReason.FINISHED, 0.0), trajectory.detail
    assert [*temporary.iterdir()] == []


def test_a_question_of_another_script_may_be_as_long_as_the_kernel_takes(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    command, limits = ("printf", "%s", "汉" * 40_000), AgentLimits(seconds=60)  # an argument has at most 128 KiB
    run = run_program(command, folder=tmp_path / "work", environment={}, limits=limits, log=tmp_path / "log")
    assert asyncio.run(run) == 0
    assert (tmp_path / "log.out").read_text(encoding="utf-8") == command[2]


def test_the_function_of_the_guide_is_played(tmp_path: Path) -> None:
    (tmp_path / "solver.py").write_text(SOLVER, encoding="utf-8")
    task = load_plugin("tasks", f"{tmp_path}/solver.py:solver")(data=rows(tmp_path), tool_format="tagged")
    assert play(task, numbered()).answer == "reply 1"


def test_the_configuration_of_the_guide_trains(tmp_path: Path) -> None:
    """A random policy gets a random reward, so that there is something to learn."""
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
        "train={steps: 1, problems_per_step: 1, samples_per_problem: 2, eval_every: 0, eval_on_start: false}",
        "evaluate.problems=1",
        "learner.threads=1",
        cwd=tmp_path,
    )
    lines = [line for line in read_metrics(tmp_path / "runs/counter/metrics.jsonl") if "rows" in line]
    assert [(line["step"], line["grad_norm"] > 0) for line in lines] == [(1, True)]


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


def test_later_messages_of_the_user_survive_where_an_agent_declares_tools(tmp_path: Path) -> None:
    async def asks(problem: Problem, url: str, key: str) -> None:
        messages = [user("go")]
        for number in range(3):
            messages = [*messages, assistant(await said(url, key, messages, tools=[UP])), user(f"do {number}")]
        await said(url, key, messages, tools=[UP])

    trajectory = play(function(rows(tmp_path), asks), numbered(), condenser=LastK(keep_last=1))
    shown = [message.text for message in trajectory.turns[3].context]
    assert [text for text in shown if text.startswith("do ")] == ["do 0", "do 1", "do 2"]


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
    assert trajectory.stop is StopReason.FORMAT  # neither answer nor outcome


def test_replies_stream_and_end_before_a_stop_string(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: make install")

    async def streams(problem: Problem, url: str, key: str) -> str:
        texts, calls = list[str](), list[str]()
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            chunks: Any = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": [{"type": "text", "text": "go"}]}],
                tools=[UP],
                stop=["Observation:", None],  # type: ignore[list-item]  # as some clients send
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
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": "go"}, "messages"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        (
            {"tools": [{"function": {"name": "up", "parameters": {"properties": ["by"]}}}]},
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [{"function": {"name": "up", "parameters": {"required": "by"}}}]},
            "tools[0].function.parameters.required",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_name(fields: dict[str, Any], param: str) -> None:
    async def refused() -> str | None:
        with pytest.raises(RequestRefused) as error:
            read_request(json.dumps({"messages": [user("go")], **fields}), CHAT)
        return error.value.param

    assert asyncio.run(refused()) == param


def test_a_tool_whose_arguments_are_null_has_none() -> None:
    """Clients in Go send null for an empty map or list, which chat templates loop over."""
    nothing = {"type": "object", "properties": None, "required": None}
    tools = [{"function": {"name": "up", "parameters": nothing}}]

    async def read() -> list[object]:
        read = read_request(json.dumps({"messages": [user("go")], "tools": tools}), CHAT)
        return [tool.parameters for tool in read.tools]

    assert asyncio.run(read()) == [{"type": "object"}]


def test_a_refusal_is_an_error_of_openai_and_the_episode_goes_on(tmp_path: Path) -> None:
    async def tries(problem: Problem, url: str, key: str) -> str:
        status, body = await ask(url, key, [user("go")], n=2)
        assert (status, body["error"]["param"]) == (400, "n")
        await said(url, key, [user("go")])
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
        (refused, "n is 3, and this endpoint takes 1", 0),
        (crashes, "KeyError: 'level'", 1),
    ):
        trajectory = play(function(data, program), numbered())
        assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
        assert detail in trajectory.detail
        assert len(trajectory.turns) == turns
    script = "import os, sys; sys.exit('bad key ' + os.environ['OPENAI_API_KEY'])"
    failed = play(function(data, (sys.executable, "-c", script)), numbered())
    assert failed.stop is StopReason.ENVIRONMENT_ERROR
    assert "ended with status 1: bad key ***" in failed.detail
    missing = play(function(data, ("no-such-program",)), numbered())
    assert "starting 'no-such-program'" in missing.detail
    slow = function(data, (sys.executable, "-c", "import time; time.sleep(60)"), limits=AgentLimits(seconds=0.2))
    assert "exceeded its limit seconds=0.2" in play(slow, numbered()).detail


async def post(url: str, key: str, body: bytes) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with (
        ClientSession() as session,
        session.post(f"{url}/chat/completions", data=io.BytesIO(body), headers=headers) as reply,
    ):
        return reply.status, await reply.json()


def test_a_body_that_is_too_large_or_broken_is_refused_and_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    async def breaks(problem: Problem, url: str, key: str) -> str:
        large = json.dumps({"messages": [user("x" * (100 << 20))]}).encode()
        bodies = (large, b'{"messages": "\xff"}', b"[" * 100_000, b"{}", b"7")
        refused = [await post(url, key, body) for body in bodies]
        assert [status for status, _ in refused] == [413, 400, 400, 400, 400]
        assert refused[0][1]["error"]["message"] == "the body exceeds 8 MiB"
        status, body = await post(url, key, b'{"messages": [{"role": "user", "content": "a \\ud800"}]}')
        assert status == 200, body
        return "done"

    trajectory = play(function(rows(tmp_path), breaks), numbered())
    assert trajectory.answer == "done", trajectory.detail
    assert contents(trajectory) == [["a ?"]]


def test_clients_that_leave_do_not_hold_up_the_next_request(tmp_path: Path) -> None:
    async def leaves(problem: Problem, url: str, key: str) -> str:
        body = json.dumps({"messages": [user("left")]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        for sent in (body[:9], body):
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + sent)
            await writer.drain()
            writer.close()
        return await said(url, key, [user("go")])

    trajectory = play(function(rows(tmp_path), leaves), lambda prompt: "reply")
    assert trajectory.answer == "reply", trajectory.detail
    assert contents(trajectory)[-1] == ["go"]


def test_a_flood_is_answered_up_to_the_limits(tmp_path: Path) -> None:
    async def floods(problem: Problem, url: str, key: str) -> str:
        answers = await asyncio.gather(*(ask(url, key, [user(f"{number}")]) for number in range(300)))
        return " ".join(f"{status}:{sum(each == status for each, _ in answers)}" for status in (200, 403, 429))

    trajectory = play(function(rows(tmp_path), floods, requests=100), numbered(), max_turns=200)
    answered, exhausted, waiting = (int(part.partition(":")[2]) for part in str(trajectory.answer).split())
    assert answered == len(trajectory.turns)
    assert (answered >= 32, exhausted, answered + exhausted + waiting) == (True, 200, 300)


def test_a_function_that_is_not_asynchronous_runs_in_a_thread_that_its_limit_ends(tmp_path: Path) -> None:
    def blocks(problem: Problem, url: str, key: str) -> str:
        body = json.dumps({"messages": [user("go")]}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        with urlopen(Request(f"{url}/chat/completions", body, headers)) as response:
            text = str(json.load(response)["choices"][0]["message"]["content"])
        while problem.question == "count to 3":
            time.sleep(0.01)
        return text

    data = rows(tmp_path)
    ends, hangs = function(data, blocks), function(data, blocks, limits=AgentLimits(seconds=0.5))
    first, second = ends.problems("train")[:2]

    async def both() -> tuple[Trajectory, Trajectory]:
        return await plays(ends, numbered(), problem=first), await plays(hangs, numbered(), problem=second)

    assert (first.question, second.question) == ("count to 2", "count to 3")
    ended, hung = asyncio.run(both())
    assert (ended.answer, len(ended.turns)) == ("reply 0", 1)
    assert "the agent: no result within 0.5 seconds (limits.seconds) (" in hung.detail


def test_a_function_of_other_arguments_or_results_is_told_what_is_wanted(tmp_path: Path) -> None:
    def two(problem: Problem, url: str) -> str:
        return "4"

    with pytest.raises(ValueError, match=r"the agent takes \(problem: .*, wanted \(problem, url, key\) \(.*test_agent"):
        function(rows(tmp_path), two)

    async def mapping(problem: Problem, url: str, key: str) -> dict[str, str]:
        await said(url, key, [user("go")])
        return {"answer": "4"}

    task = function(rows(tmp_path), mapping, limits={"seconds": 5})
    assert (task.limits.seconds, task.limits.memory_mib) == (5, 8192)
    failed = asyncio.run(plays(task, numbered()))
    assert failed.stop is StopReason.ENVIRONMENT_ERROR
    assert "returned {'answer': '4'}, wanted its answer as text, a number, what the episode was worth" in failed.detail


def test_a_timeout_of_the_agent_itself_is_not_its_limit(tmp_path: Path) -> None:
    async def waits(problem: Problem, url: str, key: str) -> None:
        await said(url, key, [user("go")])
        raise TimeoutError("the shop is closed")

    assert "TimeoutError: the shop is closed" in play(function(rows(tmp_path), waits), numbered()).detail


def test_credentials_of_the_environment_are_removed_from_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_TOKEN", 't0p"secret')

    async def tells(problem: Problem, url: str, key: str) -> str:
        return f"{os.environ['SHOP_TOKEN']} {key} {await said(url, key, [user(os.environ['SHOP_TOKEN'])])}"

    trajectory = play(function(rows(tmp_path), tells), numbered())
    assert contents(trajectory) == [["***"]]
    assert trajectory.answer == "*** *** reply 0"


def test_a_request_with_other_tools_shows_them(tmp_path: Path) -> None:
    down = {"type": "function", "function": {**UP["function"], "name": "down"}}

    async def changes(problem: Problem, url: str, key: str) -> str:
        for tools in ([UP], [UP], [down], []):
            await ask(url, key, [user("go")], tools=tools)
        return "done"

    trajectory = play(function(rows(tmp_path), changes), numbered())
    shown = [re.findall(r'"name": "(up|down)"', turn.context[0].text) for turn in trajectory.turns]
    assert shown == [["up"], ["up"], ["down"], []]
    reasons = [turn.condensation.reason if turn.condensation else "" for turn in trajectory.turns]
    assert ["other tools" in reason for reason in reasons] == [False, False, True, True]


def test_replies_with_added_text_are_recognised_after_other_first_messages(tmp_path: Path) -> None:
    """As smolagents does when it asks for a last answer: otherwise no condenser could shorten them."""

    async def ends(problem: Problem, url: str, key: str) -> str:
        talk = [user("go")]
        for _ in range(3):
            talk += [assistant(await said(url, key, talk) + "\nCalling tools: [x]"), user("seen")]
        return await said(url, key, [user("Answer now."), *talk])

    trajectory = play(function(rows(tmp_path), ends), numbered(), condenser=LastK(keep_last=1))
    assert contents(trajectory)[-1] == ["Answer now.", "go", "reply 2", "Calling tools: [x]\n\nseen"]


def test_branches_show_exactly_their_messages_and_every_sampled_token_is_trained_once(tmp_path: Path) -> None:
    """Two helpers at the same time, each with a system message and three turns, then the main conversation again."""
    requests: list[list[Any]] = []

    async def branch(url: str, key: str, first: list[Any], turns: int) -> list[Any]:
        messages = first
        for number in range(turns):
            requests.append(messages)
            messages = [*messages, assistant(await said(url, key, messages)), user(f"next {number}")]
        return messages

    async def splits(problem: Problem, url: str, key: str) -> str:
        main = await branch(url, key, [user("main")], 1)
        starts = ([{"role": "system", "content": f"helper {number}"}, user("help")] for number in (1, 2))
        await asyncio.gather(*(branch(url, key, start, 3) for start in starts))
        await branch(url, key, main, 2)
        return "done"

    trajectory = play(function(rows(tmp_path), splits), numbered(), ids=spelled, max_turns=20)
    assert trajectory.answer == "done", trajectory.detail
    assert len(trajectory.turns) == len(requests) == 9
    prompts = [shown(turn.prompt_ids) for turn in trajectory.turns]
    assert sorted(prompts) == sorted(
        "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
        + "<|im_start|>assistant\n"
        for messages in requests
    )
    assert broken_invariants(trajectory) == ()
    made = segments(trajectory, advantage_K=[1.0] * 9, weight_K=[1.0] * 9)
    trained = [tuple(row.token_ids[index] for index in turn.positions) for row in made for turn in row.turns]
    assert trained == [turn.output_ids for turn in trajectory.turns]


def listening() -> set[int]:
    """The ports at which this process accepts connections."""
    sockets = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("cycles", range(5))  # of the event loop, from a connection to the end of the endpoint
def test_a_connection_that_is_accepted_as_the_endpoint_closes_is_closed(cycles: int) -> None:
    """Its destructor would warn: asyncio's server loses a connection that has no transport yet."""

    async def scenario() -> None:
        async with serving(Inbox(1)) as url:
            late = socket.create_connection(("127.0.0.1", int(re.findall(r":(\d+)/", url)[0])))
            for _ in range(cycles):
                await asyncio.sleep(0)
        late.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_an_endpoint_without_a_socket_or_cancelled_as_it_closes_is_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = list[web.AppRunner]()
    cleanup = web.AppRunner.cleanup

    async def counted(runner: web.AppRunner) -> None:
        cleaned.append(runner)
        await cleanup(runner)

    async def cancelled(_: web.AppRunner) -> None:
        raise asyncio.CancelledError

    def full(address: object, family: object) -> None:
        raise OSError(24, "Too many open files")

    async def scenario() -> None:
        opened = serving(Inbox(1))
        await opened.__aenter__()
        closing = asyncio.ensure_future(opened.__aexit__(None, None, None))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert len(cleaned) == 1
        monkeypatch.setattr(socket, "create_server", full)
        with pytest.raises(OSError, match="Too many open files"):
            await serving(Inbox(1)).__aenter__()
        assert len(cleaned) == 2

    async def cut_short() -> None:
        before = listening()
        with pytest.raises(asyncio.CancelledError):
            async with serving(Inbox(1)):
                assert len(listening()) == len(before) + 1
        assert listening() == before

    with monkeypatch.context() as patched:
        patched.setattr(web.AppRunner, "cleanup", cancelled)
        asyncio.run(cut_short())
    monkeypatch.setattr(web.AppRunner, "cleanup", counted)
    asyncio.run(scenario())


def test_the_endpoints_of_all_episodes_share_the_connections_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 descriptors a peer may have sixteen, however many agents it has."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))

    async def scenario() -> None:
        async with serving(Inbox(1)) as first, serving(Inbox(1)) as second:
            ports = [int(re.findall(r":(\d+)/", url)[0]) for url in (first, second)] * 10
            opened = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
            ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
            async with asyncio.timeout(8):  # less than a connection without a request may last
                while sum(end.done() for end in ends) < 4:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            assert sum(end.done() for end in ends) == 4
            for _, writer in opened:
                writer.close()
            await asyncio.gather(*ends, return_exceptions=True)

    asyncio.run(scenario())


def test_sixteen_agents_that_crash_flood_hang_and_call_after_their_end_leave_nothing(tmp_path: Path) -> None:
    """Half are programs, one of which leaves a process that has a session of its own; some are cancelled."""
    before = listening()
    ended: list[tuple[str, str]] = []

    async def floods(problem: Problem, url: str, key: str) -> float:
        answers = await asyncio.gather(*(ask(url, key, [user(f"{number}")]) for number in range(30)))
        ended.append((url, key))
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
            for number in range(16)
        ]
        hanging = played[2 :: len(tasks)]
        await asyncio.wait(set(played) - set(hanging))
        for address in ended:
            with pytest.raises(ClientConnectorError):
                await ask(*address, [user("late")])
        for each in hanging:
            each.cancel()
        results = await asyncio.gather(*played, return_exceptions=True)
        await all_tasks_end()
        return results

    results = asyncio.run(all_of_them())
    outcomes = [each.outcome if isinstance(each, Trajectory) else str(type(each).__name__) for each in results]
    assert outcomes == [None, 5.0, "CancelledError", 1.0, 1.0, 1.0, 1.0, 1.0] * 2, results
    own = {each.pid for each in psutil.Process().children(recursive=True)}
    lines = {each: each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])}  # none of a zombie
    left = [
        each
        for each, line in lines.items()
        if "987" in line or (each.pid in own and "condensegrpo.sandbox.program" in str(line))
    ]
    assert not psutil.wait_procs(left, timeout=30)[1]  # one that was killed is seen until it is reaped
    assert listening() == before
