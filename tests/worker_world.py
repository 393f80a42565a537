"""The plug-ins of rollout workers that the tests start: a counting world that misbehaves."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from condensegrpo.condensers.whole_units import LastK
from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.messages import History, Message
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.reward import GroupReward
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.core.trajectory import Trajectory


class Counts:
    """Answers the nth reply with ``seen n``. The second step of an episode depends on its question."""

    def __init__(self, problem: Problem) -> None:
        self.question, self.data, self.replies = problem.question, problem.data, 0

    async def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content=self.question),)

    async def step(self, reply: Message) -> Step:
        self.replies += 1
        if self.replies == 2:
            self.misbehave()
        if reply.text.startswith("answer "):
            return Step(done=True, answer=reply.text.removeprefix("answer "))
        return Step(observations=(Message(role="user", content=f"seen {self.replies}"),))

    def misbehave(self) -> None:
        if self.question == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.question == "raise":
            raise KeyError("level")
        if self.question == "tool":  # a process beside the worker
            tool = subprocess.Popen(["sleep", "600"])
            Path(self.data["tools"], str(tool.pid)).touch()
            time.sleep(600)


class Task:
    """One problem for each question."""

    def __init__(self, questions: Sequence[str] = ("a", "b")) -> None:
        self.questions = questions

    def problems(self, split: Split) -> Sequence[Problem]:
        ids = enumerate(self.questions)
        return [Problem(id=f"{split}{number}", question=text, answer="5") for number, text in ids]

    def environment(self, problem: Problem) -> Counts:
        return Counts(problem)


class CountedLastK(Condenser):
    """Keeps two units, and counts its calls."""

    def __init__(self) -> None:
        self.last_k, self.calls = LastK(keep_last=2), 0

    async def condense(self, history: History, budget: Budget) -> Condensed:
        self.calls += 1
        return await self.last_k.condense(history, budget)

    def counts(self) -> Mapping[str, float]:
        calls, self.calls = self.calls, 0
        return {"calls": calls}


class Process:
    """Says where it was computed."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> Mapping[str, float]:
        return {"turns": float(len(trajectory.turns)), "process": float(os.getpid())}


class Turns:
    """Counts turns."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> Mapping[str, float]:
        return {"turns": float(len(trajectory.turns))}


class Siblings(GroupReward):
    """A group reward: how many trajectories it sees at once."""

    def score_group(self, trajectories: Sequence[Trajectory], problem: Problem) -> list[Mapping[str, float]]:
        return [{"size": float(len(trajectories))} for _ in trajectories]
