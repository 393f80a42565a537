"""Open questions with aliases of their answers, to be looked up: the schemas of TriviaQA and NQ-open.

TriviaQA   {"question": …, "question_id": …, "answer": {"value": "Paris", "aliases": ["Paris", "City of Light"]}}
NQ-open    {"question": …, "answer" or "answers": ["Paris", "City of Light"]}
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.condenser import Request
from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem
from condensegrpo.episodes.toolformats import Tagged
from condensegrpo.storage.rows import Row, check_rows, read_rows
from condensegrpo.tasks.answers import SHARE, AnswerStyle, QuestionTask, is_call_or_answer, split

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
    """Open questions to be looked up with a search tool (TriviaQA, NQ-open). The expert searches as ``tagged``.

    A reply without a call and without an answer gets a reminder and counts as a turn. Without ``eval_data`` a share of
    the questions is held out by their hash. Training questions that are in the evaluation data too are left out;
    ``left_out`` counts them.
    """

    data: str  # training rows, see ``rows.read_rows``; ``mandarjoshi/trivia_qa:rc.wikipedia`` on a machine with a hub
    eval_data: str | None = None  # held-out rows
    eval_split: str = "validation"  # of a Hub dataset or a folder, the split that ``eval_data`` reads
    system: str = SYSTEM  # the system message; empty for none
    reminder: str = REMINDER  # what the user says to a reply without call and answer; empty: the episode is over
    answer_style: AnswerStyle = "last"  # how an answer is read from a reply, see ``answers.read_answer``
    eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE  # of the questions, held out if there is no ``eval_data``
    max_examples: Annotated[int, Ge(1)] | None = None  # training rows to read, from the first

    def __post_init__(self) -> None:
        rows = read_rows(self.data, split="train", limit=self.max_examples)
        train = _problems(rows, split="train", source=self.data)
        held, name = self.eval_data, self.eval_split
        held_out = None if held is None else _problems(read_rows(held, split=name), split="eval", source=held)
        self._splits = split(train, held_out, source=self.data, share=self.eval_share)
        self._passages = tuple(_passages(rows))

    def expert(self, problem: Problem) -> "SearchExpert":
        """The expert of an episode."""
        return SearchExpert(problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a reply is well formed: one search that can be parsed, or one answer."""
        del context  # the form does not depend on it
        return is_call_or_answer(TAGGED, reply, tool=TOOL, argument="query")

    def corpus(self) -> Iterable[str]:
        """The system message, every training question, what the expert says, and the passages of the rows."""
        yield self.system
        for problem in self.problems("train"):
            yield from (problem.question, _search(problem.question), *map(_answer, problem.data["aliases"]))
        yield from self._passages


class SearchExpert:
    """Searches for the question, then answers with the alias that the result has; gives up if it has none."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._searched = problem, False

    def reply(self, context: Sequence[Message]) -> str | None:
        """The search, and then the answer."""
        if not self._searched:
            self._searched = True
            return _search(self._problem.question)
        answer = self._shown(context[-1].text)
        return None if answer is None else _answer(answer)

    def write(self, request: Request) -> str:
        """The answer, if a result that is shown has it."""
        answer = self._shown("\n".join(message.text for unit in request.units for message in unit.results))
        return "Nothing was found." if answer is None else f"The passage says: {answer}"

    def _shown(self, text: str) -> str | None:
        return next((alias for alias in self._problem.data["aliases"] if alias.lower() in text.lower()), None)


def _passages(rows: Iterable[Row]) -> Iterator[str]:
    """The first passage of each row that has some (files of NQ-open)."""
    for row in rows:
        passages = row.get("ctxs")
        first = passages[0] if isinstance(passages, list) and passages else None
        if isinstance(first, dict) and isinstance(first.get("text"), str):
            yield f"{first.get('title') or ''}\n{first['text']}".strip()


def _search(question: str) -> str:
    return f"<reasoning>I look it up.</reasoning>\n{TAGGED.call(TOOL, {'query': question})}"


def _answer(answer: str) -> str:
    return f"<reasoning>The passage says it.</reasoning>\n<answer>{answer}</answer>"


def _problems(rows: Sequence[Row], *, split: str, source: str) -> tuple[Problem, ...]:
    check_rows(rows, ["question"], source=source, texts=["question"])
    problems = []
    for number, row in enumerate(rows):
        aliases = _aliases(row)
        if not aliases:
            raise DataError(
                f"reading the dataset {source}: row {number + 1} has no answer. Wanted an 'answer' with 'value' and "
                f"'aliases' (TriviaQA), or a list of texts as 'answer' or 'answers' (NQ-open); it has: "
                f"{', '.join(map(repr, row))}"
            )
        question = str(row["question"])
        problems.append(
            Problem(id=f"{split}-{number}", question=question, answer=aliases[0], data={"aliases": aliases})
        )
    return tuple(problems)


def _aliases(row: Row) -> list[str]:
    """Every form of the answer, the main one first, each once; [] if the row follows neither schema."""
    given = row.get("answers") if row.get("answer") is None else row["answer"]
    if isinstance(given, dict):
        given = [given.get("value"), *(given.get("aliases") or ()), *(given.get("normalized_aliases") or ())]
    forms = given if isinstance(given, list) else [given]
    return list(dict.fromkeys(form.strip() for form in forms if isinstance(form, str) and form.strip()))
