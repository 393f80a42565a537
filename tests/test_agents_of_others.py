"""Agents from PyPI, as they are: the examples of the guide are played or trained, and recorded exactly."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from command import ROOT, succeed
from recipe_world import write
from talk import agent, engine, play_one

from condensegrpo.assembly.build import build
from condensegrpo.config.load import load_config
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.learner.new_model import new_model, new_tokenizer, save_new
from condensegrpo.learner.settings import NewModel
from condensegrpo.storage.run_folder import read_metrics
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.tasks.agent import Agent

PAGE = (ROOT / "docs" / "how-to" / "train-an-agent.md").read_text(encoding="utf-8")
MINI = Path(sys.executable).with_name("mini")
QUESTIONS = [f"Write a number to number.txt, as large as you can. ({number})" for number in range(24)]  # 2 held out
NUMBERS = range(10, 100)  # so many that the rewards of a group differ


def example(name: str) -> str:
    """A block of the page, by the name of the file in its first line."""
    (block,) = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", PAGE, re.DOTALL)
    return str(block)


def put(folder: Path, *names: str) -> None:
    """Files of the page, and the data that they name."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(example(name), encoding="utf-8")
    write(folder / "tasks.jsonl", [{"question": question} for question in QUESTIONS])


def make_policy(folder: Path, replies: Sequence[str], read: str) -> None:
    """A model that says one of a few replies whatever it reads, since its attention adds nothing yet.

    Each word follows from the word before; ``read`` has the words that it will read.
    """
    tokenizer = new_tokenizer([read, *replies, *QUESTIONS], kind="words", vocab_size=4096)
    model = new_model(tokenizer, NewModel(layers=1), seed=0)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    rows = [tokenizer.encode(f"<|im_start|>assistant\n{reply}<|im_end|>") for reply in replies]
    labels = torch.tensor([row + [-100] * (max(map(len, rows)) - len(row)) for row in rows])
    words, mlp = model.model.embed_tokens, model.model.layers[0].mlp
    optimiser = torch.optim.AdamW([*words.parameters(), *mlp.parameters()], lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        model(input_ids=labels.clamp(min=0), labels=labels).loss.backward()
        optimiser.step()
    save_new(folder, tokenizer, model)


def trained(folder: Path, config: str) -> list[Trajectory]:
    """The trajectories of a step on an example, which had a gradient."""
    overrides = (
        f"model.path={folder / 'model'}",
        "rollout.limits={max_turns: 8, max_context_tokens: 3000, max_output_tokens: 60}",
        "train={steps: 1, problems_per_step: 1, samples_per_problem: 4, eval_every: 0}",
        "train.eval_on_start=false",
        "learner={threads: 1, optimiser: {lr: 0.001}}",
        "evaluate.problems=1",
    )
    succeed("train", config, *overrides, cwd=folder)
    run = folder / "runs" / config.removesuffix(".yaml")
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "rows" in line]
    assert [line["step"] for line in lines] == [1]
    assert all(line.get("grad_norm", 0.0) > 0 for line in lines), lines
    return [scored.trajectory for scored in read_trajectories(run / "trajectories" / "step_000001.parquet")]


def play(task: Agent, reply: Callable[[str], str]) -> Trajectory:
    """An episode of the first problem, with a policy that is a function of the prompt."""
    return asyncio.run(
        play_one(
            engine(agent(reply), max_context_tokens=40_000, max_output_tokens=200, turn_seconds=60.0),
            task.problems("train")[0],
            task.environment,
        )
    )


@pytest.mark.skipif(not MINI.exists(), reason="mini-swe-agent is not installed: make install")
def test_the_program_mini_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes a number, then another, which it submits. Programs are trained in ``test_agent.py``."""
    put(tmp_path, "mini.yaml", "project/check.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(MINI.parent), prepend=os.pathsep)
    commands = ["echo 12 > number.txt", "echo 34 > number.txt; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]

    def reply(prompt: str) -> str:
        said = prompt.count('<tool>{"name": "bash", "args": {"command": "echo')
        return f'<tool>{{"name": "bash", "args": {{"command": "{commands[said]}"}}}}</tool>'

    task = build(load_config(tmp_path / "mini.yaml")).task
    assert isinstance(task, Agent)
    trajectory = play(task, reply)
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, "34"), trajectory.detail
    assert trajectory.outcome == 34 / 99
    assert [commands[number] in turn.reply.text for number, turn in enumerate(trajectory.turns)] == [True, True]
    assert all(turn.condensation is None for turn in trajectory.turns)


def test_a_function_that_runs_an_agent_of_smolagents_is_trained(tmp_path: Path) -> None:
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed: make install")
    prompts = Path(smolagents.__file__).parent / "prompts" / "code_agent.yaml"
    replies = [f"<code> {call}( {number} ) </code>" for call in ("final_answer", "print") for number in NUMBERS]
    make_policy(tmp_path / "model", replies, prompts.read_text(encoding="utf-8"))
    put(tmp_path, "smol.yaml", "smol.py")
    for trajectory in trained(tmp_path, "smol.yaml"):
        assert trajectory.stop is StopReason.ANSWERED, trajectory.detail
        *before, last = trajectory.turns
        assert [turn.condensation for turn in before] == [None] * len(before)
        if last.condensation is not None:  # smolagents asks for an answer with another system prompt after five steps
            assert (len(before), last.condensation.reason) == (5, "the agent rewrote its history: other first messages")


def test_a_managed_agent_of_smolagents_is_a_branch_with_its_own_system_prompt_and_tools(tmp_path: Path) -> None:
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed: make install")

    def price(item: str) -> int:
        """What an item costs.

        Args:
            item: its name.
        """
        return 25

    def buys(problem: Problem, url: str, key: str) -> str:
        model = smolagents.OpenAIModel("policy", api_base=url, api_key=key)
        made = {"model": model, "verbosity_level": 0}
        clerk = smolagents.ToolCallingAgent(
            tools=[smolagents.tool(price)], name="clerk", description="Knows prices.", **made
        )
        with model.client:
            return str(smolagents.ToolCallingAgent(tools=[], managed_agents=[clerk], **made).run(problem.question))

    def reply(prompt: str) -> str:
        name, task = ("price", "item") if '{"name": "price"' in prompt else ("clerk", "task")
        newest = prompt.rpartition("Observation:")[2]
        if "25" in newest:
            return '<tool>{"name": "final_answer", "args": {"answer": "25 euros"}}</tool>'
        return f'<tool>{{"name": "{name}", "args": {{"{task}": "lamp"}}}}</tool>'

    data = write(tmp_path / "rows.jsonl", [{"question": f"{number} lamps?"} for number in range(20)])
    task = Agent(program=buys, data=data, answer=None)
    trajectory = play(task, reply)
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, "25 euros"), trajectory.detail
    schemas = [turn.context[0].text.rpartition("the schema of their args:")[2] for turn in trajectory.turns]
    manager, clerk = ["final_answer", "clerk"], ["price", "final_answer"]
    assert [re.findall(r'^{"name": "(\w+)"', schema, re.MULTILINE) for schema in schemas] == [
        manager,
        clerk,
        clerk,
        manager,
    ]
    reasons = [turn.condensation and turn.condensation.reason.partition(": ")[2] for turn in trajectory.turns]
    assert reasons == [
        None,
        "other tools, other first messages, replies left out",
        None,  # continued by ids: smolagents writes its calls as text behind the reply
        "other tools, other first messages, replies left out, replies brought back",
    ]
    assert "managed agent 'clerk':\n25 euros" in trajectory.turns[3].context[-1].text
