"""The calculator tool: one line of arithmetic, computed exactly and never run as Python. Standard library only."""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

from condensegrpo.core.threads import parsed_expression

MAX_CHARS = 200  # of an expression
MAX_BITS = 4096  # of the numerator and the denominator of every result: about 1,200 digits
DECIMALS = 10  # significant digits kept after the integer part of a result that has no short decimal form

_ALLOWED = re.compile(r"[0-9+\-*/.()%, ]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # 1,234 but not (1, 2)
_PERCENT = re.compile(r"(\d+\.?\d*|\.\d+) *%(?! *[\d.(])")  # 20% of something; 7 % 3 stays a remainder


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly and gives the result as a plain decimal number.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as "(48 / 2 + 1) * 3". After a number % is a
            percentage ("50 * 20%" is 10), between two numbers the remainder ("7 % 3" is 1).

    Returns:
        The result, such as "75".
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed")
    if not _ALLOWED.fullmatch(expression):
        refused = ", ".join(map(repr, sorted(set(_ALLOWED.sub("", expression)))))
        raise ValueError(f"an expression holds digits and + - * / // % ** . ( ) only, found {refused or 'nothing'}")
    source = _PERCENT.sub(r"(\1/100)", _THOUSANDS.sub("", expression)).strip()
    try:
        tree = parsed_expression(source)
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
            operands = (_value(left, source), _value(right, source))
            try:
                result = _OPERATORS[type(op)](*operands)
            except ZeroDivisionError:
                zero = left if isinstance(op, ast.Pow) else right
                raise ValueError(f"division by zero: {ast.get_source_segment(source, zero)} is 0") from None
            if _bits(result) > MAX_BITS:
                raise _too_large()
            return result
    raise ValueError(
        f"{ast.get_source_segment(source, node)!r} is not arithmetic: only + - * / // % ** and parentheses are known"
    )


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent for whole exponents; its size is estimated from below before anything is multiplied."""
    if exponent.denominator != 1:
        raise ValueError(f"the exponent {_plain(exponent)} is not a whole number")
    if (_bits(base) - 1) * abs(exponent.numerator) > MAX_BITS:
        raise _too_large()
    return Fraction(base**exponent.numerator)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _too_large() -> ValueError:
    return ValueError(f"a result would have more than {MAX_BITS} bits (about 1,200 digits)")


def _plain(value: Fraction) -> str:
    """A number without exponent or float noise: 24, 0.3, 0.3333333333."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = len(str(abs(value.numerator) // value.denominator)) + DECIMALS - 1
        decimal = Decimal(value.numerator) / Decimal(value.denominator)
    text = format(decimal, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
