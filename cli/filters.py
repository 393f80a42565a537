"""``--where`` and ``--sort``: a tiny language over the figures of a trajectory. Parsed and checked, never evaluated.

score == 0 and turns > 3          not correct or stop in ('format', 'aborted')          -1 < advantage < 0
"""

import ast
import difflib
import operator
from collections.abc import Callable, Mapping
from typing import Any

from condensegrpo.core.errors import ConfigError

Value = str | float | bool | None
Fields = Mapping[str, Value]
Where = Callable[[Fields], bool]
Term = Callable[[Fields], Value | tuple[Value, ...]]

# what can be asked for; inspection.Sibling.fields gives a value to each
FIELDS = (
    "id",
    "group",
    "problem",
    "score",
    "correct",
    "format",
    "advantage",
    "turns",
    "context",
    "output",
    "stop",
    "answer",
    "seconds",
)
LONGEST = 1000  # characters, since the parser recurses


def parse_where(text: str) -> Where:
    """The filter that a ``--where`` means. What is not known (None) is neither less nor greater than anything.

    Raises:
        ConfigError: not of this language, or an unknown field (with its nearest match). The filter itself raises it
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


def parse_sort(text: str) -> tuple[str, bool]:
    """The field of a ``--sort`` and whether the largest comes first: ``-context`` is ("context", True)."""
    name = text.removeprefix("-")
    _known(name, f"--sort {text!r}")
    return name, text.startswith("-")


def sort_key(name: str, descending: bool) -> Callable[[Fields], tuple[bool, float, str]]:
    """A key that orders by a field: numbers by size, text by letters (always ascending), what is not known last."""

    def key(fields: Fields) -> tuple[bool, float, str]:
        value = fields[name]
        if isinstance(value, str):
            return False, 0.0, value
        number = 0.0 if value is None else float(value)
        return value is None, -number if descending else number, ""

    return key


def _term(node: ast.expr, text: str) -> Term:
    """One node as a function of the fields; the only nodes there are."""
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return _all([_term(value, text) for value in values])
        case ast.BoolOp(op=ast.Or(), values=values):
            return _any([_term(value, text) for value in values])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _term(operand, text)
            return lambda fields: not inner(fields)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda _: -number
        case ast.Compare(left=left, ops=ops, comparators=rights):
            return _chain([_term(side, text) for side in (left, *rights)], [_comparison(op, text) for op in ops])
        case ast.Name(id=name):
            _known(name, f"--where {text!r}")
            return lambda fields: fields[name]
        case ast.Constant(value=str() | int() | float() | None as value):
            return lambda _: value
        case ast.Tuple(elts=items) | ast.List(elts=items):
            terms = [_term(item, text) for item in items]
            return lambda fields: tuple(_single(term(fields), text) for term in terms)
    raise _refusal(text, f"{ast.unparse(node)!r} is more than it can say")


def _all(terms: list[Term]) -> Term:
    return lambda fields: all(term(fields) for term in terms)


def _any(terms: list[Term]) -> Term:
    return lambda fields: any(term(fields) for term in terms)


def _chain(sides: list[Term], comparisons: list[Callable[[Any, Any], bool]]) -> Term:
    """``a < b < c``, with every side worked out once."""

    def holds(fields: Fields) -> bool:
        values = [side(fields) for side in sides]
        return all(compare(left, right) for compare, left, right in zip(comparisons, values, values[1:], strict=False))

    return holds


def _comparison(op: ast.cmpop, text: str) -> Callable[[Any, Any], bool]:
    match op:
        case ast.Eq():
            return lambda left, right: bool(left == right)
        case ast.NotEq():
            return lambda left, right: bool(left != right)
        case ast.In():
            return _contained
        case ast.NotIn():
            return lambda left, right: not _contained(left, right)
        case ast.Lt():
            return _ordered(operator.lt)
        case ast.LtE():
            return _ordered(operator.le)
        case ast.Gt():
            return _ordered(operator.gt)
        case ast.GtE():
            return _ordered(operator.ge)
    raise _refusal(text, "it can compare with == != < <= > >= in and not in")


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """What is not known is neither less nor greater."""
    return lambda left, right: left is not None and right is not None and compare(left, right)


def _contained(left: object, right: object) -> bool:
    if isinstance(right, str):
        return isinstance(left, str) and left in right
    if isinstance(right, tuple):
        return left in right
    if right is None:
        return False
    raise TypeError(f"'in' wants a list or text, found {right!r}")


def _single(value: object, text: str) -> Value:
    if isinstance(value, str | int | float) or value is None:
        return value
    raise _refusal(text, "a list may not hold a list")


def _known(name: str, asked: str) -> None:
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FIELDS)}."
        raise ConfigError(f"reading {asked}: unknown field {name!r}; {hint}")


def _refusal(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f'reading --where {text[:80]!r}: {reason}. Compare fields with values, such as "score == 0 and turns > 3"; '
        f"fields: {', '.join(FIELDS)}."
    )
