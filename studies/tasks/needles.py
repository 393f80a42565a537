"""The task of needles: places have codes, each in a sentence amid real text, and the question asks for two of them.

One episode with 3 texts under ``summary`` with ``always`` and the template ``codes`` (user left, replies right):

    You will get texts, … the chapel and the mill?           ─▶  OK
    Alaska is the … The code of the mill is 40218. … in 1959 ─▶  OK
    … The code of the harbour is 77301. …
      Write your notes now …                                 ─▶  mill 40218         stands for the first text
    … The code of the harbour is 77301. …                    ─▶  OK
    … The code of the chapel is 90125. …
      Write your notes now …                                 ─▶  chapel 90125; mill 40218
    … The code of the chapel is 90125. …                     ─▶  OK
    What are the codes of the chapel and the mill?
      Write your notes now …                                 ─▶  chapel 90125; mill 40218
    What are the codes of the chapel and the mill?           ─▶  90125 40218

The question stands before all texts, so that a note can be short. It is for a pretrained model. The expert notes every
code that is asked for and in view, and forgets none: a start that was shown few turns is careless, not taught to be.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from condensegrpo.core.condenser import Request
from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.storage.rows import Row, read_rows
from condensegrpo.studies.tasks.notes import NotesEnvironment
from condensegrpo.tasks.answers import is_held_out
from condensegrpo.tasks.drawn import DrawnProblems

INSTRUCTION = (
    "You will get texts, one at a time, and then this question: {question} You see only the newest text and your "
    "notes. Reply to a text with OK. When you are asked for notes, write the two places with their codes. Answer the "
    "question with the two codes alone."
)
QUESTION = "What are the codes of the {} and the {}?"
SENTENCE = "The code of the {} is {}."
OK, NONE, UNKNOWN = "OK", "none", "unknown"
_NAMES = """
abbey airport archive arena attic bakery bank barn bridge cabin canal castle cave cellar chapel church clinic court
dam depot dock factory farm ferry forge fort fountain gallery garage garden gate gym hangar harbour hospital hotel
kitchen library lighthouse lock manor market mill mine monastery museum office palace park pharmacy pier pool prison
quarry school shed stable stadium station studio tavern temple theatre tower vault villa warehouse well windmill zoo
"""
PLACES = tuple(_NAMES.split())


@dataclass(kw_only=True, eq=False)
class Needles(Task):
    """The task ``needles``. No passage of a training problem is in one for evaluation, whatever the options."""

    data: str  # rows with question, answers and ctxs, such as NQ-open with its passages
    texts: Annotated[int, Ge(2), Le(len(PLACES))] = 4  # of an episode, each with the code of another place
    words: Annotated[int, Ge(8)] = 45  # of a passage that are shown
    eval_share: Annotated[float, Gt(0), Lt(1)] = 0.4  # of the passages, by their hash
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256

    def problems(self, split: Split) -> Sequence[Problem]:
        """Each is made from the random numbers of its split and index."""
        passages = _passages(self.data, self.words, self.eval_share)[split]
        size = self.train_problems if split == "train" else self.eval_problems
        return DrawnProblems(size=size, draw=lambda index: self._problem(f"{split}-{index}", passages))

    def environment(self, problem: Problem) -> NotesEnvironment:
        """A fresh episode; a reply to a text that is not OK ends it, or it could be a second note."""
        return NotesEnvironment(
            pinned=(Message(role="user", content=INSTRUCTION.format(question=problem.question)),),
            messages=(*problem.data["texts"], problem.question),
            answer=lambda reply: " ".join(re.findall(r"\d+", reply)),
            is_note=lambda reply: reply.strip() == OK,
        )

    def expert(self, problem: Problem) -> "NeedlesExpert":
        """The expert of an episode."""
        return NeedlesExpert(problem)

    def _problem(self, label: str, passages: Sequence[str]) -> Problem:
        rng = random.Random(f"needles {label}")
        places = rng.sample(PLACES, self.texts)
        codes = [str(code) for code in rng.sample(range(10_000, 100_000), self.texts)]
        texts = [
            _amid(passage.split(), SENTENCE.format(place, code), rng)
            for passage, place, code in zip(rng.sample(passages, self.texts), places, codes, strict=True)
        ]
        asked = rng.sample(range(self.texts), 2)
        return Problem(
            id=label,
            question=QUESTION.format(*(places[at] for at in asked)),
            answer=" ".join(codes[at] for at in asked),
            data={"texts": texts, "asked": [places[at] for at in asked]},
        )


class NeedlesExpert:
    """Notes the codes that are asked for, and answers from what is in view."""

    def __init__(self, problem: Problem) -> None:
        self._asked, self._question = problem.data["asked"], problem.question

    def reply(self, context: Sequence[Message]) -> str:
        """OK, or the two codes; ``UNKNOWN`` in place of one that is not in view."""
        if len(context) == 1 or context[-1].text != self._question:
            return OK
        codes = codes_in(context)
        return " ".join(codes.get(place, UNKNOWN) for place in self._asked)

    def write(self, request: Request) -> str:
        """The places that are asked for, with their codes as far as they are in view."""
        codes = codes_in(message for unit in request.units for message in unit.messages)
        return "; ".join(f"{place} {codes[place]}" for place in self._asked if place in codes) or NONE


def codes_in(context: Iterable[Message]) -> dict[str, str]:
    """The codes that texts and notes say, by their places."""
    said = re.compile(rf"\b({'|'.join(PLACES)})(?: is)? (\d{{5}})\b")
    return {found[1]: found[2] for message in context for found in said.finditer(message.text)}


def passage_of(row: Row, number: int, source: str) -> str:
    """The passage of a row that has an answer."""
    match row:
        case {"question": str(), "answers": [str(), *_], "ctxs": [{"text": str(text)}, *_]}:
            return text
    found = ", ".join(f"{column}: {row.get(column)!r:.60}" for column in ("question", "answers", "ctxs"))
    raise DataError(
        f"reading the dataset {source}: row {number} has {found}. Wanted a text as question, a list of texts as "
        f"answers and a list of passages with a text as ctxs; correct the row or remove it"
    )


@lru_cache(maxsize=8)  # a sweep builds the same tasks for each of its runs
def _passages(data: str, words: int, share: float) -> dict[Split, list[str]]:
    """The passages of each split, each once, cut to so many words."""
    rows = enumerate(read_rows(data, split="train"), start=1)
    texts = dict.fromkeys(" ".join(passage_of(row, number, data).split()[:words]) for number, row in rows)
    held_out = {text: is_held_out(text, share=share) for text in texts}
    return {"train": [text for text in texts if not held_out[text]], "eval": [text for text in texts if held_out[text]]}


def _amid(words: Sequence[str], sentence: str, rng: random.Random) -> str:
    at = rng.randint(0, len(words))
    return " ".join((*words[:at], sentence, *words[at:]))
