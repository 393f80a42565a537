"""``--where`` and ``--sort``: a small language over the figures of a trajectory. Parsed and checked; no ``eval``.

score == 0 and turns > 3          not correct or stop in ('format', 'aborted')          -1 < advantage < 0
"""

import ast
import operator
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean

Value = str | float | bool | None
Fields = Mapping[str, Value]
Where = Callable[[Fields], bool]
Term = Callable[[Fields], object]  # a value of Value, or a tuple of them
Comparison = Callable[[object, object], bool]

FIELDS = {  # the names in a condition, and the attributes of records.IndexedTrajectory that they stand for
    "id": "figures.id",
    "group": "figures.group_id",
    "problem": "figures.problem_id",
    "question": "question",
    "ground_truth": "ground_truth",
    "score": "figures.total",
    "correct": "figures.correct",
    "format": "figures.format_valid",
    "advantage": "advantage",
    "turns": "figures.turns",
    "context": "figures.context_tokens",
    "output": "figures.output_tokens",
    "condensations": "figures.condensations",
    "tool_errors": "figures.tool_errors",
    "truncated": "figures.truncated",
    "lost_fact": "figures.lost_fact",
    "stop": "figures.stop",
    "answer": "answer",
    "seconds": "figures.seconds",
}
LONGEST = 1000  # characters, since the parser recurses


def parse_where(text: str) -> Where:
    """The filter of a ``--where``. An unknown value (None) is neither less nor greater than any other.

    Raises:
        ConfigError: a syntax error, or an unknown field (with its nearest match). The filter itself raises it
            when it compares text with a number.
    """
    try:
        if len(text) > LONGEST:
            raise SyntaxError("it is too long")
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refusal(text, str(error.args[0]) if error.args else "it cannot be read") from error
    term = _term(tree.body, text)

    def where(fields: Fields) -> bool:
        try:
            return bool(term(fields))
        except TypeError as error:
            raise _refusal(text, f"it compares text with a number ({error})") from error

    return where


def fields_in(where: str | None, sort: str | None) -> tuple[str, ...]:
    """The fields that a condition and an order ask for.

    Raises:
        ConfigError: the condition cannot be read.
    """
    names = {(sort or "").removeprefix("-")}
    if where:
        parse_where(where)
        names |= {node.id for node in ast.walk(ast.parse(where.strip(), mode="eval")) if isinstance(node, ast.Name)}
    return tuple(name for name in FIELDS if name in names)


def sort_key(text: str) -> Callable[[Fields], tuple[bool, float, str]]:
    """The key of a ``--sort``: numbers by size, the largest first after a "-"; text by letters; unknown values last.

    Raises:
        ConfigError: there is no such field.
    """
    name, descending = text.removeprefix("-"), text.startswith("-")
    _known(name, f"--sort {text!r}")

    def key(fields: Fields) -> tuple[bool, float, str]:
        value = fields[name]
        if isinstance(value, str):
            return False, 0.0, value
        number = 0.0 if value is None else float(value)
        return value is None, -number if descending else number, ""

    return key


def _term(node: ast.expr, text: str) -> Term:
    """A syntax node as a function of the fields; nodes outside the language are refused."""
    match node:
        case ast.BoolOp(op=op, values=values):
            parts, join = [_term(value, text) for value in values], all if isinstance(op, ast.And) else any
            return lambda fields: join(part(fields) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _term(operand, text)
            return lambda fields: not inner(fields)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda _: -number
        case ast.Compare(left=left, ops=ops, comparators=rights):
            sides, comparisons = [_term(side, text) for side in (left, *rights)], [_comparison(op, text) for op in ops]
            return lambda fields: all(
                compare(*pair)
                for compare, pair in zip(comparisons, pairwise([side(fields) for side in sides]), strict=True)
            )
        case ast.Name(id=name):
            _known(name, f"--where {text!r}")
            return lambda fields: fields[name]
        case ast.Constant(value=str() | int() | float() | None as value):
            return lambda _: value
        case ast.Tuple(elts=items) | ast.List(elts=items):
            if any(isinstance(item, ast.Tuple | ast.List) for item in items):
                raise _refusal(text, "a list may not hold a list")
            terms = [_term(item, text) for item in items]
            return lambda fields: tuple(term(fields) for term in terms)
    raise _refusal(text, f"{ast.unparse(node)!r} is not part of this language")


def _comparison(op: ast.cmpop, text: str) -> Comparison:
    if type(op) not in COMPARISONS:
        raise _refusal(text, "it can compare with == != < <= > >= in and not in")
    return COMPARISONS[type(op)]


def _ordered(compare: Callable[[Any, Any], bool]) -> Comparison:
    """The comparison, False for unknown values."""
    return lambda left, right: left is not None and right is not None and compare(left, right)


def _contained(left: object, right: object) -> bool:
    if isinstance(right, str):
        return isinstance(left, str) and left in right
    if isinstance(right, tuple):
        return left in right
    if right is None:
        return False
    raise TypeError(f"'in' wants a list or text, found {right!r}")


COMPARISONS: Mapping[type[ast.cmpop], Comparison] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: _contained,
    ast.NotIn: lambda left, right: not _contained(left, right),
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
}


def _known(name: str, option: str) -> None:
    if name not in FIELDS:
        hint = did_you_mean(name, FIELDS).strip() or f"Fields: {', '.join(FIELDS)}."
        raise ConfigError(f"reading {option}: unknown field {name!r}. {hint}")


def _refusal(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f'reading --where {text[:80]!r}: {reason}. Compare fields with values, such as "score == 0 and turns > 3"; '
        f"fields: {', '.join(FIELDS)}."
    )
