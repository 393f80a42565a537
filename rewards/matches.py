"""How an answer is compared with the ground truth: one function per match, by its name in the options of rewards."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from condensegrpo.core.protocols.task import Problem
from condensegrpo.rewards.mathematics import equal
from condensegrpo.sandbox.calls import CallOutcome
from condensegrpo.sandbox.grade import grade
from condensegrpo.sandbox.sandbox import Sandbox

Match = Literal["exact", "number", "last_number", "alias", "contains", "words", "math", "tests"]

_SYMBOLS = re.compile(r"[$%]")
_MINUS = "\N{MINUS SIGN}"
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"  # a comma groups three digits
_NUMBER = re.compile(rf"[+-]?{_DIGITS}")
_SEPARATE_NUMBER = re.compile(rf"(?<![\w.])[+-]?\$?{_DIGITS}")
_DENOMINATOR = re.compile(r" ?/ ?(\d+)(?!\d|\.\d| ?/)")  # behind a number: the date 12/25/2024 has none behind 12
_TOLERANCE = 1e-6
_PLACEHOLDER = re.compile(r"\[(?:\d+ )?turns? [^\[\]]* omitted[^\[\]]*\]")  # its numbers are no answers
_IGNORED = str.maketrans("'", '"', ",./-_*^()")  # as BFCL's own checker
MAX_CODE = 100_000  # characters of an answer's code; longer code fails
_FENCED = re.compile(r"^[ \t]*```(?:python|py)?[ \t\r]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)


class Matcher:
    """Compares answers with the ground truth by one method.

    ``exact`` ignores case and repeated whitespace; ``alias`` accepts any of ``problem.data["aliases"]`` or the ground
    truth; ``contains`` asks whether the answer contains any of them, ``words`` whether as whole words, punctuation
    ignored (BFCL's check of memory questions). ``number`` compares the values of the first numbers, ``last_number``
    takes the last number of the answer. ``math`` asks whether two expressions are equal.
    ``tests`` runs the answer's code in the sandbox against ``problem.data["tests"]``.
    """

    def __init__(self, match: Match, sandbox: Sandbox | None = None) -> None:
        """Choose the method.

        Args:
            match: the name of the method.
            sandbox: in which ``tests`` runs code, opened here; other methods need none.
        """
        if match == "tests":
            if sandbox is None:
                raise ValueError("match='tests' runs code and found no sandbox: pass sandbox=Sandbox()")
            sandbox.open()
        self._match: Match = match
        self._sandbox = sandbox

    def is_right(self, answer: str, problem: Problem) -> bool:
        """Whether an answer is right; a ValueError without ground truth, since nothing is guessed from its look."""
        if self._sandbox is not None and self._match == "tests":
            return passes_tests(answer, problem, self._sandbox)
        return _RIGHT[self._match](answer, problem)

    def check_truth(self, problem: Problem) -> None:
        """Raise ValueError if the problem has no ground truth for this method."""
        if self._match == "tests":
            if not problem.data.get("tests"):
                raise ValueError(
                    f"judging problem {problem.id}: it has no tests, so no code can be called right. Use the task "
                    f"mbpp, or give its data a list 'tests'"
                )
        elif self._match in ("number", "last_number"):
            _true_number(problem)
        else:
            _truths(problem, self._match)

    def check_problem(self, problem: Problem) -> None:
        """Raise ValueError if the ground truth itself would not be right as an answer.

        Code is not run.
        """
        self.check_truth(problem)
        if self._match == "tests":
            return
        truth = _truths(problem, self._match)[0]
        if self._match == "math" and _NUMBER.fullmatch(truth):
            return  # math-verify takes milliseconds
        if not self.is_right(truth, problem):
            raise ValueError(
                f"judging problem {problem.id} by {self._match}: its ground truth {truth!r:.80} given as the answer is "
                f"not right. Correct it, or set another match"
            )


def number(text: str) -> float | None:
    """The first number of a text after ``$ %`` are removed, ``None`` if it holds none.

    A comma separates thousands or numbers. A fraction such as ``3/4`` is one number. Not read as such are mixed numbers
    (``1 1/2`` is 1), fractions in TeX, number words and percentages (``20%`` is 20).

    >>> number("$1,080"), number("\u22125"), number("x = 7 apples"), number("#### 12 #### 13"), number("seven")
    (1080.0, -5.0, 7.0, 12.0, None)
    >>> number("3,4 and 5"), number("1,080,5")
    (3.0, 1080.0)
    >>> number("72/3"), number("1 / 4"), number("1/0")
    (24.0, 0.25, None)
    """
    plain = _SYMBOLS.sub("", text).replace(_MINUS, "-")
    first = _NUMBER.search(plain)
    return None if first is None else _value(first[0], plain[first.end() :])


def last_number(text: str) -> float | None:
    """The last number of a text, read as in ``number``; ``None`` if it holds none.

    >>> last_number("48 and 24 make $1,072.50."), last_number("about 3.14"), last_number("no number")
    (1072.5, 3.14, None)
    >>> last_number("that is 72/3."), last_number("on 12/25/2024"), last_number("1.5e3 m")
    (24.0, 2024.0, 1500.0)
    """
    plain = text.replace(_MINUS, "-")
    numbers = list(_SEPARATE_NUMBER.finditer(plain))
    if not numbers:
        return None
    *before, last = numbers
    if before and _DENOMINATOR.match(plain, before[-1].end()) and not plain[: before[-1].start()].endswith("/"):
        last = before[-1]
    return _value(_SYMBOLS.sub("", last[0]), plain[last.end() :])


def _value(numerator: str, rest: str) -> float | None:
    """The value of a number, over the denominator with which the text behind it begins, if it does."""
    value, denominator = float(numerator.replace(",", "")), _DENOMINATOR.match(rest)
    if denominator is None:
        return value
    divisor = float(denominator[1])  # of any length: an int of 309 digits fits into no quotient of floats
    return value / divisor if divisor else None


_RIGHT: Mapping[Match, Callable[[str, Problem], bool]] = {
    "exact": lambda answer, problem: _fold(answer) == _fold(_truths(problem, "exact")[0]),
    "number": lambda answer, problem: _near(number(answer), _true_number(problem)),
    "last_number": lambda answer, problem: _near(last_number(answer), _true_number(problem)),
    "alias": lambda answer, problem: _fold(answer) in {_fold(truth) for truth in _truths(problem, "alias")},
    "contains": lambda answer, problem: any(_fold(truth) in _fold(answer) for truth in _truths(problem, "contains")),
    "words": lambda answer, problem: contains_answer(_truths(problem, "words"), answer),
    "math": lambda answer, problem: equal(answer, _truths(problem, "math")[0]),
}


def contains_answer(answers: Iterable[str], text: str, match: Literal["words", "substring"] = "words") -> bool:
    """Whether one of the answers is in a text, whatever its case and punctuation.

    ``words`` asks for whole words, as BFCL's own checker; ``substring`` finds 35 in 135 too. Placeholders do not count,
    and an answer of punctuation alone is in no text.
    """
    plain = _without_punctuation(_PLACEHOLDER.sub(" ", text))
    pattern = r"(?<!\w){}(?!\w)" if match == "words" else "{}"  # no \b: "$5" begins with no letter or digit
    looked_for = (_without_punctuation(answer) for answer in answers)
    return any(re.search(pattern.format(re.escape(answer)), plain) for answer in looked_for if answer.strip())


def _without_punctuation(text: str) -> str:
    return text.translate(_IGNORED).lower()


def _near(value: float | None, expected: float) -> bool:
    """Whether two numbers differ by less than a millionth, and by no more than a thousandth of the larger one."""
    if value is None or not math.isclose(value, expected, rel_tol=1e-3, abs_tol=1e-12):
        return False
    return abs(value - expected) < _TOLERANCE


def _true_number(problem: Problem) -> float:
    truth = _truths(problem, "number")[0]
    value = number(truth)
    if value is None:
        raise ValueError(f"judging problem {problem.id} by number: its ground truth {truth!r} is not a number")
    return value


def _truths(problem: Problem, match: Match) -> tuple[str, ...]:
    several = match in ("alias", "contains", "words")
    given = (problem.data.get("aliases") if several else None) or ()  # a column of the data may have a text, or null
    aliases = map(str, given if isinstance(given, list | tuple) else (given,))
    truths = tuple(filter(str.strip, (problem.answer or "", *aliases)))
    if not truths:
        raise ValueError(
            f"judging problem {problem.id}: it has no ground truth, so no answer can be called right. "
            f"Give it an answer (the task's answer column), or use a reward that needs none"
        )
    return truths


def aliases_in_lower_case(problem: Problem) -> frozenset[str]:
    """The forms of the ground truth in lower case, without white space around them."""
    return frozenset(alias.lower().strip() for alias in _truths(problem, "alias"))


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


def passes_tests(answer: str, problem: Problem, sandbox: Sandbox) -> bool:
    """Whether an answer's code passes every test of ``problem.data``: ``tests``, ``test_setup``, ``entry``.

    Values are compared, never exit codes or printed text.
    """
    code = code_of(answer)
    if len(code) > MAX_CODE:
        return False
    data = problem.data
    verdict = grade(
        sandbox, code, tuple(data["tests"]), setup=data.get("test_setup", ""), entry=tuple(data.get("entry", ()))
    )
    if CallOutcome.LOST in (verdict.judge.outcome, verdict.code.outcome):
        raise RuntimeError(f"judging problem {problem.id}: the sandbox failed: {verdict.reasons[0]}")
    return verdict.all_passed


def code_of(answer: str) -> str:
    """The code of an answer: its last fenced Python block, or the whole answer if it has none."""
    blocks = _FENCED.findall(answer)
    return str(blocks[-1]) if blocks else answer
