"""The built-in story task: where people are after a text that arrives in chunks. English words, needs no download.

One episode with 2 chunks of 2 sentences and 2 people asked for (user messages on the left, replies on the right):

    where are Mira and Jon ?             ─▶  <note> Mira somewhere Jon somewhere </note>
    Ada entered the attic .
      Mira reached the garden .          ─▶  <note> Mira garden Jon somewhere </note>
    Jon entered the cellar .
      Mira mentioned the office . done   ─▶  <answer> Mira garden Jon cellar </answer>

Under the condenser ``last_k(keep_last=1)`` a turn sees the question, its previous reply and the newest chunk only, as
in MemAgent (https://arxiv.org/abs/2507.02259): a place that is in no note is lost. A person who is asked for moves a
few times, however many chunks there are; all other sentences are about others, or about places where nobody goes. The
demonstrations are imperfect on purpose: three in ten notes say nothing of people, and all that was known is lost.
Training can still learn to say it always.

With ``history="summary"`` the demonstrations are for the condenser ``summary`` with the template ``note``: the replies
to chunks say nothing of people, and a place that is in no summary is lost when its chunk is gone:

    where are Mira and Jon ?
      <note> Mira garden Jon somewhere </note>
    Jon entered the cellar .
      Mira mentioned the office .
      note                               ─▶  <note> Mira garden Jon cellar </note>
"""

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Literal

from annotated_types import Ge, Le

from condensegrpo.core.messages import History, Message, Summary, Unit
from condensegrpo.core.protocols import Demonstration, Problem, Split, Step
from condensegrpo.tasks.drawn import Tags, drawn_for_training, drawn_held_out

NAMES = ("Mira", "Jon", "Ada", "Omar", "Lena", "Theo", "Ruth", "Kofi")  # asked for in this order
PLACES = ("attic", "cellar", "garden", "garage", "kitchen", "library", "office", "stable")
MOVES = ("entered", "reached")
TALKS = ("mentioned", "remembered")  # leave people where they are
UNKNOWN = "somewhere"  # where a note says that somebody is who was not seen yet
READ = "read"  # a note that says nothing of people
DONE = "done"  # ends the last chunk: the answer is due
REQUEST = "note"  # ends a message of a condenser that asks for a note
REQUESTED = 0.8  # share of the demonstrations with history="summary" and over two chunks that are asked for a note
MOVING = 0.5  # share of the sentences that change no answer in which somebody moves
TEMPTING = 0.5  # share of the rest that name a person who is asked for, and a place

_TAGS = Tags(re.compile(r"(</?(?:note|answer)>)"))
_MOVED = re.compile(rf"(\w+) (?:{'|'.join(MOVES)}) the (\w+) \.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stories:
    """The task ``stories``. Whether a problem is for training or evaluation does not depend on any option."""

    chunks: Annotated[int, Ge(1)] = 4  # most of a story
    min_chunks: Annotated[int, Ge(1)] | None = None  # fewest; None: every story has ``chunks``
    sentences: Annotated[int, Ge(1)] = 3  # of a chunk
    asked: Annotated[int, Ge(1), Le(len(NAMES) - 1)] = 2  # people
    moves: Annotated[int, Ge(1)] = 3  # most of a person who is asked for, each in another chunk; the last one counts
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256  # all different
    # what demonstrations show: the previous turn only, every turn, or what the condenser summary shows
    history: Literal["last", "full", "summary"] = "last"
    forgetful: Annotated[float, Ge(0), Le(1)] = 0.3  # share of the demonstrated notes that say nothing of people
    turns: Literal["one", "all"] = "one"  # of a story that are demonstrated; whole histories share their beginnings
    demonstrated_chunks: Annotated[int, Ge(1)] | None = None  # of a demonstrated story; None: those of the problems
    whole_every: Annotated[int, Ge(1)] | None = None  # every so many-th demonstrated story has the chunks of a problem

    def __post_init__(self) -> None:
        if self.asked > self.sentences:
            raise ValueError(f"asked={self.asked} and sentences={self.sentences}: wanted a sentence for each of them")
        if self._fewest > self.chunks:
            raise ValueError(f"min_chunks={self.min_chunks} and chunks={self.chunks}: wanted min_chunks <= chunks")

    def problems(self, split: Split) -> Sequence[Problem]:
        """Training problems are made when asked for; the evaluation problems are a list.

        Raises:
            ValueError: so many different evaluation problems were not found.
        """
        if split == "train":
            return drawn_for_training(self._draw, _content, size=self.train_problems, seed="stories train")
        return drawn_held_out(
            self._draw,
            _content,
            count=self.eval_problems,
            seed=f"stories eval {self._fewest} {self.chunks} {self.sentences} {self.asked} {self.moves}",
            described=f"problems of {self.chunks} chunks",
            cure="lower eval_problems or raise chunks",
        )

    def environment(self, problem: Problem) -> "StoriesEnvironment":
        """A fresh episode."""
        return StoriesEnvironment(question=problem.question, chunks=tuple(problem.data["chunks"]))

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """One turn each of a random training problem, or all, after the demonstrated notes of the turns before it."""
        rng = random.Random(f"stories demonstrations {seed}")
        usual, whole = self._demonstrated().problems("train"), self.problems("train")
        for number in count(1):
            problems = whole if self.whole_every and number % self.whole_every == 0 else usual
            problem = problems[rng.randrange(len(problems))]
            chunks = problem.data["chunks"]
            read = len(chunks) if self.turns == "all" else rng.randrange(len(chunks) + 1)
            history = self._read(problem, read, rng)
            for unit in history.units if self.turns == "all" else ():
                context = self._shown(history.with_units(history.units[: unit.turn]))
                yield Demonstration(context=context, reply=unit.reply.text, problem=problem)
            context = self._summarised(history, rng) if self.history == "summary" else self._shown(history)
            yield Demonstration(context=context, reply=self._demonstrated_reply(context, rng), problem=problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a note or answer says what its context does; ``None`` where it lacks a place, or the context does."""
        known, words = _known(context), _TAGS.words(reply)
        if _is_due(context):
            return None if UNKNOWN in known.values() else _TAGS.answer(words) == _said(known)
        note, asked = _TAGS.inside(words, "note"), self._asks_for_note(context)
        if note == (READ,):
            return None if asked else True
        return asked and note == tuple(_said(known).split())

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield f"{_question(NAMES)} {UNKNOWN} {READ} {DONE} <note> </note> <answer> </answer>"
        if self.history == "summary":
            yield f"{REQUEST} {Summary(text='', through=0, tokens=0).unit.results[0].text}"
        yield from (_sentence("", verb, place) for verb in (*MOVES, *TALKS) for place in PLACES)

    def _demonstrated(self) -> "Stories":
        """The task that most demonstrations are of."""
        chunks = self.demonstrated_chunks
        return self if chunks is None else replace(self, chunks=chunks, min_chunks=None, demonstrated_chunks=None)

    def _draw(self, rng: random.Random, name: str) -> Problem:
        """A random problem, held out or not."""
        asked = sorted(rng.sample(NAMES, self.asked), key=NAMES.index)
        chunks: list[list[str]] = [[] for _ in range(rng.randint(self._fewest, self.chunks))]
        last = {}
        for person in asked:
            places = rng.sample(PLACES, rng.randint(1, min(self.moves, len(chunks))))
            for at, place in zip(sorted(rng.sample(range(len(chunks)), len(places))), places, strict=True):
                chunks[at].append(_sentence(person, rng.choice(MOVES), place))
            last[person] = places[-1]
        for chunk in chunks:
            chunk += [_distractor(rng, asked) for _ in range(self.sentences - len(chunk))]
            rng.shuffle(chunk)
        chunks[-1].append(DONE)
        return Problem(
            id=name,
            question=_question(asked),
            answer=_said(last),
            data={"chunks": [" ".join(chunk) for chunk in chunks]},
        )

    @property
    def _fewest(self) -> int:
        return self.chunks if self.min_chunks is None else self.min_chunks

    def _read(self, problem: Problem, chunks: int, rng: random.Random) -> History:
        """The history after so many chunks, with the demonstrated replies before each of them."""
        history = History(pinned=(Message(role="user", content=problem.question),))
        for turn, chunk in enumerate(problem.data["chunks"][:chunks]):
            reply = Message(role="assistant", content=self._demonstrated_reply(self._shown(history), rng))
            history = history.add(Unit(turn=turn, reply=reply, results=(Message(role="user", content=chunk),)))
        return history

    def _shown(self, history: History) -> tuple[Message, ...]:
        units = history.units if self.history == "full" else history.units[-1:]
        return History(pinned=history.pinned, units=units).messages

    def _summarised(self, history: History, rng: random.Random) -> tuple[Message, ...]:
        """The context under ``summary(keep_last=1)`` if a prompt has room for two units, and a summary counts as one.

        With a third unit it is the request for a note (in the share ``REQUESTED``), or what is shown after the note.
        """
        if len(history.units) <= 2:
            return history.messages
        requested = rng.random() < REQUESTED
        newest = 2 if requested else 1
        earlier, units = history.units[:-newest], history.units[-newest:]
        if len(earlier) > 1:
            text = _note(READ if rng.random() < self.forgetful else _said(_known(history.with_units(earlier).messages)))
            earlier = (Summary(text=text, through=earlier[-1].turn, tokens=20 * len(earlier)).unit,)
        if requested:
            units = (*units[:-1], units[-1].with_instruction(REQUEST))
        return history.with_units((*earlier, *units)).messages

    def _asks_for_note(self, context: Sequence[Message]) -> bool:
        """Whether a context whose answer is not due wants a note that says where people are."""
        return self.history != "summary" or context[-1].text.split()[-1] == REQUEST

    def _demonstrated_reply(self, context: Sequence[Message], rng: random.Random) -> str:
        known = _known(context)
        if _is_due(context):
            sure = {name: rng.choice(PLACES) if place == UNKNOWN else place for name, place in known.items()}
            return f"<answer> {_said(sure)} </answer>"
        says_nothing = not self._asks_for_note(context) or rng.random() < self.forgetful
        return _note(READ if says_nothing else _said(known))


@dataclass(slots=True, kw_only=True)
class StoriesEnvironment:
    """One episode: a chunk for every note, then the answer is due. Reads words, whatever the whitespace."""

    question: str
    chunks: tuple[str, ...]
    _sent: int = field(default=0, init=False)

    async def start(self) -> tuple[Message, ...]:
        """The question."""
        return (Message(role="user", content=self.question),)

    async def step(self, reply: Message) -> Step:
        """The next chunk after a note; the end after the answer that is due, or after anything else."""
        words = _TAGS.words(reply.text)
        if self._sent == len(self.chunks):
            return Step(done=True, answer=_TAGS.answer(words))
        if _TAGS.inside(words, "note") is None:
            return Step(done=True)
        self._sent += 1
        return Step(observations=(Message(role="user", content=self.chunks[self._sent - 1]),))


def _known(context: Sequence[Message]) -> Mapping[str, str]:
    """Where everybody who is asked for is, from the notes and chunks of a context in their order."""
    known = {name: UNKNOWN for name in context[0].text.split() if name in NAMES}
    for message in context[1:]:
        if message.role == "assistant":
            note = _TAGS.inside(_TAGS.words(message.text), "note") or ()
            said = list(zip(note[::2], note[1::2], strict=False))
        else:
            said = _MOVED.findall(message.text)
        known |= {name: place for name, place in said if name in known and place != UNKNOWN}
    return known


def _note(text: str) -> str:
    return f"<note> {text} </note>"


def _said(places: Mapping[str, str]) -> str:
    return " ".join(f"{name} {place}" for name, place in places.items())


def _is_due(context: Sequence[Message]) -> bool:
    return context[-1].text.split()[-1] == DONE


def _distractor(rng: random.Random, asked: Sequence[str]) -> str:
    """A sentence that moves nobody who is asked for."""
    others = [name for name in NAMES if name not in asked]
    if rng.random() < MOVING:
        return _sentence(rng.choice(others), rng.choice(MOVES), rng.choice(PLACES))
    people = asked if rng.random() < TEMPTING else others
    return _sentence(rng.choice(people), rng.choice(TALKS), rng.choice(PLACES))


def _sentence(person: str, verb: str, place: str) -> str:
    return f"{person} {verb} the {place} ."


def _question(names: Sequence[str]) -> str:
    return f"where are {' and '.join(names)} ?"


def _content(problem: Problem) -> str:
    return "\n".join((problem.question, *problem.data["chunks"]))
