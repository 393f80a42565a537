"""Open questions with aliases of their answers, to be looked up: the schemas of TriviaQA and NQ-open.

TriviaQA   {"question": …, "question_id": …, "answer": {"value": "Paris", "aliases": ["Paris", "City of Light"]}}
NQ-open    {"question": …, "answer" or "answers": ["Paris", "City of Light"]}
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols import Demonstration, Problem
from condensegrpo.episodes.toolformats import Tagged
from condensegrpo.storage.rows import Row, read_rows, require_columns, require_texts
from condensegrpo.tasks.answer_environment import QuestionTask, pinned_messages
from condensegrpo.tasks.answers import AnswerStyle, is_call_or_answer
from condensegrpo.tasks.splits import SHARE, split

SYSTEM = (
    "Answer the question. In every turn think in <reasoning>...</reasoning> first. Then either search with "
    '<tool>{"name": "search", "args": {"query": "..."}}</tool>, whose result comes back in <result>...</result>, or '
    "give the answer, a name or a few words, in <answer>...</answer>."
)
TOOL = "search"
TAGGED = Tagged()
REMINDER = "Write <reasoning>...</reasoning> and then one <tool>...</tool> or <answer>...</answer>."


@dataclass(kw_only=True, eq=False)
class SearchQa(QuestionTask):
    """The task ``search_qa``. Rows with a passage in ``ctxs`` (NQ-open files) demonstrate too, in the tagged format.

    A reply without a call and without an answer gets a reminder and counts as a turn. Without ``eval_data`` a share of
    the questions is held out by their hash. Training questions that are in the evaluation data too are left out;
    ``dropped`` counts them.

    Raises:
        DataError: what ``rows.read_rows`` raises, a row of another schema, or no problem left.
    """

    data: str  # training rows, see ``rows.read_rows``; ``mandarjoshi/trivia_qa:rc.wikipedia`` on a machine with a hub
    eval_data: str | None = None  # held-out rows
    eval_split: str = "validation"  # of a Hub dataset or a folder, the split that ``eval_data`` reads
    system: str = SYSTEM  # the system message; empty for none
    reminder: str = REMINDER  # what the user says to a reply without call and answer; empty: the episode is over
    answer_style: AnswerStyle = "last"  # how an answer is read from a reply, see ``answers.read_answer``
    eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE  # of the questions, held out if there is no ``eval_data``
    max_examples: Annotated[int, Ge(1)] | None = None  # training rows to read, from the first
    passage_chars: Annotated[int, Ge(1)] = 600  # of a passage in demonstrations; as the tool's option of that name

    def __post_init__(self) -> None:
        rows = read_rows(self.data, split="train", limit=self.max_examples)
        train = _problems(rows, split="train", source=self.data)
        held_out = None
        if self.eval_data is not None:
            held_out = _problems(read_rows(self.eval_data, split=self.eval_split), split="eval", source=self.eval_data)
        self._splits = split(train, held_out, source=self.data, share=self.eval_share)
        rows_by_id = {problem.id: row for problem, row in zip(train, rows, strict=True)}
        lookups = (_lookup(each, rows_by_id[each.id], characters=self.passage_chars) for each in self._splits.train)
        self._lookups = [lookup for lookup in lookups if lookup is not None]

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """One turn each of a random training question: the search, or the answer after it.

        Raises:
            DataError: no training row has a passage that contains its answer.
        """
        if not self._lookups:
            raise DataError(
                "making demonstrations: no training row has a passage in 'ctxs' whose beginning holds an answer. Use "
                "a file of NQ-open with passages, raise task.options.passage_chars, or set warm_start.steps=0"
            )
        return self._turns(random.Random(f"search_qa demonstrations {seed}"))

    def _turns(self, rng: random.Random) -> Iterator[Demonstration]:
        while True:
            lookup = rng.choice(self._lookups)
            asked = pinned_messages(system=self.system, question=lookup.problem.question)
            search = _search(lookup.problem.question)
            if rng.random() < 0.5:
                yield Demonstration(context=asked, reply=search, problem=lookup.problem)
            else:
                result = TAGGED.result("call_0", TOOL, lookup.result)
                context = (*asked, Message(role="assistant", content=search), result)
                yield Demonstration(context=context, reply=_answer(lookup.answer), problem=lookup.problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a reply is well formed: one search that can be parsed, or one answer."""
        del context  # the form does not depend on it
        return is_call_or_answer(TAGGED, reply, tool=TOOL, argument="query")

    def corpus(self) -> Iterable[str]:
        """The system message, every training question, and every turn of every demonstration."""
        yield self.system
        yield from (problem.question for problem in self.problems("train"))
        for lookup in self._lookups:
            yield from (_search(lookup.problem.question), lookup.result, _answer(lookup.answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """A question with a passage that contains its answer."""

    problem: Problem
    result: str  # what a search would show
    answer: str  # the alias that the passage contains


def _lookup(problem: Problem, row: Row, *, characters: int) -> _Lookup | None:
    """The lookup of a problem; None if no alias is in the first so many characters of the row's first passage."""
    passages = row.get("ctxs")
    first = passages[0] if isinstance(passages, list) and passages else None
    text = first.get("text") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(text, str):
        return None
    text = text[:characters]
    answer = next((alias for alias in problem.data["aliases"] if alias.lower() in text.lower()), None)
    if answer is None:
        return None
    return _Lookup(problem=problem, result=f"[1] {first.get('title') or ''}\n{text}".strip(), answer=answer)


def _search(question: str) -> str:
    return f"<reasoning>I look it up.</reasoning>\n{TAGGED.call(TOOL, {'query': question})}"


def _answer(answer: str) -> str:
    return f"<reasoning>The passage says it.</reasoning>\n<answer>{answer}</answer>"


def _problems(rows: Sequence[Row], *, split: str, source: str) -> tuple[Problem, ...]:
    require_columns(rows, ("question",), source=source)
    require_texts(rows, "question", source=source)
    return tuple(_problem(row, number, split=split, source=source) for number, row in enumerate(rows))


def _problem(row: Row, number: int, *, split: str, source: str) -> Problem:
    aliases = _aliases(row)
    if not aliases:
        raise DataError(
            f"reading the dataset {source}: row {number + 1} has no answer. Wanted an 'answer' with 'value' and "
            f"'aliases' (TriviaQA), or a list of texts as 'answer' or 'answers' (NQ-open); it has: "
            f"{', '.join(map(repr, row))}"
        )
    return Problem(
        id=f"{split}-{number}", question=str(row["question"]), answer=aliases[0], data={"aliases": list(aliases)}
    )


def _aliases(row: Row) -> tuple[str, ...]:
    """Every form of the answer, the main one first, each once; () if the row follows neither schema."""
    given = row.get("answer", row.get("answers"))
    if isinstance(given, dict):
        named: list[object] = [
            given.get("value"),
            *(given.get("aliases") or ()),
            *(given.get("normalized_aliases") or ()),
        ]
        return _texts(named)
    return _texts(given if isinstance(given, list) else [given])


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value.strip() for value in values if isinstance(value, str) and value.strip()))
