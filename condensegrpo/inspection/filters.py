"""``--where`` and ``--sort``: a small language over the figures of a trajectory. Parsed and checked; no ``eval``.

score == 0 and turns > 3          not correct or stop in ('format', 'aborted')          -1 < advantage < 0
"""

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

from condensegrpo.core.errors import ConfigError
from condensegrpo.core.threads import parsed_expression
from condensegrpo.core.wording import did_you_mean

Value = str | float | bool | None
Fields = Mapping[str, Value]
Where = Callable[[Fields], bool]
Term = Callable[[Fields], object]  # a value of Value, or a tuple of them
Comparison = Callable[[object, object], bool]

FIELDS = {  # the names in a condition, and the attributes of records.IndexedTrajectory that they stand for
    "step": "step",
    "evaluation": "evaluation",
    "id": "figures.id",
    "group": "figures.group_id",
    "sample": "figures.sample",
    "problem": "figures.problem_id",
    "question": "question",
    "ground_truth": "ground_truth",
    "score": "figures.total",
    "correct": "figures.correct",
    "format": "figures.format_valid",
    "advantage": "advantage",
    "turns": "figures.turns",
    "context": "figures.context_tokens",
    "pictures": "figures.picture_tokens",
    "read": "figures.prompt_tokens",
    "uncached": "figures.prompt_tokens_uncached",
    "output": "figures.output_tokens",
    "price": "figures.price",
    "condensations": "figures.condensations",
    "tool_errors": "figures.tool_errors",
    "truncated": "figures.truncated",
    "lost_fact": "figures.lost_fact",
    "stop": "figures.stop",
    "answer": "answer",
    "seconds": "figures.seconds",
}
ALIASES = {"ctx": "context", "valid_format": "format"}  # as lists and the training table abbreviate them


def parse_where(text: str, known: Collection[str] = tuple(FIELDS)) -> Where:
    """The filter of a ``--where``. An unknown value (None) is neither less nor greater than any other.

    Args:
        text: the condition.
        known: the fields that there are: ``FIELDS``, and the parts of the reward.
    """
    try:
        tree = parsed_expression(text.strip())
    except (SyntaxError, ValueError, MemoryError) as error:  # the last one for very many parentheses
        raise _refusal(text, str(error.args[0]) if error.args else "it cannot be read") from error
    for node in _names(tree):
        node.id = _field(node.id, known)
    term = _term(tree.body, text)
    for node in _names(tree):
        _check(node.id, f"--where {text!r}", known)

    def where(fields: Fields) -> bool:
        try:
            return bool(term(fields))
        except TypeError as error:
            raise _refusal(text, f"it compares text with a number ({error})") from error

    return where


def fields_in(where: str | None, sort: str | None, known: Collection[str]) -> tuple[str, ...]:
    """The known fields that a condition and an order ask for."""
    names = set()
    if sort:
        sort_key(sort, known)
        names.add(_field(sort.removeprefix("-"), known))
    if where:
        parse_where(where, known)
        names |= {_field(node.id, known) for node in _names(parsed_expression(where.strip()))}
    return tuple(name for name in known if name in names)


def _names(tree: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name))


def _field(name: str, known: Collection[str]) -> str:
    """The field of a name; a part of the reward may have the name of an alias."""
    return name if name in known else ALIASES.get(name, name)


def sort_key(text: str, known: Collection[str] = tuple(FIELDS)) -> Callable[[Fields], tuple[bool, float, str]]:
    """The key of a ``--sort``: numbers by size, the largest first after a "-"; text by letters; unknown values last."""
    name, descending = _field(text.removeprefix("-"), known), text.startswith("-")
    _check(name, f"--sort {text!r}", known)

    def key(fields: Fields) -> tuple[bool, float, str]:
        value = fields.get(name)
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
            if any(type(op) not in COMPARISONS for op in ops):
                raise _refusal(text, "it can compare with == != < <= > >= in and not in")
            sides, comparisons = [_term(side, text) for side in (left, *rights)], [COMPARISONS[type(op)] for op in ops]
            return lambda fields: all(
                compare(*pair)
                for compare, pair in zip(comparisons, pairwise([side(fields) for side in sides]), strict=True)
            )
        case ast.Name(id=name):
            return lambda fields: fields.get(name)
        case ast.Constant(value=str() | int() | float() | None as value):
            return lambda _: value
        case ast.Tuple(elts=items) | ast.List(elts=items):
            if any(isinstance(item, ast.Tuple | ast.List) for item in items):
                raise _refusal(text, "a list may not hold a list")
            terms = [_term(item, text) for item in items]
            return lambda fields: tuple(term(fields) for term in terms)
    raise _refusal(text, f"{ast.unparse(node)!r} is not part of this language")


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


def _check(name: str, option: str, known: Collection[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known).strip() or f"Fields: {', '.join(known)}."
        raise ConfigError(f"reading {option}: unknown field {name!r}. {hint}")


def _refusal(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f'reading --where {text[:80]!r}: {reason}. Compare fields with values, such as "score == 0 and turns > 3"; '
        f"fields: {', '.join(FIELDS)}."
    )
