"""The built-in note-taking task, in English: facts arrive one a message, and a question about one of them comes last.

One episode with 2 facts (user messages on the left, replies on the right):

    You will get messages …           ─▶  Notes: none
    Mira's locker is number 42.       ─▶  Notes: Mira locker 42
    Jon's table is number 17.         ─▶  Notes: Mira locker 42; Jon table 17
    Which number is Mira's locker?    ─▶  42

Under the condenser ``last_k(keep_last=1)`` a turn sees the instruction, its previous reply and the newest message only,
so a fact that is not carried on from note to note is lost. It is for a pretrained model: an instruction asks for the
notes, any text counts as one, and the answer is the first number of the last reply. A fifth of the expert's notes lose
their oldest fact: training can still learn to keep it.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.condenser import Request
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.tasks.answers import read_answer
from condensegrpo.tasks.drawn import drawn_for_training, drawn_held_out, ends_with_request

INSTRUCTION = (
    "You will get messages, one at a time, and then a question about one of them. You see only your last reply, so "
    "repeat your notes in every reply and add what is new. Answer the question with the number alone."
)
NAMES = ("Mira", "Jon", "Ada", "Omar", "Lena", "Theo", "Ruth", "Kofi", "Ines", "Paul", "Yara", "Finn")
THINGS = ("locker", "table", "room", "gate", "seat", "badge", "bus", "desk")
NUMBERS = range(10, 100)
FORGETFUL = 0.2  # share of the expert's notes that lose their oldest fact

_NUMBER = re.compile(r"\d+")
_SAID = re.compile(r"(\w+)'s (\w+) is number (\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """The task ``notes``. Whether a problem is for training or evaluation does not depend on any option."""

    min_facts: Annotated[int, Ge(1)] = 2
    max_facts: Annotated[int, Ge(1), Le(len(NAMES))] = 4  # each of another person
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256  # all different
    seed: int = 0  # of the order of the training problems

    def __post_init__(self) -> None:
        if self.min_facts > self.max_facts:
            raise ValueError(f"min_facts={self.min_facts} and max_facts={self.max_facts}: wanted min <= max")

    def problems(self, split: Split) -> Sequence[Problem]:
        """Training problems are made when asked for; the evaluation problems are a list."""
        if split == "train":
            return drawn_for_training(self._draw, content, size=self.train_problems, seed=f"notes train {self.seed}")
        return drawn_held_out(
            self._draw,
            content,
            count=self.eval_problems,
            seed=f"notes eval {self.min_facts} {self.max_facts}",
            described="problems",
            cure="ask for fewer",
        )

    def environment(self, problem: Problem) -> "NotesEnvironment":
        """A fresh episode."""
        pinned = (Message(role="user", content=INSTRUCTION),)
        return NotesEnvironment(pinned=pinned, messages=tuple(problem.data["messages"]), answer=_answer)

    def expert(self, problem: Problem) -> "NotesExpert":
        """The expert of an episode."""
        return NotesExpert(problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a note has every number of the note and message before it, or an answer the number that is known.

        ``None`` for an answer that the context does not determine.
        """
        facts, question = _known(context)
        if question is None or ends_with_request(context):
            return set(_NUMBER.findall(reply)) == set(facts.values())
        return None if question not in facts else _answer(reply) == facts[question]

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield f"{INSTRUCTION} Notes: none ; {' '.join(map(str, NUMBERS))}"
        yield from (
            f"{fact_of(name, thing, 10)} {question_of(name, thing)} {name} {thing}"
            for name in NAMES
            for thing in THINGS
        )

    def _draw(self, rng: random.Random, label: str) -> Problem:
        """A random problem, held out or not: its messages are the facts, then the question."""
        people = rng.sample(NAMES, rng.randint(self.min_facts, self.max_facts))
        things = rng.choices(THINGS, k=len(people))
        numbers = rng.sample(NUMBERS, len(people))
        index = rng.randrange(len(people))
        question = question_of(people[index], things[index])
        messages = [*map(fact_of, people, things, numbers), question]
        return Problem(id=label, question=question, answer=str(numbers[index]), data={"messages": messages})


@dataclass(slots=True, kw_only=True)
class NotesEnvironment:
    """One episode: a message after every reply, and the end after the reply to the question."""

    pinned: tuple[Message, ...]
    messages: tuple[str, ...]  # the last one asks for the answer
    answer: Callable[[str], str | None]  # the answer that the last reply gives
    exits: bool = False  # whether a reply with <answer>…</answer> is the last
    is_note: Callable[[str], bool] = lambda reply: True  # a reply before the last message that is none ends the episode
    _sent: int = field(default=0, init=False)

    async def start(self) -> tuple[Message, ...]:
        """The pinned messages."""
        return self.pinned

    async def step(self, reply: Message) -> Step:
        """The next message; after the last one, an early answer or a reply that is no note, the end."""
        if self._sent == len(self.messages) or (self.exits and read_answer(reply.text) is not None):
            return Step(done=True, answer=self.answer(reply.text))
        if not self.is_note(reply.text):
            return Step(done=True)
        self._sent += 1
        return Step(observations=(Message(role="user", content=self.messages[self._sent - 1]),))


def content(problem: Problem) -> str:
    """What decides whether a problem is held out."""
    return "\n".join(problem.data["messages"])


def fact_of(name: str, thing: str, number: int) -> str:
    """The message that says the number of a person's thing."""
    return f"{name}'s {thing} is number {number}."


def question_of(name: str, thing: str) -> str:
    """The question for it."""
    return f"Which number is {name}'s {thing}?"


class NotesExpert:
    """Carries its notes on and loses the oldest fact at times; guesses a number that it lost."""

    def __init__(self, problem: Problem) -> None:
        self._rng = random.Random(f"notes expert {problem.id}")

    def reply(self, context: Sequence[Message]) -> str:
        """A note, or the number that is asked for."""
        facts, question = _known(context)
        return self._note(facts) if question is None else facts.get(question) or str(self._rng.choice(NUMBERS))

    def write(self, request: Request) -> str:
        """A note of the last note that is shown and the newest message."""
        return self._note(_known([message for unit in request.units for message in unit.messages])[0])

    def _note(self, facts: Mapping[str, str]) -> str:
        lines = [
            f"{question[len('Which number is ') : -1].replace(chr(39) + 's', '')} {number}"
            for question, number in facts.items()
        ]
        if len(lines) > 1 and self._rng.random() < FORGETFUL:
            del lines[0]
        return f"Notes: {'; '.join(lines) or 'none'}"


def _known(context: Sequence[Message]) -> tuple[dict[str, str], str | None]:
    """Numbers by the question that asks for them, from the last note and the newest message; the question, if asked."""
    note = next((message.text for message in reversed(context) if message.role == "assistant"), "")
    facts = {question_of(name, thing): number for name, thing, number in re.findall(r"(\w+) (\w+) (\d+)", note)}
    newest = context[-1].text.partition("\n")[0]  # what follows is a meter, or the request of a condenser
    if fact := _SAID.fullmatch(newest):
        facts[question_of(fact[1], fact[2])] = fact[3]
    return facts, newest if newest.startswith("Which number") else None


def _answer(reply: str) -> str | None:
    number = _NUMBER.search(reply)
    return None if number is None else number[0]
