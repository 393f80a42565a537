"""The GSM8K task: worked answers, the expert with the calculator, episodes."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from formats import TOOL_FORMATS
from playing_experts import turns

from condensegrpo.condensers.summary import PolicySummary
from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import ConfigError, DataError, PluginError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Demonstration
from condensegrpo.episodes.toolcalls import parsed_arguments
from condensegrpo.rewards.matches import number
from condensegrpo.tasks.answers import read_answer
from condensegrpo.tasks.gsm8k import Gsm8k, final_answer
from condensegrpo.tools.calculator import calculator

FORMATS: tuple[str, ...] = ("native", "tagged")
CLIPS = {
    "question": "Natalia sold clips to 48 friends in April and half as many in May. How many in all?",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = $<<48+24=72>>72 in all.\n#### 72",
}
TALK = {"question": "How many legs has a cat?", "answer": "A cat has four legs.\n#### 4"}
WRONG = {"question": "What is 2 and 2?", "answer": "It is 2+2 = <<2+2=5>>5.\n#### 5"}
HELD_OUT = {"question": "What is half of 10?", "answer": "It is 10/2 = <<10/2=5>>5.\n#### 5"}
REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"


def write(path: Path, rows: Sequence[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "data": write(tmp_path / "train.jsonl", [CLIPS, TALK, WRONG]),
        "eval_data": write(tmp_path / "test.jsonl", [HELD_OUT]),
    }


def step(task: Gsm8k, reply: str) -> Step:
    environment = task.environment(task.problems("train")[0])
    return asyncio.run(environment.step(Message(role="assistant", content=reply)))


# --- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worked", "answer"),
    [
        ("so\n#### 72", "72"),
        ("so\n#### -5", "-5"),
        ("so\n#### $1,080", "1080"),
        ("so\n#### $-1,080", "-1080"),
        ("so\n####3.5 ", "3.5"),
        ("so\n#### 12 #### 13", "12"),
        ("so 72", None),
        ("so\n#### ", None),
    ],
)
def test_the_answer_stands_after_the_first_mark(worked: str, answer: str | None) -> None:
    assert final_answer(worked) == answer


def test_problems_keep_the_order_of_the_file(files: dict[str, str]) -> None:
    task = Gsm8k(**files)
    assert [(problem.id, problem.answer) for problem in task.problems("train")] == [
        ("train-0", "72"),
        ("train-1", "4"),
        ("train-2", "5"),
    ]
    assert [problem.question for problem in task.problems("eval")] == ["What is half of 10?"]


def test_questions_of_the_evaluation_are_dropped_from_training(tmp_path: Path) -> None:
    same = {**HELD_OUT, "question": "  what is HALF of 10? "}
    data, held_out = write(tmp_path / "a.jsonl", [CLIPS, same]), write(tmp_path / "b.jsonl", [HELD_OUT])
    task = Gsm8k(data=data, eval_data=held_out)
    assert task.left_out == 1
    assert [problem.answer for problem in task.problems("train")] == ["72"]
    assert not any("half of 10" in text.lower() for text in task.corpus())


def test_an_answer_without_its_mark_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [CLIPS, {"question": "why?", "answer": "because"}])
    with pytest.raises(DataError, match=r"row 2 has no final line like '#### 72' \(it ends in 'because'\)"):
        Gsm8k(data=source, eval_data=source)


def test_max_examples_takes_the_first_training_rows(files: dict[str, str]) -> None:
    assert [problem.answer for problem in Gsm8k(**files, max_examples=1).problems("train")] == ["72"]


@pytest.mark.parametrize("options", [{"tool_format": 1}, {"max_examples": 0}])
def test_options_out_of_range_are_refused(files: dict[str, str], options: dict[str, object]) -> None:
    (option,) = options
    with pytest.raises(PluginError, match=f"the option {option} is "):
        build_plugin("tasks", "gsm8k", {**files, **options})


# --- episodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_head_explains_the_calculator_in_the_chosen_format(files: dict[str, str], tool_format: str) -> None:
    task = Gsm8k(**files, tool_format=tool_format)
    system, question = asyncio.run(task.environment(task.problems("train")[0]).start())
    assert (system.role, question.role, question.content) == ("system", "user", CLIPS["question"])
    (call,) = TOOL_FORMATS[tool_format].parse(system.content.partition("End with")[0])  # an answer would call nothing
    assert isinstance(call, ToolCall)
    assert (call.name, parsed_arguments(call.arguments)) == ("calculator", {"expression": "48/2"})
    assert "<answer>" in system.content


def test_an_answer_ends_the_episode(files: dict[str, str]) -> None:
    assert step(Gsm8k(**files), "so it is <answer> 72 </answer>") == Step(done=True, answer="72")


def test_a_reply_without_tool_call_or_answer_is_a_format_error(files: dict[str, str]) -> None:
    assert step(Gsm8k(**files), "it is 72") == Step(done=True)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>\n 5 apples \n</answer> I hope", "5 apples"),
        ("<answer></answer>", None),
        ("<answer> </answer>", None),
        ("<answer>5", None),
        ("<answer>Paris</tool>", None),
        ("<answer>1</answer> or <answer>2</answer>", None),
        ("<answer><answer>5</answer>", None),
        ("<think><answer>1</answer>?</think> <answer>2</answer>", "2"),
        ("so <answer>2</answer> <think>or <answer>3</answer>", "2"),
        ("<think>it is <answer>1</answer>", None),
    ],
)
def test_one_answer_is_read_and_no_other(text: str, answer: str | None) -> None:
    assert read_answer(text) == answer


@pytest.mark.parametrize("read", [read_answer, TOOL_FORMATS["tagged"].parse])
def test_a_reply_of_answer_tags_alone_is_read_at_once(read: Callable[[str], object]) -> None:
    """Nothing else goes on while a reply is read: one that repeats itself must not cost the square of its length."""
    began = time.process_time()
    assert not read("<answer>" * 20000)
    assert time.process_time() - began < 0.3


# --- the expert ------------------------------------------------------------------------------------------------------


def demonstrated(task: Gsm8k, count: int, *, seed: int = 0, **parts: Any) -> list[Demonstration]:
    """Turns of the expert, played with the real calculator."""
    room = {"max_context_tokens": 4000, "max_output_tokens": 300, "tools": {"calculator": calculator}}
    return [turn.shown for turn in turns(task, count, seed=seed, **room, **parts)]


def taught_of(task: Gsm8k, question: str) -> list[str]:
    """The replies of the expert to a question; none if it gives up."""
    expert = task.expert(next(problem for problem in task.problems("train") if problem.question == question))
    replies = [expert.reply(()) for _ in range(3)]
    return [reply for reply in replies if reply is not None]


def test_every_mark_becomes_a_turn_and_the_answer_the_last(files: dict[str, str]) -> None:
    shown = {len(one.context): one for one in demonstrated(Gsm8k(**files), 3)}
    first = 'Natalia sold <tool>{"name": "calculator", "args": {"expression": "48/2"}}</tool>'
    second = 'Natalia sold <tool>{"name": "calculator", "args": {"expression": "48+24"}}</tool>'
    assert set(shown) == {2, 4, 6}  # system and question, then reply and result of every sum so far
    assert [shown[length].reply for length in (2, 4, 6)] == [first, second, "<answer>72</answer>"]
    assert [(m.role, m.content) for m in shown[6].context[2:]] == [
        ("assistant", first),
        ("user", "<result>24</result>"),
        ("assistant", second),
        ("user", "<result>72</result>"),
    ]


def test_the_expert_writes_the_results_so_far_where_a_condenser_requests_a_summary(files: dict[str, str]) -> None:
    condenser = PolicySummary(keep_last=1, max_tokens=79, always=True)
    shown = demonstrated(Gsm8k(**files), 4, condenser=condenser)
    (summary,) = (one for one in shown if "Write a summary" in one.context[-1].text)
    assert summary.reply == "48/2 = 24, 48+24 = 72"
    assert any(message.text == summary.reply for one in shown for message in one.context)


def test_an_answer_that_the_calculator_contradicts_and_one_without_marks_are_given_up(
    files: dict[str, str], tmp_path: Path
) -> None:
    assert {one.context[1].content for one in demonstrated(Gsm8k(**files), 20)} == {CLIPS["question"]}
    useless = Gsm8k(data=write(tmp_path / "a.jsonl", [TALK, WRONG]), eval_data=files["eval_data"])
    with pytest.raises(ConfigError, match=r"expert of the task Gsm8k: it gave up 2 training problems in a row"):
        demonstrated(useless, 1)
    with pytest.raises(ConfigError, match=r"it gave up 3 training problems"):
        demonstrated(Gsm8k(**files, tool_format="code"), 1)


def test_a_rounded_mark_is_taken_with_the_result_of_the_tool(files: dict[str, str], tmp_path: Path) -> None:
    thirds = {"question": "A third?", "answer": "One of 3 is $1/3 = $<<1/3=.33>>.33, 5 = <<5=5>>5\n#### .33"}
    task = Gsm8k(data=write(tmp_path / "a.jsonl", [thirds]), eval_data=files["eval_data"])
    shown = {one.reply: one for one in demonstrated(task, 2)}
    assert len(shown) == 2  # <<5=5>> calculates nothing and is no turn
    assert shown["<answer>.33</answer>"].context[-1].content == "<result>0.3333333333</result>"


@pytest.mark.parametrize(
    ("expression", "mark", "taught"),
    [
        ("48/2", "24", True),
        ("48/2", "24.", True),
        ("48/2", "24.0", True),
        ("100/3", "33.33", True),
        ("100/3", "33.3", True),
        ("100/3", "33", False),  # a whole number is the result or is not
        ("1000+1", "1000", False),  # though within 1 % of it
        ("2/3", ".67", True),
        ("2/3", ".66", False),  # cut off, not rounded
        ("1/8", ".13", True),  # halves go either way
        ("1/8", ".12", True),
        ("1/8", ".14", False),
        ("2/3", "0.66666666666666", True),  # more decimals than the calculator writes
        ("2-5", "-3", True),
        ("2-5", "3", False),
        ("6*7", "forty-two", False),
        ("6*7", "nan", False),
        ("6*7", "", False),
    ],
)
def test_a_mark_agrees_with_its_sum_but_for_rounding(
    tmp_path: Path, files: dict[str, str], expression: str, mark: str, taught: bool
) -> None:
    one = {"question": "How much?", "answer": f"It is <<{expression}={mark}>>, +0 is <<6*7=42>>42\n#### 42"}
    task = Gsm8k(data=write(tmp_path / "a.jsonl", [CLIPS, one]), eval_data=files["eval_data"])
    assert any(taught_of(task, "How much?")) == taught


@pytest.mark.parametrize(
    ("end", "taught"),
    [
        ("25*4 = <<25*4=100>>100\n#### 100", True),
        ("25*4 = <<25*4=100>>100\n#### $100.00", True),
        ("25*4 = <<25*4=100>>100, and with the 228 it is 328\n#### 328", False),
        ("25*4 = <<25*4=100>>100, minus 1 for himself\n#### 99", False),
        ("328 = <<300+28=328>>328, 25*4 = <<25*4=100>>100\n#### 328", False),  # not the last result
        ("$1/3 = <<1/3=.33>>.33\n#### .33", True),
        ("10/3 = <<10/3=3.33>>3.33 boxes, so 4\n#### 4", False),
    ],
)
def test_an_answer_that_is_not_the_last_result_teaches_nothing(
    tmp_path: Path, files: dict[str, str], end: str, taught: bool
) -> None:
    one = {"question": "How much?", "answer": end}
    task = Gsm8k(data=write(tmp_path / "a.jsonl", [CLIPS, one]), eval_data=files["eval_data"])
    assert any(taught_of(task, "How much?")) == taught
    assert "How much?" in {problem.question for problem in task.problems("train")}  # trained on all the same


@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_corpus_holds_all_that_is_said(files: dict[str, str], tool_format: str) -> None:
    task = Gsm8k(**files, tool_format=tool_format)
    corpus = set(task.corpus())
    assert {CLIPS["question"], "<answer>72</answer>"} <= corpus
    assert set(taught_of(task, CLIPS["question"])) <= corpus


# --- what is sound --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "sound"),
    [
        ('so <tool>{"name": "calculator", "args": {"expression": "1+1"}}</tool>', True),
        ("so <answer>2</answer>", True),
        ("so it is 2", False),
        ("", False),
        ('<tool>{"name": "calculator", "args": {"expression": "1+1"}</tool>', False),  # truncated JSON
        ('<tool>{"name": "calculator", "args": {"expression": "1+1"}}', False),  # no closing tag
        ('<tool>{"name": "calculator", "args": {"expression": 2}}</tool>', False),
        ('<tool>{"name": "calculator", "args": {"sum": "1+1"}}</tool>', False),
        ('<tool>{"name": "search", "args": {"expression": "1+1"}}</tool>', False),
        ('<tool>{"name": "calculator", "args": ["1+1"]}</tool>', False),
        ("<tool>[1]</tool>", False),
        ("<tool>" + "[" * 100_000 + "</tool>", False),
        ('<tool>{"name": "calculator", "args": {"expression": "1"}}</tool><answer>2</answer>', False),
        ('<tool>{"name": "calculator", "args": {"expression": "1"}}</tool>' * 2, False),
    ],
)
def test_sound_is_one_readable_call_or_one_answer(files: dict[str, str], reply: str, sound: bool) -> None:
    assert Gsm8k(**files).sound((), reply) is sound


def test_the_other_format_is_not_a_call(files: dict[str, str]) -> None:
    tagged = '<tool>{"name": "calculator", "args": {"expression": "1+1"}}</tool>'
    assert Gsm8k(**files, tool_format="tagged").sound((), tagged)
    assert not Gsm8k(**files, tool_format="native").sound((), tagged)


# --- the real thing -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not REAL.is_dir(), reason="the real GSM8K files are not beside this checkout (../shared/data/gsm8k)"
)
def test_the_expert_solves_the_real_files_by_calls_that_the_real_parser_reads() -> None:
    task = Gsm8k(data=str(REAL / "train.jsonl"), eval_data=str(REAL / "test.jsonl"))
    assert (len(task.problems("train")), len(task.problems("eval")), task.left_out) == (7473, 1319, 0)
    assert all(number(str(problem.answer)) is not None for problem in task.problems("train"))
    solved = [problem for problem in task.problems("train") if task.expert(problem).reply(()) is not None]
    assert len(solved) == 6878  # of 7473; 184 have no sums or sums that are wrong, 411 go on after the last
    for problem in task.problems("train")[:500]:
        for reply in taught_of(task, problem.question):
            calls = TOOL_FORMATS["tagged"].parse(reply)
            assert task.sound((), reply) is True
            assert len(calls) == 1 or reply.startswith("<answer>")
            assert all(isinstance(call, ToolCall) for call in calls)
