"""Grade-school arithmetic (https://arxiv.org/abs/2110.14168) with a calculator, and demonstrations of its use.

A worked answer of the dataset marks its sums, and each mark becomes one turn of a demonstration:

    Natalia sold 48/2 = <<48/2=24>>24 clips in May.   ─▶  Natalia sold <tool>{"name": "calculator", …}</tool>
                                                          <result>24</result>
    #### 72                                           ─▶  <answer>72</answer>

A worked answer that does not end in the result of its last sum, since it goes on in words, is no demonstration: it
would show 100 and answer 328, and teach to guess.
"""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from annotated_types import Ge

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols import Demonstration, Problem
from condensegrpo.episodes.toolformats import JSON_FORMATS, Native, Tagged
from condensegrpo.storage.rows import read_rows, require_columns, require_texts
from condensegrpo.tasks.answer_environment import QuestionTask, pinned_messages
from condensegrpo.tasks.answers import AnswerStyle, is_call_or_answer
from condensegrpo.tasks.splits import split
from condensegrpo.tools.calculator import calculator

TOOL = "calculator"
CODE_SYSTEM = (
    "Solve the problem step by step. You may write Python in <code>...</code>; what it prints comes back in "
    "<output>...</output>. Nothing is kept between two pieces of code, each may run for 10 seconds, so print what you "
    "need. End with <answer>number</answer>."
)

_MARK = re.compile(r"<<([^<>=]+)=([^<>=]*)>>")
_SUM_WORD = re.compile(r"[$\d.,+\-*/×÷()%=−–]+|x")  # of a written-out sum: 48/2, =, $
_BARE = re.compile(r"[\d.]+")  # <<36=36>> calculates nothing
_FINAL = "####"
_NUMERAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_TINY = Decimal("1e-6")  # a mark may have more decimals than the calculator writes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """One use of the calculator."""

    thought: str  # what the worked answer says before the sum; may be empty
    expression: str
    result: str  # as the tool writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solution:
    """One problem solved with the calculator."""

    problem: Problem
    sums: tuple[_Sum, ...]


@dataclass(kw_only=True, eq=False)
class Gsm8k(QuestionTask):
    """The task ``gsm8k``. Training questions that are in the evaluation data are left out; ``dropped`` counts them.

    Rows have ``question`` and ``answer``. The demonstrations call the calculator; the format ``code`` has none.

    Raises:
        DataError: what ``rows.read_rows`` raises, a missing column, an answer without ``####``, or no problem left.
    """

    data: str  # training rows, see ``rows.read_rows``; ``openai/gsm8k:main`` on a machine with a hub
    eval_data: str  # held-out rows
    tool_format: str = "tagged"  # that of ``rollout.tools.format``
    system: str | None = None  # the system message, in place of one that explains the tool; empty for none
    answer_style: AnswerStyle = "single"  # how an answer is read from a reply, see ``answers.read_answer``
    keep_last: Annotated[int, Ge(0)] = 3  # turns that a demonstration shows, as the condenser ``last_k`` would
    max_examples: Annotated[int, Ge(1)] | None = None  # training rows to read, from the first

    def __post_init__(self) -> None:
        self._format = JSON_FORMATS["native" if self.tool_format == "native" else "tagged"]
        if self.system is None:
            known = {"code": CODE_SYSTEM, "native": _system(self._format), "tagged": _system(self._format)}
            self.system = known.get(self.tool_format, "")  # another format explains itself
        train = _problems(self.data, "train", limit=self.max_examples)
        self._splits = split(train, _problems(self.eval_data, "test"), source=self.data)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """One turn each of a random training problem that the calculator solves.

        Raises:
            DataError: no worked answer marks sums that the calculator agrees with and that end in its answer.
        """
        solutions = list(self._solutions())
        if not solutions:
            raise DataError(
                "making demonstrations: no training answer holds marks like <<48/2=24>> that are right and the last of "
                "which gives the answer, or tool_format is code. Use the original GSM8K, or set warm_start.steps=0"
            )
        rng = random.Random(f"gsm8k demonstrations {seed}")
        while True:
            solution = rng.choice(solutions)
            yield self._turn(solution, rng.randrange(len(solution.sums) + 1))

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a reply is well formed: one call of the calculator that can be parsed, or one answer."""
        del context  # the form does not depend on it
        return is_call_or_answer(self._format, reply, tool=TOOL, argument="expression")

    def corpus(self) -> Iterable[str]:
        """The system message, every training question, and every turn of every demonstration."""
        yield self.system or ""
        yield from (problem.question for problem in self.problems("train"))
        for solution in self._solutions():
            turns = [self._unit(at, each) for at, each in enumerate(solution.sums)]
            yield from (message.text for unit in turns for message in unit.messages)
            yield _final(solution.problem)

    def _solutions(self) -> Iterator[_Solution]:
        """The training problems whose answer is the result of the last sum of their worked answer."""
        for problem in self.problems("train") if self.tool_format != "code" else ():
            sums = _sums(problem.data["worked"])
            if sums and _agree(sums[-1].result, str(problem.answer)):
                yield _Solution(problem=problem, sums=sums)

    def _turn(self, solution: _Solution, turn: int) -> Demonstration:
        units = tuple(self._unit(at, each) for at, each in enumerate(solution.sums[:turn]))
        shown = units[max(0, turn - self.keep_last) :]
        context = History(
            pinned=pinned_messages(system=self.system or "", question=solution.problem.question), units=shown
        ).messages
        reply = _final(solution.problem) if turn == len(solution.sums) else self._reply(solution.sums[turn])
        return Demonstration(context=context, reply=reply, problem=solution.problem)

    def _unit(self, turn: int, use: _Sum) -> Unit:
        result = self._format.result("call_0", TOOL, use.result)
        return Unit(turn=turn, reply=Message(role="assistant", content=self._reply(use)), results=(result,))

    def _reply(self, use: _Sum) -> str:
        return f"{use.thought} {self._format.call(TOOL, {'expression': use.expression})}".lstrip()


def final_answer(worked: str) -> str | None:
    """The ground truth of a worked answer, bare of ``$`` and ``,``; ``None`` if it has none.

    >>> final_answer("He owes $1,080 - so:\\n#### $-1,080"), final_answer("#### 12 #### 13")
    ('-1080', '12')
    """
    _, mark, text = worked.partition(_FINAL)
    bare = re.sub(r"[$,\s]", "", text.partition(_FINAL)[0])
    return bare if mark and bare else None


def _system(calls_as: Native | Tagged) -> str:
    call = calls_as.call(TOOL, {"expression": "48/2"})
    return (
        f"Solve the problem step by step. To calculate, write {call} and wait for the result. "
        f"End with <answer>number</answer>."
    )


def _problems(source: str, split: str, *, limit: int | None = None) -> tuple[Problem, ...]:
    rows = read_rows(source, split=split, limit=limit)
    require_columns(rows, ("question", "answer"), source=source)
    require_texts(rows, "question", source=source)
    require_texts(rows, "answer", source=source)
    problems = []
    for number, row in enumerate(rows):
        worked = str(row["answer"])
        answer = final_answer(worked)
        if answer is None:
            raise DataError(
                f"reading {source}: the answer of row {number + 1} has no final line like '#### 72' (it ends in "
                f"{worked[-40:]!r}). For answers of another form use the task jsonl"
            )
        problems.append(
            Problem(
                id=f"{split}-{number}", question=str(row["question"]), answer=answer, data={**row, "worked": worked}
            )
        )
    return tuple(problems)


def _sums(worked: str) -> tuple[_Sum, ...]:
    """The marked sums of a worked answer; none at all if the calculator contradicts one of them."""
    sums = []
    for line in worked.partition(_FINAL)[0].splitlines():
        at = 0
        for mark in _MARK.finditer(line):
            if _BARE.fullmatch(mark[1]):
                continue
            try:
                result = calculator(mark[1])
            except ValueError:
                return ()  # not every mark is arithmetic: <<2x=8>>
            if not _agree(result, mark[2].strip()):
                return ()
            sums.append(_Sum(thought=_thought(line[at : mark.start()]), expression=mark[1], result=result))
            at = mark.end()
    return tuple(sums)


def _agree(result: str, stated: str) -> bool:
    """Whether a stated number is the calculator's result, rounded at most to the decimals that it has.

    24 and 24. are 24 and nothing else; .33 is 0.3333333333, being within half a unit of its last decimal.
    """
    if not _NUMERAL.fullmatch(stated):
        return False
    decimals = len(stated.partition(".")[2])
    allowed = max(Decimal(5).scaleb(-decimals - 1), _TINY) if decimals else Decimal(0)
    return abs(Decimal(result) - Decimal(stated)) <= allowed


def _thought(text: str) -> str:
    """A text without the written-out sum at its end: ``Natalia sold 48/2 = $`` is ``Natalia sold``."""
    words = text.split()
    while words and _SUM_WORD.fullmatch(words[-1]):
        words.pop()
    return " ".join(words)


def _final(problem: Problem) -> str:
    return f"<answer>{problem.answer}</answer>"
