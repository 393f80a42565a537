"""The task of hidden demand: eight facts of eight kinds pass by, a note holds three, and one kind is asked for.

One episode under ``summary`` with the template ``note`` (user on the left, replies on the right):

    pages                                       ─▶  ok
    page C11 . the next page E18 .              ─▶  ok
    page A2 . the next page F17 .               ─▶  ok
    page H5 . the next page B0 .                ─▶  ok
    page D4 . the next page G13 .
      note                                      ─▶  E E18 B B0 C C11      stands for the first six pages from here on
    page D4 . the next page G13 .               ─▶  ok
    that was all . now comes a question
      note                                      ─▶  C C11 D D4 E E18
    that was all . now comes a question         ─▶  ok
    C ?                                         ─▶  C C11

A note names the kind of a fact before the fact: which to keep is a choice of one token, and the copy follows from it.
The seed of a demand ranks the kinds, and a question asks for the kind of rank i with probability ``DEMAND[i]``. No
message shows the demand: rewards alone do. The last note is written before the question is seen. A rule that keeps
three facts whatever their kind, such as random or the newest ones, answers 3/8 of the questions; a rule that keeps the
three kinds that are asked most answers 3/4. A guess is right once in ``VALUES``. The expert keeps three random facts
and copies them right: it lacks knowledge, not care. With ``keeps="asked"`` it knows the demand.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import OMITTED, Message
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.studies.tasks.drawn import drawn_problems
from condensegrpo.studies.tasks.notes import NotesEnvironment
from condensegrpo.tasks.drawn import ends_with_request

KINDS = "ABCDEFGH"
DEMAND = (0.35, 0.25, 0.15, 0.05, 0.05, 0.05, 0.05, 0.05)  # of the kinds in the order of a demand
VALUES = 20  # of a kind
KEPT = 3  # facts of a note; condenser.options.max_tokens has room for no more
PAGES, OK, UNKNOWN, REQUEST = "pages", "ok", "unknown", "note"
END = "that was all . now comes a question"  # as long as two pages, so that they are noted before the question

_FACT = re.compile(r"\b([A-H])\d+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenDemand(Task):
    """The task ``demand``. Whether a problem is for training or evaluation does not depend on any option."""

    demand: Annotated[int, Ge(0)] = 0  # seed of the ranks of the kinds
    moved: Annotated[int, Ge(0), Lt(len(KINDS))] = 0  # ranks that the kinds go up; 3: those most asked were rare
    keeps: Literal["random", "newest", "asked"] = "random"  # the three facts of the expert's notes
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256  # all different

    def problems(self, split: Split) -> Sequence[Problem]:
        """As ``drawn_problems``; two demands have the same pages, and other questions."""
        sizes, seeds = (self.train_problems, self.eval_problems), ("demand train", "demand eval")
        return drawn_problems(split, self._draw, _content, sizes=sizes, seeds=seeds)

    def environment(self, problem: Problem) -> NotesEnvironment:
        """A fresh episode."""
        facts = problem.data["facts"]
        return NotesEnvironment(
            pinned=(Message(role="user", content=PAGES),),
            messages=(*map(_shown, facts[::2], facts[1::2]), END, problem.question),
            answer=lambda reply: " ".join(reply.split()),
            is_note=lambda reply: reply.strip() == OK,  # a reply in view must not be a fourth fact of a note
        )

    def expert(self, problem: Problem) -> "DemandExpert":
        """The expert of an episode."""
        return DemandExpert(self, problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a note has three facts of its context, or another reply is the one that follows; ``None`` for OK."""
        if ends_with_request(context):
            noted = facts_in((Message(role="assistant", content=reply),))
            right = noted.items() <= facts_in(context).items() and " ".join(reply.split()) == _said(noted)
            return right and len(noted) == KEPT
        expected = _reply(context)
        return None if expected == reply.strip() == OK else expected == " ".join(reply.split())

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield f"{PAGES} {_shown('', '')} {OK} {END} {UNKNOWN} ? {REQUEST} {OMITTED} {' '.join(KINDS)}"
        yield " ".join(f"{kind}{value}" for kind in KINDS for value in range(VALUES))

    @property
    def order(self) -> tuple[str, ...]:
        """The kinds, the most asked first."""
        ranked = random.Random(f"hidden demand {self.demand}").sample(KINDS, len(KINDS))
        return (*ranked[self.moved :], *ranked[: self.moved])

    def kept(self, kinds: Sequence[str], rng: random.Random) -> list[str]:
        """The kinds that the expert notes of those that it may, which are in the order in which they are shown."""
        if self.keeps == "newest":
            return [*kinds[-KEPT:]]
        if self.keeps == "asked":
            kinds = sorted(kinds, key=self.order.index)[:KEPT]
        return rng.sample(kinds, min(KEPT, len(kinds)))

    def _draw(self, rng: random.Random, label: str) -> Problem:
        """A random problem, held out or not; the demand changes the question alone."""
        facts = {kind: f"{kind}{rng.randrange(VALUES)}" for kind in rng.sample(KINDS, len(KINDS))}
        (rank,) = rng.choices(range(len(KINDS)), weights=DEMAND)
        asked = self.order[rank]
        answer = _said({asked: facts[asked]})
        return Problem(id=label, question=f"{asked} ?", answer=answer, data={"facts": [*facts.values()]})


class DemandExpert:
    """Notes three of the facts that a note replaces, and answers from what is in view."""

    def __init__(self, task: HiddenDemand, problem: Problem) -> None:
        self._task, self._rng = task, random.Random(f"demand expert {problem.id}")

    def reply(self, context: Sequence[Message]) -> str:
        """The reply that follows from the context."""
        return _reply(context)

    def write(self, request: Request) -> str:
        """Three facts of all units but the newest, which stays."""
        facts = facts_in(message for unit in request.units[:-1] for message in unit.messages)
        return _said({kind: facts[kind] for kind in self._task.kept([*facts], self._rng)})


def facts_in(context: Iterable[Message]) -> Mapping[str, str]:
    """The facts of some messages by their kinds, the newest last."""
    return {found[1]: found[0] for message in context for found in _FACT.finditer(message.text)}


def _reply(context: Sequence[Message]) -> str:
    """OK, or the fact of the kind that is asked for; ``UNKNOWN`` in place of one that is not in view."""
    newest = context[-1].text
    if not newest.endswith("?"):
        return OK
    return _said({newest[0]: facts_in(context).get(newest[0], UNKNOWN)})


def _said(facts: Mapping[str, str]) -> str:
    return " ".join(f"{kind} {fact}" for kind, fact in facts.items())


def _content(problem: Problem) -> str:
    return " ".join(problem.data["facts"])


def _shown(fact: str, next_fact: str) -> str:
    return f"page {fact} . the next page {next_fact} ."
