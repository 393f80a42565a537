"""Find a number with a tool that belongs to the episode. It needs no download.

    Which number from 1 to 20 is it? …                        the question
    ─▶  <tool>{"name": "guess", "args": {"number": 10}}</tool>
    <result>higher</result>
    ─▶  <tool>{"name": "guess", "args": {"number": 15}}</tool>
    <result>right</result>                                     the episode ends with an outcome

The tool counts: the outcome is 1 for a number that is found within as many guesses as halving needs, and falls by a
tenth for each further one. The reward ``environment`` pays it. A condenser that drops old results costs guesses.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge

from condensegrpo.core.messages import History, Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult

LATE = 0.1  # what a guess costs beyond those that halving needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess(Task):
    """Find a number with a tool that says higher or lower. One number in eight is held out for evaluation."""

    largest: Annotated[int, Ge(8)] = 100

    def problems(self, split: Split) -> Sequence[Problem]:
        """The numbers of a split, in an order that has nothing to do with their size."""
        numbers = list(range(1, self.largest + 1))
        random.Random("guess").shuffle(numbers)
        chosen = [number for number in numbers if (number % 8 == 0) == (split == "eval")]
        question = f"Which number from 1 to {self.largest} is it? Find it with the tool guess."
        return [Problem(id=f"{split}-{number}", question=question, answer=str(number)) for number in chosen]

    def environment(self, problem: Problem) -> "GuessEnvironment":
        """A fresh episode."""
        return GuessEnvironment(question=problem.question, number=int(problem.answer or 0), largest=self.largest)


@dataclass(slots=True, kw_only=True)
class GuessEnvironment(Environment):
    """Says to each guess whether the number is higher or lower."""

    question: str
    number: int
    largest: int
    _guesses: int = field(default=0, init=False)

    async def start(self) -> tuple[Message, ...]:
        """The question."""
        return (Message(role="user", content=self.question),)

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tool ``guess``."""
        number = {"type": "integer", "description": f"From 1 to {self.largest}."}
        parameters = {"type": "object", "properties": {"number": number}, "required": ["number"]}
        return [EnvironmentTool(name="guess", description="Guesses.", parameters=parameters, call=self._guess)]

    async def step(self, reply: Message) -> Step:
        """A reply that guesses nothing is reminded."""
        return Step(observations=(Message(role="user", content="Use the tool guess."),))

    async def _guess(self, arguments: Mapping[str, Any], history: History) -> ToolResult:
        guess = int(arguments["number"])
        self._guesses += 1
        if guess != self.number:
            return ToolResult(text="higher" if self.number > guess else "lower")
        late = max(self._guesses - self.largest.bit_length(), 0)
        return ToolResult(text="right", done=True, outcome=max(1 - LATE * late, LATE))
