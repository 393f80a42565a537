"""The task ``env_class``: TRL-style environment classes are played, closed and trained on."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from scripted_training import train_on_replies
from talk import agent, engine, play_one

from condensegrpo.core.errors import DataError, PluginError
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.integrations.env_class import EnvClass
from condensegrpo.integrations.reset_rows import first_messages

PAGE = (ROOT / "docs" / "how-to" / "connect-env-class.md").read_text(encoding="utf-8")


class Counter:
    """Blocks, as code without asyncio does."""

    threads: list[int]
    events: list[str]  # of the newest object

    def __init__(self) -> None:
        Counter.threads, Counter.events = [threading.get_ident()], []
        self.total = 0

    def reset(self, start: int) -> str | None:
        self.total = start
        return f" From {start}."

    def add(self, by: int) -> int:
        """
        Adds.

        Args:
            by: how much.
        """
        Counter.threads.append(threading.get_ident())
        if by < 0:
            raise StopIteration("it only counts up")
        self.total += by
        return self.total

    async def half(self) -> float:
        """Halves the total."""
        await asyncio.sleep(0)
        return self.total / 2

    def _private(self) -> None: ...

    def get_reward(self) -> float:
        return self.total / 10

    def close(self) -> None:
        Counter.events.append("closed")


def rows(folder: Path, *lines: dict[str, Any], name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(file)


def call(name: str, **arguments: object) -> str:
    return f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>"


def play(task: EnvClass, *replies: str) -> Trajectory:
    left = iter(replies)
    parts = engine(agent(lambda _: next(left)), max_context_tokens=4000)
    return asyncio.run(play_one(parts, task.problems("train")[0], task.environment))


def test_methods_are_tools_and_the_object_judges_and_is_closed(tmp_path: Path) -> None:
    three, four = ({"prompt": "Count.", "start": start, "gold": 5} for start in (3, 4))
    data, held_out = rows(tmp_path, three, four), rows(tmp_path, four, name="held_out.jsonl")
    task = EnvClass(factory=Counter, data=data, eval_data=held_out, answer="gold")
    (trained,) = task.problems("train")  # rows with one prompt are told apart by their other columns
    assert (trained.question, trained.answer, trained.data["start"], task.left_out) == ("Count.", "5", 3, 1)
    trajectory = play(task, call("add", by=2), call("half"), call("add", by=-1), "so 5")
    assert trajectory.turns[0].context[-1].text == "Count. From 3."
    assert '"name": "add"' in trajectory.turns[0].context[0].text
    assert "_private" not in trajectory.turns[0].context[0].text
    assert [turn.observations[0].text for turn in trajectory.turns[:3]] == [
        "<result>5</result>",
        "<result>2.5</result>",
        "<result>Error: add: RuntimeError: it raised StopIteration('it only counts up',)</result>",
    ]
    assert (trajectory.stop, trajectory.answer, trajectory.outcome) == (StopReason.ANSWERED, "so 5", 0.5)
    assert Counter.events == ["closed"]
    assert len(set(Counter.threads)) == 1
    assert threading.get_ident() not in Counter.threads


def test_faults_are_named_before_a_run(tmp_path: Path) -> None:
    class NoDocstring:
        def reset(self) -> None: ...

        def use(self) -> None: ...

    data = rows(tmp_path, {"prompt": 3})
    with pytest.raises(PluginError, match=r"the schema of tool 'use'.*test_env_class\.py"):
        EnvClass(factory=NoDocstring, data=data)
    with pytest.raises(PluginError, match="environment class OrderedDict: it has no reset"):
        EnvClass(factory="collections:OrderedDict", data=data)
    with pytest.raises(PluginError, match=r"looking for 'nowhere:Vault' among the environments: there is no file"):
        EnvClass(factory="nowhere:Vault", data=data)
    with pytest.raises(DataError, match="row 1 has the prompt 3, wanted a text or chat messages"):
        EnvClass(factory=Counter, data=data)


def test_a_prompt_may_have_calls_as_data_sets_write_them() -> None:
    """Without an id, as a text of JSON, beside a null; a thought beside the text; the role of old functions."""
    plain = {"type": "function", "function": {"name": "add", "arguments": {"by": 1}}}
    written = json.dumps({"name": "add", "arguments": '{"by": 1}', "function": None})
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [plain, None, written]}
    call = '<tool_call>{"name": "add", "arguments": {"by": 1}}</tool_call>'
    first, last = first_messages([said, {"role": "function", "content": "1"}], "prompt")
    assert first.text == f"<think>hm</think>\nso\n{call}\n{call}"
    assert (last.role, last.text) == ("tool", "1")


def test_the_example_of_the_page_trains_and_evaluates(tmp_path: Path) -> None:
    """The replies are scripted: the second guess opens one of the two safes."""
    blocks = re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)
    for name, block in zip(("vault.py", "codes.jsonl", "held_out.jsonl", "vault.yaml"), blocks, strict=True):
        (tmp_path / name).write_text(block, encoding="utf-8")
    trained = train_on_replies(tmp_path, "vault", [call("guess", code="000"), call("guess", code="042"), "lost"])
    assert [line["reward"] for line in trained] == [0.25, 0.25]
