"""The program of rollout workers that the tests start: a counting world that misbehaves."""

import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from talk import Counting, engine

from condensegrpo.attention.scorer import AttentionScorer
from condensegrpo.condensers.attention import AttentionCondenser
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.core.messages import History, Message
from condensegrpo.core.protocols.condenser import Budget, Condensed
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.sampler import AttentionSampler, LogprobSampler, Sampler
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.engine import AnswerProbe
from condensegrpo.episodes.player import LocalPlayer
from condensegrpo.episodes.workers.worker import OpenPlayer, RemoteSampler


class Misbehaving(Counting):
    """What happens in the second step of an episode depends on its question."""

    async def step(self, reply: Message) -> Step:
        if len(self.replies) == 1:
            if self.problem.question == "exit":
                ctypes.CDLL(None)._exit(3)  # as C code may; Python's os._exit raises
            if self.problem.question == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.problem.question == "raise":
                raise KeyError("level")
        return await super().step(reply)


class CountedLastK:
    """Keeps two units, and counts its calls."""

    def __init__(self) -> None:
        self.last_k = LastK(keep_last=2)
        self.calls = 0

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        self.calls += 1
        return await self.last_k.condense(history, budget, tools)

    def counts(self) -> Mapping[str, float]:
        calls, self.calls = self.calls, 0
        return {"calls": calls}


def blocked() -> OpenPlayer:
    """A worker that hangs while it starts, after it has written its process id."""
    Path(os.environ["STARTED"], str(os.getpid())).touch()
    time.sleep(120)
    raise TimeoutError


def process_id(trajectory: Trajectory, problem: Problem) -> dict[str, float]:
    """A reward that says where it was computed."""
    return {"turns": float(len(trajectory.turns)), "process": float(os.getpid())}


class Siblings:
    """A group reward: how many trajectories it sees at once."""

    def score_group(self, trajectories: Sequence[Trajectory], problem: Problem) -> list[dict[str, float]]:
        return [{"size": float(len(trajectories))} for _ in trajectories]


@dataclass(frozen=True)
class World:
    """The settings of a player."""

    reward: Literal["turns", "siblings", "process"] = "turns"
    broken: bool = False
    attends: bool = False  # the condenser ranks by the sampler's attention, and the answer is measured

    def player(self, sampler: Sampler) -> LocalPlayer:
        if self.broken:
            raise LookupError("no such world")
        rewards = {"turns": lambda trajectory, _: {"turns": float(len(trajectory.turns))}, "process": process_id}
        parts = engine(sampler, condenser=CountedLastK())
        if self.attends and isinstance(sampler, AttentionSampler) and isinstance(sampler, LogprobSampler):
            parts = replace(
                engine(sampler, condenser=AttentionCondenser(scorer="policy"), max_context_tokens=130),
                scorers={"policy": AttentionScorer(sampler, parts.renderer)},
                probe=AnswerProbe(model=sampler, renderer=parts.renderer, form="<answer>{answer}</answer>"),
            )
        return LocalPlayer(
            environment=Misbehaving,
            engine=parts,
            reward=Siblings() if self.reward == "siblings" else rewards[self.reward],
        )


def open_worlds() -> OpenPlayer:
    return open_world


def open_world(settings: object, sampler: RemoteSampler) -> LocalPlayer:
    assert isinstance(settings, World)
    return settings.player(sampler)
