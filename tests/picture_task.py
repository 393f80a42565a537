"""A task in a file of its own whose problems are pictures: what the policy replies to is shown, not written."""

from collections.abc import Sequence
from dataclasses import dataclass

from vision_models import picture

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import Message, TextPart
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.core.trajectory import Trajectory

SIZES = ((24, 40), (40, 24), (32, 32))


@dataclass(slots=True)
class Shown:
    """Two pictures, one after the other."""

    number: int
    first: str | None = None

    async def start(self) -> tuple[Message, ...]:
        return (self._message("look"),)

    async def step(self, reply: Message) -> Step:
        if self.first is None:
            self.first = reply.text
            return Step(observations=(self._message("say"),))
        return Step(done=True, answer="ok")

    def _message(self, text: str) -> Message:
        size = SIZES[(self.number + (self.first is not None)) % len(SIZES)]
        part = picture(*size, color=(40 * self.number, 90, 200))
        return Message(role="user", content=(TextPart(text=f"{text} at this picture "), part))


@dataclass(frozen=True, slots=True)
class Says:
    """The expert."""

    number: int

    def reply(self, context: Sequence[Message]) -> str:
        return ("red", "blue square", "green circle ok")[(self.number + len(context)) % 3]

    def write(self, request: Request) -> str:
        return "ok"


class Parity:
    """A reward that differs between the samples of a problem, however they end."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        return {"reward": float(sum(sum(turn.output_ids) for turn in trajectory.turns) % 2)}


@dataclass(frozen=True, slots=True)
class Pictures:
    """A few problems."""

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(id=f"{split}{number}", question=f"look {split} {number}", answer="ok") for number in range(4)]

    def environment(self, problem: Problem) -> Environment:
        return Shown(int(problem.id[-1]))

    def expert(self, problem: Problem) -> Says:
        return Says(int(problem.id[-1]))
