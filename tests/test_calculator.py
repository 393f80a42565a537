import ast
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from condensegrpo.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48/2", "24"),
        ("0.1+0.2", "0.3"),
        ("(48 / 2 + 1) * 3", "75"),
        ("-7", "-7"),
        ("--7", "7"),
        ("+2-+3", "-1"),
        ("1/3", "0.3333333333"),
        ("2/3", "0.6666666667"),
        ("1/8", "0.125"),
        ("100/8", "12.5"),
        ("1.50*2", "3"),
        (".5+1.", "1.5"),
        ("1,000+1,234,567", "1235567"),
        ("7 % 3", "1"),
        ("7 %(2+1)", "1"),
        ("20%", "0.2"),
        ("50*20%", "10"),
        ("50/20%", "250"),
        ("50 * 2.5 % + 1", "2.25"),
        (" 2 + 2 ", "4"),
        ("0/5", "0"),
        ("12345678901234567890.123 + 0", "12345678901234567890.123"),
        ("999999999999/7", "142857142857"),
        ("1/10000000000000000", "0.0000000000000001"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("1.5**2", "2.25"),
        ("1**99999999999", "1"),
        ("2**4095 / 2**4094", "2"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7.5//2", "3"),
        ("50%//2", "0"),
        ("-7 % 3", "2"),
    ],
)
def test_results_are_plain_decimals(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("1/0", "division by zero: 0 is 0"),
        ("1 % (2-2)", "division by zero: 2-2 is 0"),
        ("1/(0*5)", "division by zero: 0*5 is 0"),
        ("1//0", "division by zero: 0 is 0"),
        ("(1-1)**-1", "division by zero: 1-1 is 0"),
        ("2**0.5", "the exponent 0.5 is not a whole number"),
        ("9**9**9", "more than 4096 bits"),
        ("2**-9999", "more than 4096 bits"),
        ("2**2000*2**2000*2**2000", "more than 4096 bits"),
        ("(1, 2)", "is not arithmetic"),
        ("()", "is not arithmetic"),
        ("1(2)", "is not arithmetic"),
        ("1 +", "'1 +' is not an arithmetic expression"),
        ("(1", "is not an arithmetic expression"),
        ("1 2", "is not an arithmetic expression"),
        ("", "found nothing"),
        (" ", "is not an arithmetic expression"),
        ("2^3", "found '^'"),
        ("__import__('os')", "digits and"),
        ("1e9", "found 'e'"),
        ("x+1", "found 'x'"),
        ("٣+1", "found '٣'"),
        ("1\n+2", r"found '\n'"),
        ("1+" * 100 + "1", "201 characters, at most 200"),
    ],
)
def test_what_is_no_arithmetic_is_refused_with_the_reason(expression: str, complaint: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the whole message is compared below
        calculator(expression)
    assert complaint in str(raised.value)


def test_the_deepest_and_longest_expressions_are_bounded() -> None:
    assert calculator("-" * 199 + "1") == "-1"
    assert calculator("*".join(["99999999999999999999"] * 9)).startswith("9999999999")
    with pytest.raises(ValueError, match="not an arithmetic"):
        calculator("(" * 200)


def test_no_power_takes_long_or_has_many_digits() -> None:
    started = time.process_time()
    for expression in ("9" * 190 + "**9", "9**9**9**9**9", "(9**99)**99", "*".join(["9**999"] * 28), "2**(2**4000)"):
        with pytest.raises(ValueError, match="more than 4096 bits"):
            calculator(expression)
    assert len(calculator("-".join(["2**-4000"] * 20))) < 1300
    assert time.process_time() - started < 1


@settings(max_examples=200)
@given(st.text(alphabet="0123456789+-*/.()%, ", max_size=60))
def test_any_text_of_the_allowed_characters_gives_a_number_or_a_value_error(expression: str) -> None:
    try:
        result = calculator(expression)
    except ValueError:
        return
    assert isinstance(ast.literal_eval(result), int | float)


@settings(max_examples=100)
@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.sampled_from("+-*"))
def test_integers_are_exact(left: int, right: int, sign: str) -> None:
    wanted = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert calculator(f"({left}) {sign} ({right})") == str(wanted)


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_cents_add_up_without_float_noise(left: int, right: int) -> None:
    result = calculator(f"{left // 100}.{left % 100:02} + {right // 100}.{right % 100:02}")
    assert Fraction(result) == Fraction(left + right, 100)


def test_its_schema_can_be_shown_to_a_model() -> None:
    function = get_json_schema(calculator)["function"]
    assert function["name"] == "calculator"
    assert function["parameters"]["required"] == ["expression"]
