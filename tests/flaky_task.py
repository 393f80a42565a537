"""A task in a file of its own, of which only some problems work."""

from dataclasses import dataclass, field

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.tasks.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """An environment that breaks at the first reply."""

    question: str

    async def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content=self.question),)

    async def step(self, reply: Message) -> Step:
        raise RuntimeError("this problem is broken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaky(Ledger):
    """The ledger; of its training problems only the ``sound`` ones work."""

    sound: list[str] = field(default_factory=list)  # ids

    def environment(self, problem: Problem) -> Environment:
        if problem.id in self.sound or problem.id.startswith("eval"):
            return Ledger.environment(self, problem)
        return Broken(question=problem.question)
