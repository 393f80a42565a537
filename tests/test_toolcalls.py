import asyncio
import json
import time
from collections.abc import Mapping
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import pytest
from command import succeed_as_script
from formats import NO_HISTORY, TOOL_FORMATS, answers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from talk import simulated

from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import History, MediaPart, Message, ToolCall
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.episodes import strictjson
from condensegrpo.episodes.settings import ToolLimits
from condensegrpo.episodes.toolcalls import ToolAnswers, Toolbox
from condensegrpo.episodes.toolformats import (
    MAX_CALLS,
    Malformed,
    parsed_arguments,
)

NATIVE, TAGGED = TOOL_FORMATS["native"], TOOL_FORMATS["tagged"]
TAGGED_ADD = '<tool>{"name": "add", "args": {"a": 1}}</tool>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


# --- reading ------------------------------------------------------------------------------------------------------


def reasons(text: str) -> list[str]:
    """The faults of a native reply; a call that could be read fails the test."""
    found = NATIVE.parse(text)
    assert all(isinstance(item, Malformed) for item in found), found
    return [item.reason for item in found if isinstance(item, Malformed)]


def test_a_native_call_keeps_the_arguments_as_they_were_written() -> None:
    text = 'so <tool_call>{"name": "add", "arguments": {"a":1,  "b" : [2]}}</tool_call> then'
    assert NATIVE.parse(text) == (ToolCall(id="call_0", name="add", arguments='{"a":1,  "b" : [2]}'),)


def test_a_tagged_call_is_read() -> None:
    text = '<tool>{"name": "add", "args": {"a": 1}}</tool>'
    assert TAGGED.parse(text) == (ToolCall(id="call_0", name="add", arguments='{"a": 1}'),)
    assert TAGGED.stop_strings == ("</tool>", "</answer>")
    assert NATIVE.stop_strings == ()


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<answer>1</answer> {TAGGED_ADD}", 0),
        (f"{TAGGED_ADD} <answer>1</answer>", 0),
        ('<tool>{"name": "add" <answer>1</answer>', 0),  # a malformed call neither
        (f"<think><answer>1</answer></think> {TAGGED_ADD}", 1),
        ('<tool>{"name": "add", "args": {"a": "<answer>1</answer>"}}</tool>', 1),
        (f"I will write <answer> later {TAGGED_ADD}", 1),
    ],
)
def test_a_tagged_reply_with_an_answer_calls_nothing(text: str, calls: int) -> None:
    assert len(TAGGED.parse(text)) == calls


def test_a_native_call_next_to_an_answer_is_run() -> None:
    assert len(NATIVE.parse(f"<answer>1</answer> {ADD}")) == 1


@pytest.mark.parametrize(
    ("returned", "succeeded"),
    [
        ("3", 1),
        ("no Error: here", 1),
        ("Error: the index is missing", 0),
        ("\n Error: the index is missing", 0),
        ("", 0),
        (" \n", 0),
    ],
)
def test_a_result_that_is_an_error_text_or_blank_is_no_success(returned: str, succeeded: int) -> None:
    def add(a: int) -> str:
        """Adds.

        Args:
            a: What.
        """
        return returned

    async def later(a: int) -> str:
        """Adds.

        Args:
            a: What.
        """
        return returned

    for tool in (add, later):
        toolbox = Toolbox({"add": tool}, format=TAGGED, limits=ToolLimits(seconds=60))
        given = answers(toolbox, TAGGED_ADD)
        assert (given.attempted, given.succeeded) == (1, succeeded)
        assert given.messages[0].content == f"<result>{returned}</result>"


def test_parallel_calls_are_read_in_order() -> None:
    calls = NATIVE.parse(f"{ADD}\n{ADD.replace('add', 'sub')}")
    assert [(call.id, call.name) for call in calls if isinstance(call, ToolCall)] == [
        ("call_0", "add"),
        ("call_1", "sub"),
    ]


def test_a_reply_without_a_call_has_none() -> None:
    assert NATIVE.parse("the answer is {5}, not </tool_call>") == ()
    assert NATIVE.parse("") == ()
    assert TAGGED.parse(ADD) == ()


@pytest.mark.parametrize(
    "arguments",
    [
        '{"q": "a </tool_call> b"}',
        '{"q": {"deep": {"er": [{}, {"x": "}"}]}}}',
        r'{"q": "quote \" brace } tag <tool_call>"}',
        '{"q": "<think>"}',
        '{"q": "</think>"}',
        '{"q": "naïve 漢字 🙂\u202e"}',
        "{}",
    ],
)
def test_braces_and_tags_inside_a_json_string_do_not_end_a_call(arguments: str) -> None:
    text = f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'
    assert NATIVE.parse(text) == (ToolCall(id="call_0", name="find", arguments=arguments),)


def test_arguments_given_as_a_json_string_are_understood() -> None:
    (call,) = NATIVE.parse(r'<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>')
    assert isinstance(call, ToolCall)
    assert call.arguments == r'"{\"a\": 1}"'
    assert parsed_arguments(call.arguments) == {"a": 1}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "add", "arguments": {"a": 1', "breaks off or is wrong at its character 36"),
        ('{"name": "add", "arguments": {"a": 1}}', "</tool_call> is missing after a tool call"),
        ('{"name": "add", "arguments": {"a": 1},}', "breaks off or is wrong"),
        ('{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        ('{"name": "add", "arguments": {"a": -Infinity}}</tool_call>', "-Infinity is not JSON"),
        ('{"name": "add", "name": "sub", "arguments": {}}</tool_call>', "stands twice: 'name'"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', "holds a key twice"),
        ('{"name": "add", "arguments": [1, 2]}</tool_call>', "the arguments are no JSON object but '[1, 2]'"),
        ('{"name": "add", "arguments": null}</tool_call>', "the arguments are no JSON object but 'null'"),
        ('{"name": "add", "arguments": "one"}</tool_call>', "breaks off or is wrong at its character 0"),
        ('{"name": "add", "arguments": "[1]"}</tool_call>', "the arguments are no JSON object"),
        ('{"name": 7, "arguments": {}}</tool_call>', "its name is no word of 1 to 64 printable characters but '7'"),
        ('{"name": "", "arguments": {}}</tool_call>', "its name is no word"),
        (r'{"name": "a\nb", "arguments": {}}</tool_call>', "its name is no word"),
        (r'{"name": "\ud800", "arguments": {}}</tool_call>', "its name is no word"),
        ('{"name": "add", "args": {}}</tool_call>', "it lacks the key 'arguments', its keys are: 'name', 'args'"),
        ('{"arguments": {}}</tool_call>', "it lacks the key 'name'"),
        ("{}</tool_call>", "its keys are: none"),
        ('{7: "add"}</tool_call>', "a key of the JSON object is no string"),
        ("[]</tool_call>", "Expecting '{'"),
        ("", "breaks off or is wrong at its character 0"),
        ("{'name': 'add'}</tool_call>", "breaks off or is wrong at its character 1"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "Exceeds the limit"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 9_000 + "]" * 9_000 + "}}</tool_call>", "nested too deeply"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}</tool_call>", "nested too deeply"),
    ],
)
def test_a_fault_is_one_line_that_says_what_is_wrong_and_how_it_is_written(body: str, reason: str) -> None:
    (found,) = reasons(f"<tool_call>{body}")
    assert reason in found
    assert found.endswith('; a call is written <tool_call>{"name": "…", "arguments": {…}}</tool_call>')
    assert "\n" not in found
    assert len(found) < 400


def test_a_good_call_after_a_broken_one_still_counts() -> None:
    broken, good = NATIVE.parse(f'<tool_call>{{"name": </tool_call>{ADD}')
    assert isinstance(broken, Malformed)
    assert good == ToolCall(id="call_1", name="add", arguments='{"a": 1, "b": 2}')


def test_a_megabyte_in_one_call_is_read() -> None:
    (call,) = NATIVE.parse(f'<tool_call>{{"name": "w", "arguments": {{"text": "{"x" * 1_000_000}"}}}}</tool_call>')
    assert isinstance(call, ToolCall)
    assert len(call.arguments) == 1_000_012


def test_a_megabyte_of_opening_tags_is_read_in_no_time() -> None:
    start = time.process_time()
    assert len(reasons('<tool_call>{"name": "' * 50_000)) == MAX_CALLS + 1
    assert time.process_time() - start < 5  # quadratic reading takes minutes


def test_a_thousand_calls_are_cut_at_the_limit_and_said_so() -> None:
    *calls, last = NATIVE.parse(ADD * 1000)
    assert len(calls) == MAX_CALLS
    assert all(isinstance(call, ToolCall) for call in calls)
    assert last == Malformed(reason=f"a reply may hold {MAX_CALLS} tool calls, the rest was not run")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"<think>I could {ADD}</think> no", []),
        (f"<think>cut off while {ADD}", []),
        (f"the template opened it: {ADD}</think> no", []),
        (f"the template opened it: {ADD}</think>{ADD.replace('add', 'sub')}", ["sub"]),
        (f"<think>a</think>{ADD}<think>b {ADD.replace('add', 'sub')}</think>", ["add"]),
        (f"<think>a</think>{ADD} a stray </think>", ["add"]),
        (f"<think>broken <tool_call></think>{ADD}", ["add"]),
    ],
)
def test_calls_inside_thinking_do_not_count(text: str, names: list[str]) -> None:
    assert [call.name for call in NATIVE.parse(text) if isinstance(call, ToolCall)] == names
    assert not [fault for fault in NATIVE.parse(text) if isinstance(fault, Malformed)]


MARKS = ["<tool_call>", "</tool_call>", "<tool>", "</tool>", "<think>", "</think>", *'{}[]":,\\']
WORDS = ['"name"', '"arguments"', '"args"', '"add"', "NaN", "1e999", "null", "\n", " ", "é", "\ud800", "\x00", ADD]
PIECES = st.sampled_from([*MARKS, *WORDS])


@settings(max_examples=120)
@given(st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join), st.sampled_from(sorted(TOOL_FORMATS)))
def test_whatever_is_written_reading_never_raises(text: str, name: str) -> None:
    for item in TOOL_FORMATS[name].parse(text):
        if isinstance(item, ToolCall):
            assert item.arguments in text
            assert isinstance(parsed_arguments(item.arguments), dict)
        else:
            assert item.reason
            assert "\n" not in item.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_every_json_object_arrives_as_it_was_written(
    arguments: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    body = json.dumps({"name": "add", "arguments": arguments}, ensure_ascii=ascii_only, indent=indent)
    (call,) = NATIVE.parse(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == arguments
    assert call.arguments in body


def test_members_are_found_with_their_written_form() -> None:
    text = 'call {"a": [1,  2], "b": "x"} now'
    assert strictjson.members(text, 5) == ({"a": "[1,  2]", "b": '"x"'}, 29)
    assert text[29:] == " now"


# --- results and instructions -------------------------------------------------------------------------------------


def test_results_have_the_role_of_their_format() -> None:
    assert NATIVE.result("call_0", "add", "3") == Message(role="tool", content="3", tool_call_id="call_0", name="add")
    assert TAGGED.result("call_0", "add", "3") == Message(
        role="user", content="<result>3</result>", tool_call_id="call_0", name="add"
    )
    assert NATIVE.result("call_0", "", "Error: …").name is None


def test_a_picture_alone_is_a_success_and_any_argument_may_be_allowed_by_an_empty_schema() -> None:
    async def look(arguments: Mapping[str, object], _: History) -> ToolResult:
        text = "Error: it is dark" if arguments.get("night") else ""
        return ToolResult(text=text, media=(MediaPart.of(b"png", "image/png"),))

    schema = {"type": "object", "properties": {}, "additionalProperties": {}}
    box = toolbox().with_tools([EnvironmentTool(name="look", description="Looks.", parameters=schema, call=look)])
    for arguments, successes in (({}, 1), ({"zoom": 2}, 1), ({"night": True}, 0)):
        reply = f"<tool_call>{json.dumps({'name': 'look', 'arguments': arguments})}</tool_call>"
        found = answers(box, reply)
        assert (found.succeeded, len(found.messages[0].media)) == (successes, 1), found.messages[0].text


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


def test_instructions_tell_of_tools_only_where_the_template_does_not() -> None:
    box = toolbox(add, form="tagged")
    text = TAGGED.instructions(box.schemas)
    assert '<tool>{"name": "…", "args": {…}}</tool>' in text
    assert json.loads(text.splitlines()[-1])["parameters"]["required"] == ["a"]
    assert TAGGED.instructions(()) == NATIVE.instructions(box.schemas) == ""


# --- introducing --------------------------------------------------------------------------------------------------

SYSTEM = Message(role="system", content="be brief")
QUESTION = Message(role="user", content="what is 2 + 2? never write <tool>")


def test_the_system_message_tells_of_the_tools() -> None:
    box = toolbox(add, form="tagged")
    instructions = TAGGED.instructions(box.schemas)
    assert box.introduced([SYSTEM, QUESTION]) == (
        Message(role="system", content=f"be brief\n\n{instructions}"),
        QUESTION,
    )


def test_a_head_without_system_message_gets_one() -> None:
    box = toolbox(add, form="tagged")
    told = Message(role="system", content=TAGGED.instructions(box.schemas))
    assert box.introduced([QUESTION]) == box.introduced([Message(role="system", content=""), QUESTION])
    assert box.introduced([QUESTION]) == (told, QUESTION)


def test_the_first_system_message_alone_is_added_to() -> None:
    first, *rest = toolbox(add, form="tagged").introduced([SYSTEM, QUESTION, SYSTEM])
    assert "You can use tools" in first.content
    assert rest == [QUESTION, SYSTEM]


def test_a_task_that_explains_its_tools_itself_is_left_alone() -> None:
    own = Message(role="system", content='To add, write <tool>{"name": "add", …}</tool>.')
    box = toolbox(add, form="tagged")
    assert box.introduced([own, QUESTION]) == (own, QUESTION)
    once = box.introduced([SYSTEM, QUESTION])
    assert box.introduced(once) == once


def test_without_tools_or_with_a_template_that_shows_them_the_head_stays() -> None:
    assert toolbox(form="tagged").introduced([SYSTEM, QUESTION]) == (SYSTEM, QUESTION)
    assert toolbox(add, form="native").introduced([SYSTEM, QUESTION]) == (SYSTEM, QUESTION)


@pytest.mark.parametrize("form", ["native", "tagged"])
def test_what_opens_a_call_is_what_is_read(form: str) -> None:
    """``introduced`` looks for it in the pinned messages."""
    format_ = TOOL_FORMATS[form]
    assert format_.parse(f"so {format_.opening}") != ()
    assert format_.parse(f"so {format_.opening[:-1]}") == ()


# --- running ------------------------------------------------------------------------------------------------------


def toolbox(*tools: Any, form: str = "native", seconds: float = 60, max_chars: int = 4000) -> Toolbox:
    named = {tool.__name__: tool for tool in tools}
    return Toolbox(named, format=TOOL_FORMATS[form], limits=ToolLimits(seconds=seconds, max_chars=max_chars))


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def contents(box: Toolbox, text: str) -> list[str]:
    return [message.content for message in answers(box, text).messages]


async def sleepy(seconds: float) -> str:
    """Sleeps and lets others work.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "woke up"


def hang(seconds: float) -> str:
    """Sleeps in its thread.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "woke up"


def crash(how: str) -> NoReturn:
    """Raises.

    Args:
        how: Which error.
    """
    raise {
        "value": ValueError("not\nso"),
        "exit": SystemExit(0),
        "stop": StopIteration("x"),
        "kill": KeyboardInterrupt(),
    }[how]


async def crash_later(how: str) -> NoReturn:
    """Raises in a coroutine.

    Args:
        how: Which error.
    """
    crash(how)


def test_a_call_is_run_and_answered() -> None:
    found = answers(toolbox(add), f"let me see {ADD}")
    assert found == ToolAnswers(
        calls=(ToolCall(id="call_0", name="add", arguments='{"a": 1, "b": 2}'),),
        messages=(Message(role="tool", content="3", tool_call_id="call_0", name="add"),),
        attempted=1,
        succeeded=1,
    )


def test_a_reply_without_a_call_is_not_answered() -> None:
    assert answers(toolbox(add), "42") == ToolAnswers(calls=(), messages=(), attempted=0, succeeded=0)


def test_results_come_in_the_order_of_the_calls_although_they_run_at_the_same_time() -> None:
    finished: list[str] = []

    async def echo(text: str, seconds: float) -> str:
        """Gives back its text, later.

        Args:
            text: What to give back.
            seconds: How long to wait.
        """
        await asyncio.sleep(seconds)
        finished.append(text)
        return text

    text = call("echo", '{"text": "late", "seconds": 0.3}') + call("echo", '{"text": "soon", "seconds": 0}')
    assert contents(toolbox(echo), text) == ["late", "soon"]
    assert finished == ["soon", "late"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (call("subtract"), "Error: there is no tool 'subtract'. The tools are: add"),
        (call("add"), "Error: add: missing a required argument: 'a'. It is called as add(a: int, b: int = 0) -> int"),
        (call("add", '{"a": 1, "c": 2}'), "Error: add: got an unexpected keyword argument 'c'. It is called as add(a:"),
        (
            call("add", '{"a": "21"}'),
            """Error: add: argument 'a' is "21": Input should be a valid integer. It is called as add(a:""",
        ),
        ("<tool_call>{}</tool_call>", "Error: a tool call cannot be understood: it lacks the key 'name'"),
        ('<tool_call>{"name": "add", "argu', "Error: a tool call cannot be read: the JSON breaks off"),
    ],
)
def test_a_call_that_cannot_be_run_is_an_error_that_names_what_exists(text: str, complaint: str) -> None:
    found = answers(toolbox(add), text)
    (message,) = found.messages
    assert message.content.startswith(complaint)
    assert message.tool_call_id == "call_0"
    assert (found.attempted, found.succeeded) == (1, 0)


def order(
    size: Literal["S", "L"],
    count: Annotated[int, Field(ge=1)] = 1,
    gift: bool = False,
    notes: list[str] | None = None,
    price: float = 1.5,
    colour: str = "red",
    span: tuple[int, int] = (0, 0),
) -> dict[str, object]:
    """Orders.

    Args:
        size: of it.
        count: how many.
        gift: wrapped.
        notes: on it.
        price: of one.
        colour: of it. (choices: ["red", "blue"])
        span: of days.
    """
    return {"size": size, "count": count, "gift": gift, "notes": notes, "price": price, "span": span}


ORDER_SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "string", "enum": ["S", "L"]},
        "count": {"type": "integer"},
        "gift": {"type": "boolean"},
        "notes": {"type": "array", "items": {"type": "string"}, "nullable": True},
        "price": {"type": ["number", "null"]},
        "colour": {"enum": ["red", "blue"]},
        "anything": {},
    },
    "required": ["size"],
}


async def ordered(arguments: Mapping[str, object], _: History) -> ToolResult:
    return ToolResult(text=json.dumps(dict(arguments)))


WRONG = [
    ("size", '"M"'),
    ("count", '"21"'),
    ("count", "2.5"),
    ("count", "true"),
    ("count", "null"),
    ("gift", '"false"'),
    ("gift", "0"),
    ("notes", '"one"'),
    ("notes", '["one", 2]'),
    ("price", '"2"'),
    ("colour", '"green"'),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_an_argument_of_another_json_type_is_an_error_that_names_it(name: str, value: str) -> None:
    offered = EnvironmentTool(name="order", description="Orders.", parameters=ORDER_SCHEMA, call=ordered)
    arguments = ", ".join({"size": '"size": "S"', name: f'"{name}": {value}'}.values())
    for box in (toolbox(order), toolbox().with_tools([offered])):
        found = answers(box, call("order", f"{{{arguments}}}"))
        assert found.messages[0].text.startswith(f"Error: order: argument {name!r} is {value}: ")
        assert (found.attempted, found.succeeded) == (1, 0)


def test_annotations_without_a_hash_and_schemas_that_mean_nothing_are_taken() -> None:
    def size(width: Annotated[int, {"unit": "cm"}]) -> str:
        """Give a size.

        Args:
            width: In cm.
        """
        return f"{width} cm"

    assert contents(toolbox(size), call("size", '{"width": 3}')) == ["3 cm"]
    schema = {"type": "object", "properties": {"one": {"type": []}, "two": {"type": {"a": 1}}}}
    offered = EnvironmentTool(name="order", description="Orders.", parameters=schema, call=ordered)
    box, arguments = toolbox().with_tools([offered]), '{"one": 3, "two": [4]}'
    assert contents(box, call("order", arguments)) == [arguments]


def test_an_argument_outside_the_bounds_of_a_signature_is_an_error() -> None:
    (message,) = answers(toolbox(order), call("order", '{"size": "S", "count": 0}')).messages
    assert message.text.startswith("Error: order: argument 'count' is 0: Input should be greater than or equal to 1")


def test_right_arguments_arrive_as_the_signature_says_and_as_the_schema_says() -> None:
    arguments = '{"size": "L", "count": 2, "gift": true, "notes": null, "price": 3, "colour": "blue"}'
    offered = EnvironmentTool(name="order", description="Orders.", parameters=ORDER_SCHEMA, call=ordered)
    box = toolbox().with_tools([offered])
    assert contents(box, call("order", arguments)) == [arguments]
    assert contents(box, call("order", '{"size": "S", "anything": {"a": [1]}, "price": null}')) == [
        '{"size": "S", "anything": {"a": [1]}, "price": null}'
    ]
    (content,) = contents(toolbox(order), call("order", '{"size": "S", "span": [1, 2], "price": 3}'))
    assert json.loads(content) == {
        "size": "S",
        "count": 1,
        "gift": False,
        "notes": None,
        "price": 3.0,
        "span": [1, 2],
    }


@pytest.mark.parametrize(
    ("returned", "shown", "succeeded"),
    [
        ({"ok": True, "café": [1, None]}, '{"ok": true, "café": [1, null]}', 1),
        ([1, "two"], '[1, "two"]', 1),
        ((1, 2), "[1, 2]", 1),
        (None, "", 0),
        (True, "true", 1),
        (Fraction(1, 2), "1/2", 1),  # JSON has no fractions
        ({Path("a"): date(2026, 1, 2)}, '{"a": "2026-01-02"}', 1),
    ],
)
def test_a_result_is_text_or_json_and_none_is_empty(returned: object, shown: str, succeeded: int) -> None:
    def get() -> Any:
        """Gets."""
        return returned

    async def get_later() -> Any:
        """Gets."""
        return returned

    for tool in (get, get_later):
        found = answers(toolbox(tool), call(tool.__name__))
        assert (found.messages[0].text, found.succeeded) == (shown, succeeded)


def test_a_malformed_call_names_the_tools() -> None:
    (content,) = contents(toolbox(add, hang), "<tool_call>")
    assert content.endswith("The tools are: add, hang")


def test_every_attempt_has_its_own_answer_and_no_answer_is_an_orphan() -> None:
    found = answers(toolbox(add), f"{ADD}<tool_call>oops</tool_call>{call('sub')}")
    assert [(message.tool_call_id, message.name) for message in found.messages] == [
        ("call_0", "add"),
        ("call_1", None),
        ("call_2", "sub"),
    ]
    assert [read.id for read in found.calls] == ["call_0", "call_2"]
    assert (found.attempted, found.succeeded) == (3, 1)


@pytest.mark.parametrize("tool", [crash, crash_later])
@pytest.mark.parametrize(
    ("how", "complaint"),
    [("value", "ValueError: not\nso"), ("exit", "SystemExit: 0"), ("missing", "KeyError: 'missing'")],
)
def test_a_tool_that_raises_is_an_error_and_not_the_end(tool: Any, how: str, complaint: str) -> None:
    (content,) = contents(toolbox(tool), call(tool.__name__, f'{{"how": "{how}"}}'))
    assert content == f"Error: {tool.__name__}: {complaint}"


def test_the_exceptions_that_asyncio_dislikes_are_errors_too() -> None:
    assert contents(toolbox(crash), call("crash", '{"how": "stop"}')) == ["Error: crash: StopIteration: x"]
    assert contents(toolbox(crash), call("crash", '{"how": "kill"}')) == ["Error: crash: KeyboardInterrupt"]
    (content,) = contents(toolbox(crash_later), call("crash_later", '{"how": "stop"}'))
    assert content.startswith("Error: crash_later: RuntimeError")


def test_a_hung_tool_costs_only_itself() -> None:
    text = call("sleepy", '{"seconds": 20}') + call("sleepy", '{"seconds": 0}')
    found = simulated(toolbox(sleepy, seconds=0.3).run(NATIVE.parse(text), NO_HISTORY))
    assert [message.content for message in found.messages] == [
        "Error: sleepy did not finish within 0.3 seconds",
        "woke up",
    ]
    assert (found.attempted, found.succeeded, found.abandoned) == (2, 1, 1)


def test_a_synchronous_tool_that_hangs_costs_its_limit() -> None:
    start = time.perf_counter()
    found = answers(toolbox(hang, seconds=0.3), call("hang", '{"seconds": 20}'))
    assert time.perf_counter() - start < 15
    assert [message.content for message in found.messages] == ["Error: hang did not finish within 0.3 seconds"]
    assert (found.attempted, found.succeeded, found.abandoned) == (1, 0, 1)


def test_a_tool_that_cancels_itself_does_not_cancel_the_rollout() -> None:
    async def quitter() -> str:
        """Gives up."""
        raise asyncio.CancelledError

    assert contents(toolbox(quitter), call("quitter")) == ["Error: quitter was cancelled"]


def test_cancelling_the_rollout_cancels_its_tools() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def patient() -> str:
        """Waits."""
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "done"

    async def interrupted() -> None:
        task = asyncio.ensure_future(toolbox(patient).run(NATIVE.parse(call("patient")), NO_HISTORY))
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
        await asyncio.wait_for(cancelled.wait(), 30)  # before asyncio.run cancels what is left over

    asyncio.run(interrupted())


def test_a_hung_tool_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, time\n"
        "from condensegrpo.core.messages import History\n"
        "from condensegrpo.episodes.settings import ToolLimits\n"
        "from condensegrpo.episodes.toolcalls import Toolbox\n"
        "from condensegrpo.episodes.toolformats import Native\n"
        "def hang() -> str:\n    'Hangs.'\n    time.sleep(300)\n    return ''\n"
        "box = Toolbox({'hang': hang}, format=Native(), limits=ToolLimits(seconds=0.1))\n"
        'text = \'<tool_call>{"name": "hang", "arguments": {}}</tool_call>\'\n'
        "answers = asyncio.run(box.run(Native().parse(text), History(pinned=())))\n"
        "print(answers.messages[0].content)\n"
    )
    assert succeed_as_script(program) == "Error: hang did not finish within 0.1 seconds\n"


def test_a_long_result_keeps_its_head_and_its_tail() -> None:
    def letters(count: int) -> str:
        """Gives letters.

        Args:
            count: How many.
        """
        return "a" + "-" * (count - 2) + "z"

    (content,) = contents(toolbox(letters, max_chars=5), call("letters", '{"count": 1000}'))
    assert content == "a--\n[… 995 characters left out …]\n-z"
    (content,) = contents(toolbox(letters, max_chars=1), call("letters", '{"count": 7}'))
    assert content == "a\n[… 6 characters left out …]\n"
    (content,) = contents(toolbox(letters, max_chars=7), call("letters", '{"count": 7}'))
    assert content == "a-----z"


def test_a_lone_surrogate_in_a_result_becomes_text_that_can_be_saved() -> None:
    def echo(text: str) -> str:
        """Gives back its text.

        Args:
            text: What to give back.
        """
        return text

    assert contents(toolbox(echo), call("echo", r'{"text": "a\ud800b"}')) == ["a?b"]


def test_schemas_carry_the_name_that_the_model_calls() -> None:
    box = Toolbox({"plus": add}, format=NATIVE, limits=ToolLimits(seconds=1))
    assert [schema["function"]["name"] for schema in box.schemas] == ["plus"]
    assert contents(box, call("plus", '{"a": 2}')) == ["2"]


def test_a_tool_without_docstring_or_types_is_refused_before_the_run() -> None:
    def bare(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  the missing types are the test
        return x

    with pytest.raises(PluginError, match=r"making the schema of tool 'bare'.*docstring"):
        toolbox(bare)


@settings(max_examples=60)
@given(st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join))
def test_whatever_is_written_every_attempt_is_answered(text: str) -> None:
    found = answers(toolbox(add), text)
    assert found.attempted == len(found.messages) >= len(found.calls) >= found.succeeded
    assert sum(not message.content.startswith("Error: ") for message in found.messages) == found.succeeded
