"""Open questions with aliases of their answers, to be looked up: the schemas of TriviaQA and NQ-open.

TriviaQA   {"question": …, "question_id": …, "answer": {"value": "Paris", "aliases": ["Paris", "City of Light"]}}
NQ-open    {"question": …, "answer" or "answers": ["Paris", "City of Light"]}
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols import Demonstration, Problem
from condensegrpo.storage.rows import Row, read_rows, require_columns
from condensegrpo.tasks import search_lessons
from condensegrpo.tasks.answers import AnswerStyle
from condensegrpo.tasks.question_task import QuestionTask
from condensegrpo.tasks.splits import SHARE, split

SYSTEM = (
    "Answer the question. In every turn think in <reasoning>...</reasoning> first. Then either search with "
    '<tool>{"name": "search", "args": {"query": "..."}}</tool>, whose result comes back in <result>...</result>, or '
    "give the answer, a name or a few words, in <answer>...</answer>."
)
REMINDER = "Write <reasoning>...</reasoning> and then one <tool>...</tool> or <answer>...</answer>."


class SearchQa(QuestionTask):
    """The task ``search_qa``. Rows with a passage in ``ctxs`` (NQ-open files) demonstrate too, in the tagged format.

    A reply without a call and without an answer gets a reminder and counts as a turn. Without ``eval_data`` a share of
    the questions is held out by their hash. Training questions that are in the evaluation data too are left out;
    ``dropped`` counts them.
    """

    def __init__(
        self,
        *,
        data: str,
        eval_data: str | None = None,
        eval_split: str = "validation",
        system: str = SYSTEM,
        reminder: str = REMINDER,
        answer_style: AnswerStyle = "last",
        eval_share: Annotated[float, Gt(0), Lt(1)] = SHARE,
        max_examples: Annotated[int, Ge(1)] | None = None,
        passage_chars: Annotated[int, Ge(1)] = 600,
    ) -> None:
        """Read the data.

        Args:
            data: training rows, see ``rows.read_rows``; ``mandarjoshi/trivia_qa:rc.wikipedia`` on a machine with a hub.
            eval_data: held-out rows.
            eval_split: of a Hub dataset or a folder, the split that ``eval_data`` reads.
            system: the system message; empty for none.
            reminder: what the user says to a reply without call and answer; empty: the episode is over.
            answer_style: how an answer is read from a reply, see ``answers.read_answer``.
            eval_share: of the questions, held out if there is no ``eval_data``.
            max_examples: training rows to read, from the first.
            passage_chars: of a passage that demonstrations show; as the tool's option of that name.

        Raises:
            DataError: what ``rows.read_rows`` raises, a row of another schema, or no problem left.
        """
        rows = read_rows(data, split="train", limit=max_examples)
        train = _problems(rows, split="train", source=data)
        held_out = None
        if eval_data is not None:
            held_out = _problems(read_rows(eval_data, split=eval_split), split="eval", source=eval_data)
        splits = split(train, held_out, source=data, share=eval_share)
        super().__init__(splits, system=system, answer_style=answer_style, reminder=reminder)
        passages = {problem.id: search_lessons.passage_of(row) for problem, row in zip(train, rows, strict=True)}
        self._lessons = search_lessons.lessons(splits.train, passages, characters=passage_chars)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """One turn each of a random training question: the search, or the answer after it.

        Raises:
            DataError: no training row has a passage that its answer stands in.
        """
        if not self._lessons:
            raise DataError(
                "making demonstrations: no training row has a passage in 'ctxs' whose beginning holds an answer. Use "
                "a file of NQ-open with passages, raise task.options.passage_chars, or set warm_start.steps=0"
            )
        return search_lessons.demonstrations(self._lessons, system=self._system, seed=seed)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a reply is well formed: one search that can be parsed, or one answer."""
        del context  # the form does not depend on it
        return search_lessons.sound(reply)

    def corpus(self) -> Iterable[str]:
        """The system message, every training question, and every turn of every demonstration."""
        yield self._system
        yield from (problem.question for problem in self.problems("train"))
        for one in self._lessons:
            yield from (search_lessons.seek(one.problem.question), one.result, search_lessons.tell(one.answer))


def _problems(rows: Sequence[Row], *, split: str, source: str) -> tuple[Problem, ...]:
    require_columns(rows, ("question",), source=source)
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
