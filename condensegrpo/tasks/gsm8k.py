"""Grade-school arithmetic (https://arxiv.org/abs/2110.14168) with a calculator, and an expert that uses it.

A worked answer of the dataset marks its sums, and the expert calculates one of them in each turn:

    Natalia sold 48/2 = <<48/2=24>>24 clips in May.   ─▶  Natalia sold <tool>{"name": "calculator", …}</tool>
                                                          <result>24</result>
    #### 72                                           ─▶  <answer>72</answer>

It gives up a worked answer that does not end in the result of its last sum, since it goes on in words: that would show
100 and answer 328, and teach to guess.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from annotated_types import Ge

from condensegrpo.core.condenser import Request
from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem
from condensegrpo.episodes.toolformats import JSON_FORMATS, Native, Tagged
from condensegrpo.storage.rows import check_rows, read_rows
from condensegrpo.tasks.answers import AnswerStyle, QuestionTask, is_call_or_answer, split
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


@dataclass(kw_only=True, eq=False)
class Gsm8k(QuestionTask):
    """Grade-school arithmetic (GSM8K) with a calculator.

    Training questions that are in the evaluation data are left out; ``left_out`` counts them. Rows have
    ``question`` and ``answer``. The expert calls the calculator; in the format ``code`` it gives up.
    """

    data: str  # training rows, see ``rows.read_rows``; ``openai/gsm8k:main`` on a machine with a hub
    eval_data: str  # held-out rows
    tool_format: str = "tagged"  # that of ``rollout.tools.format``
    system: str | None = None  # the system message, in place of one that explains the tool; empty for none
    answer_style: AnswerStyle = "single"  # how an answer is read from a reply, see ``answers.read_answer``
    max_examples: Annotated[int, Ge(1)] | None = None  # training rows to read, from the first

    def __post_init__(self) -> None:
        self._format = JSON_FORMATS["native" if self.tool_format == "native" else "tagged"]
        if self.system is None:
            call = self._format.call(TOOL, {"expression": "48/2"})
            with_tool = (
                f"Solve the problem step by step. To calculate, write {call} and wait for the result. "
                f"End with <answer>number</answer>."
            )
            known = {"code": CODE_SYSTEM, "native": with_tool, "tagged": with_tool}
            self.system = known.get(self.tool_format, "")  # another format explains itself
        train = _problems(self.data, "train", limit=self.max_examples)
        self._splits = split(train, _problems(self.eval_data, "test"), source=self.data)

    def expert(self, problem: Problem) -> "Gsm8kExpert":
        """The expert of an episode."""
        return Gsm8kExpert(self._sums(problem), self._format, problem)

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a reply is well formed: one call of the calculator that can be parsed, or one answer."""
        del context  # the form does not depend on it
        return is_call_or_answer(self._format, reply, tool=TOOL, argument="expression")

    def corpus(self) -> Iterable[str]:
        """The system message, every training question, and what the expert and the calculator say of it."""
        yield self.system or ""
        for problem in self.problems("train"):
            yield problem.question
            for use in self._sums(problem):
                yield from (_reply(use, self._format), self._format.result("call_0", TOOL, use.result).text)
            yield _final(problem)

    def _sums(self, problem: Problem) -> tuple[_Sum, ...]:
        """The sums of a worked answer whose last result is the answer; () if there are none."""
        sums = () if self.tool_format == "code" else _sums(problem.data["worked"])
        return sums if sums and _agree(sums[-1].result, str(problem.answer)) else ()


class Gsm8kExpert:
    """Calculates the sums of a worked answer, one a turn, then answers; gives up where there are none."""

    def __init__(self, sums: Sequence[_Sum], calls_as: Native | Tagged, problem: Problem) -> None:
        self._sums, self._format, self._problem = sums, calls_as, problem
        self._done = 0

    def reply(self, context: Sequence[Message]) -> str | None:
        """The next call of the calculator, or the answer, whatever is shown."""
        if self._done == len(self._sums):
            return _final(self._problem) if self._sums else None
        self._done += 1
        return _reply(self._sums[self._done - 1], self._format)

    def write(self, request: Request) -> str:
        """The results so far."""
        return ", ".join(f"{use.expression} = {use.result}" for use in self._sums[: self._done])


def final_answer(worked: str) -> str | None:
    """The ground truth of a worked answer, bare of ``$`` and ``,``; ``None`` if it has none.

    >>> final_answer("He owes $1,080 - so:\\n#### $-1,080"), final_answer("#### 12 #### 13")
    ('-1080', '12')
    """
    _, mark, text = worked.partition(_FINAL)
    bare = re.sub(r"[$,\s]", "", text.partition(_FINAL)[0])
    return bare if mark and bare else None


def _problems(source: str, split: str, *, limit: int | None = None) -> tuple[Problem, ...]:
    rows = read_rows(source, split=split, limit=limit)
    columns = ("question", "answer")
    check_rows(rows, columns, source=source, texts=columns)
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
            thought = line[at : mark.start()].split()
            while thought and _SUM_WORD.fullmatch(thought[-1]):  # "Natalia sold 48/2 = $" is "Natalia sold"
                thought.pop()
            sums.append(_Sum(thought=" ".join(thought), expression=mark[1], result=result))
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


def _final(problem: Problem) -> str:
    return f"<answer>{problem.answer}</answer>"


def _reply(use: _Sum, calls_as: Native | Tagged) -> str:
    return f"{use.thought} {calls_as.call(TOOL, {'expression': use.expression})}".lstrip()
