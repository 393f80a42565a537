"""The reading task: facts that are asked for arrive early, distractors follow. Needs no download.

One episode with 4 pages, 2 facts and 1 of them asked for (user and tool on the left, replies on the right):

    red                       ─▶  <read> p1 </read>
    p1 rain blue:4            ─▶  <read> p2 </read>
    p2 red:7 boat             ─▶  <read> p3 </read>
    p3 tree sand              ─▶  <read> p4 </read>
    p4 wind rain report       ─▶  <answer> red 7 </answer>

Pages are read in order, and the answer counts only after the last one. A page that was read can be read again, which
costs a turn: a policy that lost a fact to a condenser can fetch its page again if ``rollout.limits.max_turns`` leaves
room, and can otherwise only guess. The question names what will be asked, so that relevance is known at once.

The demonstrations are imperfect on purpose: where the context lacks a fact, half of them guess it.
"""

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Demonstration, Problem, Split, Task
from condensegrpo.studies.tasks.drawn import drawn_problems
from condensegrpo.tasks.drawn import Tags

KEYS = ("red", "blue", "green", "black", "white", "gold", "pink", "grey")  # asked for in this order
NOISE = ("boat", "cave", "dust", "farm", "gate", "hill", "lake", "moon", "path", "rain", "road", "sand", "snow", "tree",
         "wall", "wind")  # fmt: skip
REPORT = "report"  # ends every page from the last new one on: the answer is due
NOT_YET = "not yet"  # what a page shows that is out of turn
SOME = 0.8  # share of the demonstrations with history="some" that show some pages and not all
READING = 0.2  # share of the demonstrations that stop while reading
GUESSING = 0.5  # share of the demonstrations that guess where the context lacks a fact

_TAGS = Tags(re.compile(r"(</?(?:read|answer)>)"))
_PAGE = re.compile(r"p([1-9]\d{0,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsTask(Task):
    """The task ``facts``. Whether a problem is for training or evaluation does not depend on any option."""

    pages: Annotated[int, Ge(1), Le(999)] = 18  # turns that it takes to read everything, up to 999
    facts: Annotated[int, Ge(1), Le(len(KEYS))] = 3  # each of another key and on a page of its own
    asked: Annotated[int, Ge(1)] = 1  # of these facts
    words: Annotated[int, Ge(1)] = 2  # on a page, its number not counted; all that is no fact is noise
    early: Annotated[float, Gt(0), Le(1)] = 0.5  # share of the pages, from the first on, that may hold facts
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256  # all different
    seed: int = 0  # of the order of the training problems
    history: Literal["some", "full"] = "some"  # what demonstrations show: some earlier pages and the newest, or all

    def __post_init__(self) -> None:
        if not self.asked <= self.facts <= self._early_pages:
            raise ValueError(
                f"asked={self.asked} of facts={self.facts} on the early={self.early} of {self.pages} pages: wanted "
                f"asked <= facts, and at most one on each of these pages"
            )

    def problems(self, split: Split) -> Sequence[Problem]:
        """As ``drawn_problems``."""
        shape = f"{self.pages} {self.facts} {self.asked} {self.words} {self.early}"
        return drawn_problems(
            split,
            self.draw,
            _content,
            sizes=(self.train_problems, self.eval_problems),
            seeds=(f"facts train {self.seed}", f"facts eval {shape}"),
            described=f"problems of {self.pages} pages",
            cure="lower eval_problems or raise pages",
        )

    def environment(self, problem: Problem) -> "FactsEnvironment":
        """A fresh episode."""
        return FactsEnvironment(question=problem.question, pages=tuple(problem.data["pages"]))

    def draw(self, rng: random.Random, label: str) -> Problem:
        """A random problem, held out or not."""
        facts = {key: str(rng.randrange(10)) for key in sorted(rng.sample(KEYS, self.facts), key=KEYS.index)}
        pages = [rng.choices(NOISE, k=self.words) for _ in range(self.pages)]
        for page, (key, value) in zip(rng.sample(range(self._early_pages), self.facts), facts.items(), strict=True):
            pages[page][rng.randrange(self.words)] = f"{key}:{value}"
        asked = sorted(rng.sample(list(facts), self.asked), key=KEYS.index)
        return Problem(
            id=f"{label}:{'+'.join(asked)}",
            question=" ".join(asked),
            answer=_fact_words((key, facts[key]) for key in asked),
            data={"pages": [f"p{number} {' '.join(page)}" for number, page in enumerate(pages, start=1)]},
        )

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """One turn each of a random training problem: reading on, answering, or reading again what is out of sight.

        One fact is asked for, or all, or any number between: the more of them, the more there is to learn from a turn.
        """
        askings = [replace(self, asked=asked).problems("train") for asked in range(1, self.facts + 1)]
        rng = random.Random(f"facts demonstrations {seed}")
        while True:
            problems = rng.choice(askings)
            problem = problems[rng.randrange(len(problems))]
            if rng.random() < READING:  # reading on is soon learnt
                read = list(range(1, rng.randrange(self.pages) + 1))
            else:
                again = rng.choices(range(1, self.pages + 1), k=rng.choice((0, 0, 0, 1, 2)))
                read = [*range(1, self.pages + 1), *again]
            context = self._shown(problem, read, rng)
            yield Demonstration(context=context, reply=_demonstrated_reply(context, self.pages, rng), problem=problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a reply follows from its context.

        Before the report the next page is to be read. Then the answer is to be given where the context has its facts,
        and otherwise any page to be read that the context lacks.
        """
        due, words = _due(context), _TAGS.words(reply)
        page = _page(words)
        if not due.report:
            return page == due.newest + 1
        if due.answer is None:
            return page is not None and page <= self.pages and page not in due.shown
        return _TAGS.answer(words) == due.answer

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield from (f"{key} {value} {key}:{value}" for key in KEYS for value in range(10))
        yield " ".join(NOISE)
        yield from (_asks(number) for number in range(1, self.pages + 1))
        yield f"{_says(REPORT)} {NOT_YET}"

    @property
    def _early_pages(self) -> int:
        return int(self.pages * self.early)

    def _shown(self, problem: Problem, read: Sequence[int], rng: random.Random) -> tuple[Message, ...]:
        """The pinned messages, some or all of the older units, and the newest unit: what a condenser may leave."""
        history, asked = self._read(problem, read), problem.question.split()
        kept = set(range(len(read)))
        if self.history == "some" and rng.random() < SOME:
            kept = set(rng.sample(range(len(read)), min(len(read), rng.randint(0, 3))))
            if rng.random() < 0.7:
                words = (problem.data["pages"][page - 1].split()[1:] for page in read)
                kept |= {
                    turn for turn, on_page in enumerate(words) if any(w.partition(":")[0] in asked for w in on_page)
                }
        units = tuple(unit for unit in history.units if unit.turn in kept or unit is history.units[-1])
        return History(pinned=history.pinned, units=units).messages

    def _read(self, problem: Problem, read: Sequence[int]) -> History:
        """The question and the pages that were read, each by a reply of its own."""
        history = History(pinned=(Message(role="user", content=problem.question),))
        for turn, page in enumerate(read):
            reply = Message(role="assistant", content=_asks(page))
            text = _text(problem.data["pages"], page, last=turn + 1 >= self.pages)
            history = history.add(Unit(turn=turn, reply=reply, results=(_result(text),)))
        return history


@dataclass(slots=True, kw_only=True)
class FactsEnvironment(Environment):
    """One episode: pages as they are asked for, then the answer. Reads words, whatever the whitespace."""

    question: str
    pages: tuple[str, ...]
    _pages_read: int = field(default=0, init=False)  # pages read so far, the same one counted once

    async def start(self) -> tuple[Message, ...]:
        """The question."""
        return (Message(role="user", content=self.question),)

    async def step(self, reply: Message) -> Step:
        """The page that was asked for; the end after anything else, with the answer if the pages were all read."""
        words = _TAGS.words(reply.text)
        page = _page(words)
        if page is None:
            return Step(done=True, answer=_TAGS.answer(words) if self._pages_read == len(self.pages) else None)
        if page > min(self._pages_read + 1, len(self.pages)):
            return Step(observations=(_result(NOT_YET),))
        self._pages_read = max(self._pages_read, page)
        return Step(observations=(_result(_text(self.pages, page, last=self._pages_read == len(self.pages))),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """What a context allows to know of the next reply."""

    report: bool  # whether the answer is due
    newest: int  # the page read last; 0: none
    shown: frozenset[int]  # the pages in the context
    known: Mapping[str, str | None]  # key asked for → its value, None where the context lacks it

    @property
    def answer(self) -> str | None:
        """The answer, if it can be known."""
        facts = [(key, value) for key, value in self.known.items() if value is not None]
        return _fact_words(facts) if len(facts) == len(self.known) else None


def _due(context: Sequence[Message]) -> _Due:
    asked = context[0].text.split()
    texts = [message.text.split() for message in context[1:] if message.role == "tool"]
    texts = [words for words in texts if _PAGE.fullmatch(words[0])]
    facts = dict(word.split(":") for words in texts for word in words if ":" in word)
    shown = [int(words[0][1:]) for words in texts]
    return _Due(
        report=bool(texts) and texts[-1][-1] == REPORT,
        newest=shown[-1] if shown else 0,
        shown=frozenset(shown),
        known={key: facts.get(key) for key in asked},
    )


def _demonstrated_reply(context: Sequence[Message], pages: int, rng: random.Random) -> str:
    due = _due(context)
    if not due.report:
        return _asks(due.newest + 1)
    if due.answer is not None:
        return _says(due.answer)
    if rng.random() < GUESSING:
        return _says(_fact_words([(key, value or str(rng.randrange(10))) for key, value in due.known.items()]))
    return _asks(min(set(range(1, pages + 1)) - due.shown))


def _asks(page: int) -> str:
    return f"<read> p{page} </read>"


def _says(answer: str) -> str:
    return f"<answer> {answer} </answer>"


def _fact_words(facts: Iterable[tuple[str, str]]) -> str:
    return " ".join(f"{key} {value}" for key, value in facts)


def _text(pages: Sequence[str], page: int, *, last: bool) -> str:
    return f"{pages[page - 1]} {REPORT}" if last else pages[page - 1]


def _result(text: str) -> Message:
    """A page is the result of a call: condensers may mask it, and reading it again counts as fetching again."""
    return Message(role="tool", content=text, tool_call_id="read", name="read")


def _page(words: Sequence[str]) -> int | None:
    content = _TAGS.inside(words, "read")
    number = _PAGE.fullmatch(content[0]) if content is not None and len(content) == 1 else None
    return int(number[1]) if number else None


def _content(problem: Problem) -> str:
    return "\n".join((problem.question, *problem.data["pages"]))
