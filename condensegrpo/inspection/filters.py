"""``--where`` and ``--sort``: a small language over the figures of a trajectory, a part of Python's expressions.

score == 0 and turns > 3          not correct or stop in ('format', 'aborted')          -1 < advantage < 0
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping

from condensegrpo.core.errors import ConfigError
from condensegrpo.core.threads import parsed_expression
from condensegrpo.core.wording import did_you_mean

Value = str | float | bool | None
Fields = Mapping[str, Value]
Where = Callable[[Fields], bool]

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
LANGUAGE = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.Not, ast.USub, ast.Name, ast.Load, ast.Compare),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
)
ALIASES = {"ctx": "context", "valid_format": "format"}  # as lists and the training table abbreviate them


def parse_where(text: str, known: Collection[str] = tuple(FIELDS)) -> Where:
    """The filter of a ``--where``. An unknown value (None) is neither less nor greater than any other.

    Args:
        text: the condition.
        known: the fields that there are: ``FIELDS``, and the parts of the reward.
    """
    try:
        tree = parsed_expression(text.strip())
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and not all(isinstance(op, LANGUAGE) for op in node.ops):
                raise _refusal(text, "it can compare with == != < <= > >= in and not in")
            if not _in_language(node):
                raise _refusal(text, f"{ast.unparse(node)!r} is not part of this language")
        names = [*_names(tree)]
        for node in names:
            node.id = _field(node.id, known)
            _check(node.id, f"--where {text!r}", known)
        condition = compile(ast.fix_missing_locations(_Unknowns().visit(tree)), "--where", "eval")
    except (RecursionError, MemoryError) as error:
        raise _refusal(text, "it is nested too deeply") from error
    except (SyntaxError, ValueError) as error:
        raise _refusal(text, str(error.args[0])) from error

    def where(fields: Fields) -> bool:
        values = {node.id: UNKNOWN if (value := fields.get(node.id)) is None else value for node in names}
        values[UNKNOWN_NAME] = UNKNOWN
        try:
            return bool(eval(condition, {"__builtins__": {}}, values))  # nothing but ``LANGUAGE``
        except TypeError as error:
            raise _refusal(text, f"it compares text with a number, or looks for one in the other ({error})") from error

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


def _in_language(node: ast.AST) -> bool:
    """Whether a condition may have a syntax node: comparisons of fields and values, joined by and, or, not."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return isinstance(operand, ast.Constant) and isinstance(operand.value, int | float)
        case ast.UnaryOp(op=sign):
            return isinstance(sign, ast.Not)
        case ast.Constant(value=value):
            return isinstance(value, str | int | float | None)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return not any(isinstance(item, ast.Tuple | ast.List) for item in items)
    return isinstance(node, LANGUAGE)


class _Unknowns(ast.NodeTransformer):
    """Puts the unknown value in the place of None."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Name(UNKNOWN_NAME, ast.Load()) if node.value is None else node


class _Unknown(str):
    """An unknown value: equal to itself alone, in no text, and neither less nor greater than any value."""

    def __eq__(self, other: object) -> bool:
        return other is self

    def __ne__(self, other: object) -> bool:
        return other is not self

    def __lt__(self, other: object) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    __hash__ = str.__hash__

    def __bool__(self) -> bool:
        return False


UNKNOWN = _Unknown("\0")
UNKNOWN_NAME = "unknown value"  # the name of no field


def _check(name: str, option: str, known: Collection[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known).strip() or f"Fields: {', '.join(known)}."
        raise ConfigError(f"reading {option}: unknown field {name!r}. {hint}")


def _refusal(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f'reading --where {text[:80]!r}: {reason}. Compare fields with values, such as "score == 0 and turns > 3"; '
        f"fields: {', '.join(FIELDS)}."
    )
