"""The format ``code``: Python in tags and fences as a model writes it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.episodes.toolformats import MAX_CALLS, Code, Malformed, transcript

CODE = Code()
FENCED = "```python\nprint(1)\n```"


def codes(text: str) -> list[str]:
    """The code of every call; a fault as its reason."""
    found = CODE.parse(text)
    return [json.loads(one.arguments)["code"] if isinstance(one, ToolCall) else f"! {one.reason}" for one in found]


@pytest.mark.parametrize(
    ("text", "name", "arguments", "beside"),
    [
        ("<code>print(1)</code>", "python", '{"code": "print(1)"}', False),
        ('<tool_call>{"name": "\\u0061dd", "arguments": {"a": 1}}</tool_call>', "add", '{"a": 1}', False),
        ("[look: harbour]", "look", '{"key": "harbour"}', False),  # a format of someone's own
        ("I look it up.", "look", '{"key": "harbour"}', True),  # a family whose calls are control tokens
        ("", "look", "{}", True),
    ],
)
def test_a_transcript_has_every_call_once(text: str, name: str, arguments: str, beside: bool) -> None:
    call = ToolCall(id="call_0", name=name, arguments=arguments)
    shown = transcript(Message(role="assistant", content=text, tool_calls=(call,), reasoning="hm"))
    added = f'\n<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>' if beside else ""
    assert shown == f"<think>\nhm\n</think>\n\n{text}{added}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("so <code>print(1)</code>", ["print(1)"]),
        ("<python>\nx = 1\nprint(x)\n</python>", ["x = 1\nprint(x)"]),
        (f"first\n{FENCED}\ndone", ["print(1)"]),
        ("```py\nprint(1)\n```", ["print(1)"]),
        (f"<code>{FENCED}</code>", ["print(1)"]),
        (f"<code>\n{FENCED}\n</code>", ["print(1)"]),
        ("<code>a</code> then <python>b</python>", ["a", "b"]),
        ("<code>  if x:\n    y</code>", ["  if x:\n    y"]),
        ("<code>print('<python>')</code>", ["print('<python>')"]),
        ("```\nonly output\n```", []),  # a fence that does not say Python is not run
        ("```json\n{}\n```", []),
        ("say ```python inline``` here", []),
        ("no code", []),
    ],
)
def test_code_is_found_in_tags_and_in_fences(text: str, wanted: list[str]) -> None:
    assert codes(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think><code>a</code></think> <code>b</code>", ["b"]),
        ("<code>a</code></think> <code>b</code>", ["b"]),
        ("<think><code>a</code>", []),
    ],
)
def test_code_inside_thinking_is_not_run(text: str, wanted: list[str]) -> None:
    assert codes(text) == wanted


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("<code>print(1)</code> <answer>1</answer>", False),
        ("<answer>1</answer> <code>print(1)</code>", False),
        ("<code>print('<answer>1</answer>')</code>", True),  # what code prints is no answer
        ("<think><answer>1</answer></think><code>print(1)</code>", True),
        ("I will write <answer> later <code>print(1)</code>", True),
    ],
)
def test_an_answer_ends_the_episode_and_its_code_is_not_run(text: str, runs: bool) -> None:
    assert bool(codes(text)) is runs


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<code>print(1)", "! </code> is missing after a piece of code; write <code> … </code>"),
        ("```python\nprint(1)", "! ``` is missing after a piece of code; write ```python … ```"),
        ("<python> \n </python>", "! a piece of code is empty; write <python> … </python>"),
        ("<code>```python\n```</code>", "! a piece of code is empty; write <code> … </code>"),
    ],
)
def test_a_fault_says_how_code_is_written(text: str, reason: str) -> None:
    assert codes(text) == [reason]


def test_a_thousand_pieces_are_cut_at_the_limit_and_said_so() -> None:
    found = CODE.parse("<code>1</code>" * 1000)
    assert len(found) == MAX_CALLS + 1
    assert isinstance(found[-1], Malformed)


def test_the_output_comes_back_from_the_user_in_tags() -> None:
    message = CODE.result("call_0", "python", "24")
    assert (message.role, message.content, message.tool_call_id) == ("user", "<output>24</output>", "call_0")


def test_instructions_stand_where_there_is_a_tool() -> None:
    assert CODE.instructions(()) == ""
    assert "<code>" in CODE.instructions(({"function": {}},))


@given(
    st.lists(st.sampled_from(["<code>", "</code>", "```python\n", "\n```", "<answer>", "</think>", "x\n"])).map("".join)
)
def test_whatever_is_written_reading_never_raises(text: str) -> None:
    for one in CODE.parse(text):
        assert isinstance(one, ToolCall | Malformed)
