"""The note-taking task, in English: facts arrive one a message, and a question about one of them comes last.

One episode with 2 facts (user messages on the left, replies on the right):

    You will get messages …           ─▶  Notes: none
    Mira's locker is number 42.       ─▶  Notes: Mira locker 42
    Jon's table is number 17.         ─▶  Notes: Mira locker 42; Jon table 17
    Which number is Mira's locker?    ─▶  42

Under the condenser ``last_k(keep_last=1)`` a turn sees the instruction, its previous reply and the newest message only,
so a fact that is not carried on from note to note is lost. It is for a pretrained model: an instruction asks for the
notes, any text counts as one, and the answer is the first number of the last reply. A fifth of the expert's notes lose
their oldest fact: training can still learn to keep it.

With ``notes="requested"`` replies before the question say nothing: under ``summary`` a fact is in the texts that the
condenser requests, or it is lost.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.studies.tasks.drawn import drawn_problems
from condensegrpo.tasks.answers import read_answer
from condensegrpo.tasks.drawn import ends_with_request

INSTRUCTION = (
    "You will get messages, one at a time, and then a question about one of them. You see only your last reply, so "
    "repeat your notes in every reply and add what is new. Answer the question with the number alone."
)
REQUESTED = (
    "You will get messages, one at a time, and then a question about one of them. Reply to a message with OK. When you "
    "are asked for notes, repeat your notes and add what is new. Answer the question with the number alone."
)
OK = "OK"
NAMES = ("Mira", "Jon", "Ada", "Omar", "Lena", "Theo", "Ruth", "Kofi", "Ines", "Paul", "Yara", "Finn")
THINGS = ("locker", "table", "room", "gate", "seat", "badge", "bus", "desk")
CHATTER = (
    *("The coffee is getting cold.", "It has been raining since noon.", "The lift is slow today."),
    *("Someone left the window open.", "The printer is out of paper again.", "Lunch was better than last week."),
    *("The new chairs have arrived.", "Nobody has seen the cat.", "The meeting starts a little late."),
    *("The plants need some water.", "The lights in the hall flicker.", "A parcel came for the neighbours."),
)
NUMBERS = range(10, 100)
FORGETFUL = 0.2  # share of the expert's notes that lose their oldest fact

_NUMBER = re.compile(r"\d+")
_SAID = re.compile(r"(\w+)'s (\w+) is number (\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes(Task):
    """The task ``notes``. Whether a problem is for training or evaluation does not depend on any option."""

    min_facts: Annotated[int, Ge(1)] = 2
    max_facts: Annotated[int, Ge(1), Le(len(NAMES))] = 4  # each of another person
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256  # all different
    seed: int = 0  # of the order of the training problems
    chatter: Annotated[int, Ge(0), Le(len(CHATTER))] = 0  # sentences beside the fact of a message
    notes: Literal["replied", "requested"] = "replied"  # where facts are noted: in replies, or where a condenser asks

    def __post_init__(self) -> None:
        if self.min_facts > self.max_facts:
            raise ValueError(f"min_facts={self.min_facts} and max_facts={self.max_facts}: wanted min <= max")

    def problems(self, split: Split) -> Sequence[Problem]:
        """As ``drawn_problems``."""
        return drawn_problems(
            split,
            self._draw,
            content,
            sizes=(self.train_problems, self.eval_problems),
            seeds=(f"notes train {self.seed}", f"notes eval {self.min_facts} {self.max_facts}"),
            cure="ask for fewer",
        )

    def environment(self, problem: Problem) -> "NotesEnvironment":
        """A fresh episode."""
        instruction = INSTRUCTION if self.notes == "replied" else REQUESTED
        rng, (*facts, question) = random.Random(f"notes chatter {problem.id}"), problem.data["messages"]
        return NotesEnvironment(
            pinned=(Message(role="user", content=instruction),),
            messages=(*(_amid(rng.sample(CHATTER, self.chatter), fact, rng) for fact in facts), question),
            answer=_answer,
        )

    def expert(self, problem: Problem) -> "NotesExpert":
        """The expert of an episode."""
        return NotesExpert(problem, notes=self.notes)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a note has every number of its context, another reply none, or an answer the number that is known.

        ``None`` for an answer that the context does not determine.
        """
        facts, question = _known(context)
        if question is None or ends_with_request(context):
            noted = facts.values() if self.notes == "replied" or ends_with_request(context) else ()
            return set(_NUMBER.findall(reply)) == set(noted)
        return None if question not in facts else _answer(reply) == facts[question]

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield f"{INSTRUCTION} {REQUESTED} Notes: none ; {' '.join((*map(str, NUMBERS), *CHATTER))}"
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
class NotesEnvironment(Environment):
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

    def __init__(self, problem: Problem, *, notes: Literal["replied", "requested"]) -> None:
        self._rng, self._notes = random.Random(f"notes expert {problem.id}"), notes

    def reply(self, context: Sequence[Message]) -> str:
        """A note or OK, or the number that is asked for."""
        facts, question = _known(context)
        if question is not None:
            return facts.get(question) or str(self._rng.choice(NUMBERS))
        return self._note(facts) if self._notes == "replied" else OK

    def write(self, request: Request) -> str:
        """A note of what is shown."""
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
    """Numbers by the question that asks for them, from the notes and messages of a context; the question, if asked."""
    facts, newest = dict[str, str](), ""
    for message in context:
        newest = message.text.partition("\n")[0]  # what follows is a meter, or the request of a condenser
        noted = re.findall(r"(\w+) (\w+) (\d+)", message.text) if message.role == "assistant" else ()
        facts |= {question_of(name, thing): number for name, thing, number in (*noted, *_SAID.findall(newest))}
    return facts, newest if newest.startswith("Which number") else None


def _amid(sentences: Sequence[str], fact: str, rng: random.Random) -> str:
    """A message with a fact anywhere among sentences."""
    at = rng.randint(0, len(sentences))
    return " ".join((*sentences[:at], fact, *sentences[at:]))


def _answer(reply: str) -> str | None:
    number = _NUMBER.search(reply)
    return None if number is None else number[0]
