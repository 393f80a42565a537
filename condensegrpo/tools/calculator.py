"""The calculator tool: one line of arithmetic, computed exactly and never run as Python. Standard library only."""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

MAX_CHARS = 200  # with no power operator, this bounds every result to about 200 digits
DECIMALS = 10  # significant digits kept after the integer part of a result that has no short decimal form

_ALLOWED = re.compile(r"[0-9+\-*/.()%, ]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # 1,234 but not (1, 2)
_PERCENT = re.compile(r"(\d+\.?\d*|\.\d+) *%(?! *[\d.(])")  # 20% of something; 7 % 3 stays a remainder
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly and gives the result as a plain decimal number.

    Args:
        expression: Numbers with + - * / % and parentheses, such as "(48 / 2 + 1) * 3".

    Returns:
        The result, such as "75".
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed")
    if not _ALLOWED.fullmatch(expression):
        refused = ", ".join(map(repr, sorted(set(_ALLOWED.sub("", expression)))))
        raise ValueError(f"an expression holds digits and + - * / % . ( ) only, found {refused or 'nothing'}")
    source = _PERCENT.sub(r"(\1/100)", _THOUSANDS.sub("", expression)).strip()
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    return _plain(_value(tree.body, source))


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant():
            # the digits as written: a float constant would have lost some
            return Fraction(ast.get_source_segment(source, node) or "")
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, source)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, source)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            try:
                return _OPERATORS[type(op)](_value(left, source), _value(right, source))
            except ZeroDivisionError:
                raise ValueError(f"division by zero: {ast.get_source_segment(source, right)} is 0") from None
    raise ValueError(
        f"{ast.get_source_segment(source, node)!r} is not arithmetic: only + - * / % and parentheses are known"
    )


def _plain(value: Fraction) -> str:
    """A number without exponent or float noise: 24, 0.3, 0.3333333333."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = len(str(abs(value.numerator) // value.denominator)) + DECIMALS - 1
        decimal = Decimal(value.numerator) / Decimal(value.denominator)
    text = format(decimal, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
