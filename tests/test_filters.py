import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.core.errors import ConfigError
from condensegrpo.inspection.filters import FIELDS, Fields, Value, fields_in, parse_where, sort_key


def fields(**changed: Value) -> Fields:
    plain: dict[str, Value] = {
        "step": 6,
        "evaluation": None,
        "id": "p0/0",
        "group": "p0",
        "sample": 0,
        "problem": "p0",
        "question": "3 + 4?",
        "ground_truth": "7",
        "score": 0.5,
        "correct": 1.0,
        "format": True,
        "advantage": -0.25,
        "turns": 4,
        "context": 31,
        "pictures": 0,
        "read": 100,
        "uncached": 60,
        "output": 20,
        "price": 144.0,
        "condensations": 2,
        "tool_errors": 0,
        "truncated": False,
        "lost_fact": False,
        "stop": "answered",
        "answer": "7",
        "seconds": 1.5,
    }
    assert tuple(plain) == tuple(FIELDS)
    return {**plain, **changed}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("score == 0.5 and turns > 3", True),
        ("score==0 and turns>3", False),
        ("correct", True),
        ("step == 6 and sample == 0 and evaluation == None", True),
        ("ctx == context and valid_format", True),  # as lists abbreviate them
        ("not correct or not format", False),
        ("stop == 'answered'", True),
        ("stop in ('format', 'aborted')", False),
        ("stop not in ['format']", True),
        ("-1 < advantage < 0", True),
        ("0 < turns < 4 < 9", False),
        ("turns != 4 or (context >= 31 and output <= 20)", True),
        ("'swer' in stop", True),
        ("answer == '7'", True),
        ("answer == 7", False),
        ("answer == None", False),
        ("True", True),
    ],
)
def test_what_a_condition_says(text: str, holds: bool) -> None:
    assert parse_where(text)(fields()) is holds


def test_what_is_not_known_is_neither_less_nor_greater() -> None:
    unknown = fields(advantage=None, answer=None)
    assert not parse_where("advantage > 0")(unknown)
    assert not parse_where("advantage <= 0")(unknown)
    assert parse_where("advantage == None and answer == None")(unknown)
    assert not parse_where("'7' in answer or '' in answer or answer in question or 'a' < answer < 'b'")(unknown)
    assert parse_where("answer != '7' and answer not in ('7', 'x') and answer in ('7', None)")(unknown)
    assert not parse_where("answer != None or answer == question or not advantage == None")(unknown)
    assert parse_where("not advantage and not answer")(unknown)


def test_none_in_a_condition_is_the_unknown_value() -> None:
    for text in ("advantage < None", "None <= turns", "None in answer", "'7' in None", "answer in (None, 'x')", "None"):
        assert not parse_where(text)(fields())
    assert parse_where("answer != None and None not in answer and answer not in [None] and not None")(fields())


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "score.__class__",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "turns + 1 > 3",
        "turns if correct else 0",
        "score is None",
        "f'{score}'",
        "(turns := 3)",
        "score == 0; turns",
        "score =",
        "",
        "stop in (('a',),)",
        "-turns > 0",
        "b'x' == stop",
        "(" * 400 + "1" + ")" * 400,
        "score == 0\x00",
    ],
)
def test_anything_beyond_comparing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="reading --where"):
        parse_where(text)(fields())


def test_a_part_of_the_reward_comes_before_an_abbreviation_of_its_name() -> None:
    known, row = (*FIELDS, "ctx"), fields(ctx=0.5)
    assert parse_where("ctx == 0.5 and valid_format", known)(row)
    assert sort_key("-ctx", known)(row) == (False, -0.5, "")
    assert fields_in("ctx > 0", "valid_format", known) == ("format", "ctx")


def test_a_mistyped_field_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown field 'socre'\. Did you mean 'score'\?"):
        parse_where("socre == 0")
    with pytest.raises(ConfigError, match=r"unknown field 'zzz'\. Fields: step, evaluation, id"):
        sort_key("-zzz")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("advantage is None", "it can compare with == != < <= > >= in and not in"),
        ("score == 0 and stop is not 'format'", "it can compare with == != < <= > >= in and not in"),
        ("+1 == score", "'+1' is not part of this language"),
        ("~score == 1", "'~score' is not part of this language"),
        ("not " * 1000 + "score == 0", "it is nested too deeply"),
        ("-" * 400 + "1 == score", "it is nested too deeply"),
        ("-" * 40000 + "1 == score", "it is nested too deeply"),
    ],
)
def test_a_refusal_says_what_it_refuses(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f": {reason}. Compare fields with values")):
        parse_where(text)


@pytest.mark.parametrize("text", ["stop > 3", "turns < 'a'", "turns in 5", "1 not in stop"])
def test_comparing_text_with_a_number_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="it compares text with a number, or looks for one in the other"):
        parse_where(text)(fields())


@settings(max_examples=100)
@given(
    st.text(max_size=30)
    | st.lists(st.sampled_from([*FIELDS, "(", ")", "and", "not", "<", "in", "1", "'a'", ",", "[", "]"])).map(" ".join)
)
def test_any_text_is_read_or_refused_and_never_crashes(text: str) -> None:
    try:
        answer = parse_where(text)(fields())
    except ConfigError:
        return
    assert isinstance(answer, bool)


def test_sorting_puts_the_largest_first_on_request_and_unknown_last() -> None:
    rows = [fields(id="a", context=3), fields(id="b", context=None), fields(id="c", context=9)]

    def order(text: str) -> list[Value]:
        key = sort_key(text)
        return [row["id"] for row in sorted(rows, key=lambda row: key(row))]

    assert order("context") == ["a", "c", "b"]
    assert order("-context") == ["c", "a", "b"]
    assert order("id") == ["a", "b", "c"]
