"""The tool task: codes whose digits only the tool ``code_book`` knows. Needs no download.

    red gold snow                                                       the question
    ─▶  <tool> {"name": "code_book", "args": {"query": " red gold snow "}} </tool>
    <result>7</result>
    ─▶  <answer> 7 </answer>

A digit follows from nothing in the code, so that a policy without the tool is right one time in ten. Calling the tool
is not yet a habit: of the demonstrations a few call it, most guess.
"""

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Demonstration, Problem, Split, Task
from condensegrpo.episodes.toolformats import Tagged
from condensegrpo.tasks.answers import AnswerEnvironment, is_call_or_answer, pinned_messages
from condensegrpo.tasks.drawn import is_eval_content

WORDS = ("red", "blue", "green", "black", "white", "gold", "pink", "grey", "boat", "cave", "dust", "farm")
LENGTH = 3  # words of a code: 12³ codes, of which one in eight is held out
TOOL = "code_book"
SYSTEM = "<tool> or <answer>"  # it names the format, so that the schema of the tool is not added to every prompt
TAGGED = Tagged()


def code_book(query: str) -> str:
    """Looks up the digit of a code.

    Args:
        query: The words of the code, such as "red gold snow".

    Returns:
        One digit.
    """
    words = query.split()
    if not words:
        raise ValueError("found no word, wanted those of a code, such as 'red gold snow'")
    # a hash of its own: the task's split is decided by a hash of the same text, and must say nothing about the digit
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=8, person=b"code_book").digest()
    return str(int.from_bytes(digest, "big") % 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes(Task):
    """The task ``codes``, for ``rollout.tools.use=[studies/tasks/codes.py:code_book]`` in the format ``tagged``."""

    calling: Annotated[float, Ge(0), Le(1)] = 0.2  # share of the demonstrated first turns that call the tool
    reading: Annotated[float, Ge(0), Le(1)] = 0.8  # share of the demonstrated answers that are the tool's result

    def problems(self, split: Split) -> Sequence[Problem]:
        """All codes of a split, in an order that has nothing to do with their words."""
        codes = [" ".join(words) for words in itertools.product(WORDS, repeat=LENGTH)]
        random.Random("codes").shuffle(codes)
        chosen = [code for code in codes if is_eval_content(code) == (split == "eval")]
        return [Problem(id=f"{split}-{at}", question=code, answer=code_book(code)) for at, code in enumerate(chosen)]

    def environment(self, problem: Problem) -> AnswerEnvironment:
        """A fresh episode: the first reply that calls no tool ends it."""
        return AnswerEnvironment(question=problem.question, system=SYSTEM)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """First turns and answers after the tool, equally many."""
        problems, rng = self.problems("train"), random.Random(f"codes demonstrations {seed}")
        while True:
            problem = problems[rng.randrange(len(problems))]
            pinned, guess = pinned_messages(system=SYSTEM, question=problem.question), str(rng.randrange(10))
            if rng.random() < 0.5:
                reply = _call(problem.question) if rng.random() < self.calling else _answer(guess)
                yield Demonstration(context=pinned, reply=reply, problem=problem)
                continue
            result = TAGGED.result("call_0", TOOL, str(problem.answer))
            context = (*pinned, Message(role="assistant", content=_call(problem.question)), result)
            reply = _answer(str(problem.answer) if rng.random() < self.reading else guess)
            yield Demonstration(context=context, reply=reply, problem=problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a reply is one call with the code that is asked for, or one answer."""
        calls = TAGGED.parse(reply)
        question = next(message.text for message in context if message.role == "user")
        return is_call_or_answer(TAGGED, reply, tool=TOOL, argument="query") and (not calls or reply == _call(question))

    def corpus(self) -> Iterable[str]:
        """Every word of the task."""
        yield from (SYSTEM, _call(" ".join(WORDS)))
        yield from (f"{TAGGED.result('', TOOL, str(digit)).text} {_answer(str(digit))}" for digit in range(10))


def _call(code: str) -> str:
    return TAGGED.call(TOOL, {"query": f" {code} "})


def _answer(digit: str) -> str:
    return f"<answer> {digit} </answer>"
