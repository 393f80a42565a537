"""How a question is looked up and answered, shown by data that has a passage with the answer, as NQ-open files do."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols import Demonstration, Problem
from condensegrpo.storage.rows import Row
from condensegrpo.tasks.answer_environment import head
from condensegrpo.tasks.answers import read_answer
from condensegrpo.tasks.tool_text import call_text, calls_in, result_message

TOOL = "search"
SEEK, FOUND = "I look it up.", "The passage says it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A question with a passage in which its answer stands."""

    problem: Problem
    result: str  # what a search would show
    answer: str  # the alias that stands in it


def passage_of(row: Row) -> tuple[str, str] | None:
    """Title and text of the first passage of a row; None if it has none."""
    inner = row.get("ctxs")
    first = inner[0] if isinstance(inner, list) and inner else None
    text = first.get("text") if isinstance(first, dict) else None
    return (str(first.get("title") or ""), text) if isinstance(first, dict) and isinstance(text, str) else None


def lesson(problem: Problem, passage: tuple[str, str], *, characters: int) -> Lesson | None:
    """The lesson of a problem; None if no alias stands in the first so many characters of the passage."""
    title, text = passage[0], passage[1][:characters]
    answer = next((alias for alias in problem.data["aliases"] if alias.lower() in text.lower()), None)
    if answer is None:
        return None
    return Lesson(problem=problem, result=f"[1] {title}\n{text}".strip(), answer=answer)


def lessons(
    problems: Sequence[Problem], passages: Mapping[str, tuple[str, str] | None], *, characters: int
) -> list[Lesson]:
    """The lessons of the problems whose passage, by the problem's id, has an answer at its beginning."""
    candidates = ((problem, passages[problem.id]) for problem in problems)
    made = (lesson(problem, passage, characters=characters) for problem, passage in candidates if passage is not None)
    return [each for each in made if each is not None]


def demonstrations(lessons: Sequence[Lesson], *, system: str, seed: int) -> Iterator[Demonstration]:
    """One turn each of a random lesson: the search for the question's own words, or the answer after it."""
    rng = random.Random(f"search_qa demonstrations {seed}")
    while True:
        one = rng.choice(lessons)
        asked = head(system=system, question=one.problem.question)
        seeking = seek(one.problem.question)
        if rng.random() < 0.5:
            yield Demonstration(context=asked, reply=seeking)
        else:
            result = result_message("tagged", TOOL, "call_0", one.result)
            context = (*asked, Message(role="assistant", content=seeking), result)
            yield Demonstration(context=context, reply=tell(one.answer))


def seek(question: str) -> str:
    """A reply that searches."""
    return f"<reasoning>{SEEK}</reasoning>\n{call_text('tagged', TOOL, {'query': question})}"


def tell(answer: str) -> str:
    """A reply that answers."""
    return f"<reasoning>{FOUND}</reasoning>\n<answer>{answer}</answer>"


def sound(reply: str) -> bool:
    """Whether a reply is well formed: one search that can be parsed, or one answer."""
    calls = calls_in("tagged", reply)
    if not calls:
        return read_answer(reply) is not None
    if len(calls) > 1 or calls[0] is None or "<answer>" in reply:
        return False
    name, arguments = calls[0]
    return name == TOOL and set(arguments) == {"query"} and isinstance(arguments["query"], str)
