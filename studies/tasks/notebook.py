"""The task ``notebook``: facts arrive one a message, and what its tools write is kept in a notebook of the episode.

    Mira's locker is number 42.       ─▶  <tool>{"name": "write", "args": {"page": "Mira", "text": "locker 42"}}</tool>
    <result>written</result>          ─▶  noted
    Jon's table is number 17.         ─▶  …
    Which number is Mira's locker?    ─▶  <tool>{"name": "read", "args": {"page": "Mira"}}</tool>
    <result>locker 42</result>        ─▶  <answer>42</answer>

The notebook is outside of the context: no condenser can drop it. It needs no download.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge, Le

from condensegrpo.core.messages import History
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.studies.tasks.drawn import drawn_problems
from condensegrpo.studies.tasks.notes import NAMES, NUMBERS, THINGS, NotesEnvironment, content, fact_of, question_of
from condensegrpo.tasks.answers import pinned_messages, read_answer

INSTRUCTION = (
    "You will get messages, one at a time, and then a question about one of them. Earlier messages may be left out: "
    "write what you need into the notebook. Answer the question as <answer>number</answer>."
)
PAGE = {"type": "string", "description": "The title of the page."}
TEXT = {"type": "string", "description": "What the page says from now on."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook(Task):
    """The task ``notebook``."""

    facts: Annotated[int, Ge(1), Le(len(NAMES))] = 4  # each of another person
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256  # all different

    def problems(self, split: Split) -> Sequence[Problem]:
        """As ``drawn_problems``."""
        sizes = self.train_problems, self.eval_problems
        seeds = f"notebook train {self.facts}", f"notebook eval {self.facts}"
        return drawn_problems(split, self._draw, content, sizes=sizes, seeds=seeds)

    def environment(self, problem: Problem) -> "NotebookEnvironment":
        """A fresh episode with an empty notebook."""
        first, *later = problem.data["messages"]
        pinned = pinned_messages(system=INSTRUCTION, question=first)
        return NotebookEnvironment(pinned=pinned, messages=tuple(later), answer=partial(read_answer, style="last"))

    def _draw(self, rng: random.Random, label: str) -> Problem:
        facts = [(name, rng.choice(THINGS), rng.choice(NUMBERS)) for name in rng.sample(NAMES, self.facts)]
        name, thing, number = rng.choice(facts)
        question = question_of(name, thing)
        messages = (*(fact_of(*fact) for fact in facts), question)
        return Problem(id=label, question=question, answer=str(number), data={"messages": messages})


@dataclass(slots=True, kw_only=True)
class NotebookEnvironment(NotesEnvironment):
    """Says the next message after each reply that calls no tool; the last is the question."""

    _pages: dict[str, str] = field(default_factory=dict, init=False)

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tools ``write`` and ``read``."""
        write = {"type": "object", "properties": {"page": PAGE, "text": TEXT}, "required": ["page", "text"]}
        read = {"type": "object", "properties": {"page": PAGE}, "required": ["page"]}
        return [
            EnvironmentTool(name="write", description="Writes a page.", parameters=write, call=self._write),
            EnvironmentTool(name="read", description="Reads a page.", parameters=read, call=self._read),
        ]

    async def _write(self, arguments: Mapping[str, Any], history: History) -> str:
        self._pages[str(arguments["page"])] = str(arguments["text"])
        return "written"

    async def _read(self, arguments: Mapping[str, Any], history: History) -> str:
        known = ", ".join(self._pages) or "none"
        return self._pages.get(str(arguments["page"]), f"Error: there is no such page. The pages are: {known}")

    async def close(self) -> None:
        """Throws the notebook away."""
        self._pages.clear()
