"""The story task: where people are after a text that arrives in chunks. English words, needs no download.

One episode with 2 chunks of 2 sentences and a question about 2 people (user on the left, replies on the right):

    where are Mira and Jon ?             ─▶  <note> Mira somewhere Jon somewhere </note>
    Ada entered the attic .
      Mira reached the garden .          ─▶  <note> Mira garden Jon somewhere </note>
    Jon entered the cellar .
      Mira mentioned the office . done   ─▶  <answer> Mira garden Jon cellar </answer>

Under the condenser ``last_k(keep_last=1)`` a turn sees the question, its previous reply and the newest chunk only, as
in MemAgent (https://arxiv.org/abs/2507.02259): a place that is in no note is lost. A person in the question moves a few
times, however many chunks there are; all other sentences are about others, or about places where nobody goes. The
expert is imperfect on purpose: three in ten notes say nothing of people, and all that was known is lost. Training can
still learn to say it always.

With ``notes="requested"`` the expert says where people are in the texts that a condenser requests and in the answer
alone: under ``summary`` with the template ``note`` a place that is in no summary is lost when its chunk is gone.

    where are Mira and Jon ?
      <note> Mira garden Jon somewhere </note>
    Jon entered the cellar .
      Mira mentioned the office .
      note                               ─▶  <note> Mira garden Jon cellar </note>
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import OMITTED, Message
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.studies.tasks.drawn import drawn_problems
from condensegrpo.studies.tasks.notes import NotesEnvironment
from condensegrpo.tasks.drawn import Tags, ends_with_request

NAMES = ("Mira", "Jon", "Ada", "Omar", "Lena", "Theo", "Ruth", "Kofi")  # a question lists them in this order
PLACES = ("attic", "cellar", "garden", "garage", "kitchen", "library", "office", "stable")
MOVES = ("entered", "reached")
TALKS = ("mentioned", "remembered")  # leave people where they are
UNKNOWN = "somewhere"  # where a note says that somebody is who was not seen yet
READ = "read"  # a note that says nothing of people
DONE = "done"  # ends the last chunk: the answer is due
REQUEST = "note"  # what a condenser may ask for a note with
MOVING = 0.5  # share of the sentences that change no answer in which somebody moves
TEMPTING = 0.5  # share of the rest that name a person of the question, and a place

_TAGS = Tags(re.compile(r"(</?(?:note|answer)>)"))
_MOVED = re.compile(rf"(\w+) (?:{'|'.join(MOVES)}) the (\w+) \.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stories(Task):
    """The task ``stories``. Whether a problem is for training or evaluation does not depend on any option."""

    chunks: Annotated[int, Ge(1)] = 4  # most of a story
    min_chunks: Annotated[int, Ge(1)] | None = None  # fewest; None: every story has ``chunks``
    sentences: Annotated[int, Ge(1)] = 3  # of a chunk
    people: Annotated[int, Ge(1), Le(len(NAMES) - 1)] = 2  # in the question
    moves: Annotated[int, Ge(1)] = 3  # most of a person in the question, each in another chunk; the last one counts
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256  # all different
    notes: Literal["replied", "requested"] = "replied"  # where the expert says where people are: replies, or summaries
    forgetful: Annotated[float, Ge(0), Le(1)] = 0.3  # share of the expert's notes that say nothing of people

    def __post_init__(self) -> None:
        if self.people > self.sentences:
            raise ValueError(f"people={self.people} and sentences={self.sentences}: wanted a sentence for each of them")
        if self._fewest > self.chunks:
            raise ValueError(f"min_chunks={self.min_chunks} and chunks={self.chunks}: wanted min_chunks <= chunks")

    def problems(self, split: Split) -> Sequence[Problem]:
        """As ``drawn_problems``."""
        shape = f"{self._fewest} {self.chunks} {self.sentences} {self.people} {self.moves}"
        return drawn_problems(
            split,
            self._draw,
            _content,
            sizes=(self.train_problems, self.eval_problems),
            seeds=("stories train", f"stories eval {shape}"),
            described=f"problems of {self.chunks} chunks",
            cure="lower eval_problems or raise chunks",
        )

    def environment(self, problem: Problem) -> NotesEnvironment:
        """A fresh episode."""
        pinned, chunks = (Message(role="user", content=problem.question),), tuple(problem.data["chunks"])
        return NotesEnvironment(pinned=pinned, messages=chunks, answer=_answer, is_note=_is_note)

    def expert(self, problem: Problem) -> "StoriesExpert":
        """The expert of an episode."""
        return StoriesExpert(self, problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a note or answer says what its context does; ``None`` where it lacks a place, or the context does."""
        known = _known(context)
        if _is_due(context):
            return None if UNKNOWN in known.values() else _answer(reply) == _said(known)
        note, says = _TAGS.inside(_TAGS.words(reply), "note"), self.notes == "replied" or ends_with_request(context)
        if note == (READ,):
            return None if says else True
        return says and note == tuple(_said(known).split())

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield f"{_question(NAMES)} {UNKNOWN} {READ} {DONE} <note> </note> <answer> </answer>"
        if self.notes == "requested":
            yield f"{REQUEST} {OMITTED}"
        yield from (_sentence("", verb, place) for verb in (*MOVES, *TALKS) for place in PLACES)

    def _draw(self, rng: random.Random, name: str) -> Problem:
        """A random problem, held out or not."""
        people = sorted(rng.sample(NAMES, self.people), key=NAMES.index)
        chunks: list[list[str]] = [[] for _ in range(rng.randint(self._fewest, self.chunks))]
        last = {}
        for person in people:
            places = rng.sample(PLACES, rng.randint(1, min(self.moves, len(chunks))))
            for at, place in zip(sorted(rng.sample(range(len(chunks)), len(places))), places, strict=True):
                chunks[at].append(_sentence(person, rng.choice(MOVES), place))
            last[person] = places[-1]
        for chunk in chunks:
            chunk += [_distractor(rng, people) for _ in range(self.sentences - len(chunk))]
            rng.shuffle(chunk)
        chunks[-1].append(DONE)
        return Problem(
            id=name,
            question=_question(people),
            answer=_said(last),
            data={"chunks": [" ".join(chunk) for chunk in chunks]},
        )

    @property
    def _fewest(self) -> int:
        return self.chunks if self.min_chunks is None else self.min_chunks


class StoriesExpert:
    """Says what a context does, and guesses what it lacks; some notes say nothing of people."""

    def __init__(self, task: Stories, problem: Problem) -> None:
        self._task, self._question = task, Message(role="user", content=problem.question)
        self._rng = random.Random(f"stories expert {problem.id}")

    def reply(self, context: Sequence[Message]) -> str:
        """A note after a chunk; the answer when it is due."""
        known = _known(context)
        if not _is_due(context):
            return self._note(known, says=self._task.notes == "replied")
        sure = {name: self._rng.choice(PLACES) if place == UNKNOWN else place for name, place in known.items()}
        return f"<answer> {_said(sure)} </answer>"

    def write(self, request: Request) -> str:
        """A note of what is shown."""
        shown = (message for unit in request.units for message in unit.messages)
        return self._note(_known((self._question, *shown)), says=True)

    def _note(self, known: Mapping[str, str], *, says: bool) -> str:
        forgets = self._rng.random() < self._task.forgetful
        return f"<note> {_said(known) if says and not forgets else READ} </note>"


def _known(context: Sequence[Message]) -> Mapping[str, str]:
    """Where the people of the question are, from the notes and chunks of a context in their order."""
    known = {name: UNKNOWN for name in context[0].text.split() if name in NAMES}
    for message in context[1:]:
        if message.role == "assistant":
            note = _TAGS.inside(_TAGS.words(message.text), "note") or ()
            said = list(zip(note[::2], note[1::2], strict=False))
        else:
            said = _MOVED.findall(message.text)
        known |= {name: place for name, place in said if name in known and place != UNKNOWN}
    return known


def _said(places: Mapping[str, str]) -> str:
    return " ".join(f"{name} {place}" for name, place in places.items())


def _answer(reply: str) -> str | None:
    return _TAGS.answer(_TAGS.words(reply))


def _is_note(reply: str) -> bool:
    return _TAGS.inside(_TAGS.words(reply), "note") is not None


def _is_due(context: Sequence[Message]) -> bool:
    return DONE in context[-1].text.split() and not ends_with_request(context)


def _distractor(rng: random.Random, people: Sequence[str]) -> str:
    """A sentence that moves none of the people in the question."""
    others = [name for name in NAMES if name not in people]
    if rng.random() < MOVING:
        return _sentence(rng.choice(others), rng.choice(MOVES), rng.choice(PLACES))
    subjects = people if rng.random() < TEMPTING else others
    return _sentence(rng.choice(subjects), rng.choice(TALKS), rng.choice(PLACES))


def _sentence(person: str, verb: str, place: str) -> str:
    return f"{person} {verb} the {place} ."


def _question(names: Sequence[str]) -> str:
    return f"where are {' and '.join(names)} ?"


def _content(problem: Problem) -> str:
    return "\n".join((problem.question, *problem.data["chunks"]))
