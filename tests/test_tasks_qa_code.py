"""The tasks search_qa and mbpp, how answers are read, follow-up questions, and ground truth from a file."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from playing_experts import turns
from recipe_world import GSM8K, HELD_OUT, HELD_OUT_TRIVIA, MBPP, TRIVIA, write

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import DataError, PluginError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.rewards.matches import passes_tests
from condensegrpo.sandbox.sandbox import Sandbox
from condensegrpo.tasks.answers import AnswerStyle, read_answer
from condensegrpo.tasks.gsm8k import CODE_SYSTEM, Gsm8k
from condensegrpo.tasks.jsonl import Jsonl
from condensegrpo.tasks.mbpp import Mbpp, entry_points
from condensegrpo.tasks.search_qa import REMINDER, SearchQa

REAL = Path(__file__).resolve().parents[2] / "shared" / "data"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real datasets are not beside this checkout (../shared/data)")


def steps(environment: Environment, *replies: str) -> list[Step]:
    async def play() -> list[Step]:
        await environment.start()
        return [await environment.step(Message(role="assistant", content=reply)) for reply in replies]

    return asyncio.run(play())


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "text", "answer"),
    [
        ("single", "<answer>1</answer>", "1"),
        ("single", "<answer>1</answer> <answer>2</answer>", None),
        ("first_or_boxed", "<answer>1</answer> <answer>2</answer>", "1"),
        ("first_or_boxed", r"\boxed{1} so \boxed{\frac{1}{2}} then", r"\frac{1}{2}"),
        ("first_or_boxed", r"<answer>3</answer> \boxed{4}", "3"),
        ("first_or_boxed", r"\boxed{1", None),
        ("last", "<answer>1</answer> <answer>2</answer>", "2"),
        ("last", "<answer> </answer>", None),
        ("last", "<answer>is <answer>Paris</answer>", "Paris"),
        ("last", "Paris", None),
        ("reply", "<think>5?</think>\nIt is 72.", "It is 72."),
        ("reply", "<think>never ends", None),
        ("reply", "  ", None),
        ("last", "<think><answer>1</answer></think>", None),
        ("first_or_boxed", r"<think>\boxed{1}</think>", None),
    ],
)
def test_an_answer_is_read_as_the_style_says(style: AnswerStyle, text: str, answer: str | None) -> None:
    assert read_answer(text, style) == answer


def test_an_unknown_style_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="the option answer_style is 'tags', wanted 'single', 'first_or_boxed'"):
        build_plugin("tasks", "search_qa", {"data": write(tmp_path / "a.jsonl", TRIVIA), "answer_style": "tags"})


# --- search_qa --------------------------------------------------------------------------------------------------------


def test_both_schemas_give_the_aliases_with_the_main_answer_first(tmp_path: Path) -> None:
    rows = [
        TRIVIA[0],
        {"question": "q2", "answers": ["Rome", "Roma", "Rome"]},
        {"question": "q3", "answer": ["Bern"]},
        {"question": "q4", "answer": "Oslo", "answers": None},
        {"question": "q5", "answer": None, "answers": ["Riga"]},
    ]
    task = SearchQa(data=write(tmp_path / "a.jsonl", rows), eval_data=write(tmp_path / "b.jsonl", HELD_OUT_TRIVIA))
    assert [(one.answer, one.data["aliases"]) for one in task.problems("train")] == [
        ("Paris", ["Paris", "City of Light"]),
        ("Rome", ["Rome", "Roma"]),
        ("Bern", ["Bern"]),
        ("Oslo", ["Oslo"]),
        ("Riga", ["Riga"]),
    ]


@pytest.mark.parametrize("row", [{"question": "q"}, {"question": "q", "answer": []}, {"question": "q", "answer": {}}])
def test_a_question_without_an_answer_names_the_row_and_both_schemas(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"row 2 has no answer\. Wanted an 'answer' with 'value'.*NQ-open.*'question'"):
        SearchQa(data=write(tmp_path / "a.jsonl", [TRIVIA[0], row]))


def test_a_reply_without_call_and_answer_is_reminded_and_the_last_answer_counts(tmp_path: Path) -> None:
    task = SearchQa(data=write(tmp_path / "a.jsonl", TRIVIA), eval_data=write(tmp_path / "b.jsonl", HELD_OUT_TRIVIA))
    environment = task.environment(task.problems("train")[0])
    first, second = steps(environment, "hm", "<answer>Rome</answer> no, <answer>Paris</answer>")
    assert (first.done, first.observations[0].content) == (False, REMINDER)
    assert (second.done, second.answer) == (True, "Paris")


@real
def test_the_questions_of_nq_open_are_read() -> None:
    task = SearchQa(data=str(REAL / "nq_open/nq-open-oracle.jsonl.gz"))
    assert len(task.problems("train")) + len(task.problems("eval")) == 2655
    assert all(one.data["aliases"] for one in task.problems("train"))


LOOKED_UP = (
    {
        "question": "where is the louvre",
        "answers": ["City of Light", "Paris"],
        "ctxs": [{"title": "Louvre", "text": "The Louvre is in Paris, on the Seine."}],
    },
    {"question": "where is the tiber", "answers": ["Rome"], "ctxs": [{"title": "Tiber", "text": "A river in Italy."}]},
    {"question": "where is the spree", "answers": ["Berlin"]},
)


def test_the_expert_searches_and_answers_from_the_result_and_gives_up_without_it(tmp_path: Path) -> None:
    def search(query: str) -> str:
        """Look it up.

        Args:
            query: what to look for.
        """
        return "[1] Louvre\nThe Louvre is in Paris, on the Seine." if "louvre" in query else "[1] Nothing"

    data, held_out = write(tmp_path / "a.jsonl", LOOKED_UP), write(tmp_path / "b.jsonl", HELD_OUT_TRIVIA)
    task = SearchQa(data=data, eval_data=held_out, system="Search.")
    made = [
        turn.shown for turn in turns(task, 8, tools={"search": search}, max_context_tokens=4000, max_output_tokens=200)
    ]
    shown = {tuple(message.content for message in one.context[1:]): one.reply for one in made}
    call = '<tool>{"name": "search", "args": {"query": "where is the louvre"}}</tool>'
    seeking = f"<reasoning>I look it up.</reasoning>\n{call}"
    result = "<result>[1] Louvre\nThe Louvre is in Paris, on the Seine.</result>"
    assert shown == {
        ("where is the louvre",): seeking,
        ("where is the louvre", seeking, result): "<reasoning>The passage says it.</reasoning>\n<answer>Paris</answer>",
    }
    assert all(task.sound((), reply) for reply in shown.values())
    assert not any(
        task.sound((), reply) for reply in ("hm", seeking * 2, seeking + "<answer>x</answer>", "<tool>{</tool>")
    )
    passage = "Louvre\nThe Louvre is in Paris, on the Seine."
    assert {"Search.", "where is the spree", passage, seeking, *shown.values()} <= set(task.corpus())


# --- mbpp -------------------------------------------------------------------------------------------------------------


def test_tasks_are_split_by_their_number_and_the_question_names_the_function(tmp_path: Path) -> None:
    task = Mbpp(data=write(tmp_path / "a.jsonl", MBPP))
    assert [one.id for one in task.problems("train")] == ["mbpp-601", "mbpp-602"]
    assert [one.id for one in task.problems("eval")] == ["mbpp-11"]
    question = task.problems("train")[0].question
    assert "Call it `add`." in question
    assert "assert add(1, 2) == 3" in question
    assert "assert add(-1, 1) == 0" not in question  # one test is shown, all of them judge
    assert len(task.problems("train")[0].data["tests"]) == 2


def test_the_code_is_asked_for_by_the_names_that_the_tests_use() -> None:
    code = "import math\nclass Pair: ...\ndef helper(): ...\ndef longest(pairs): ..."
    assert entry_points(code, ["assert longest([Pair()]) == math.inf", "assert len([]) == 0"]) == ("longest", "Pair")


def test_a_class_that_the_set_up_of_the_tests_makes_is_asked_for_too(tmp_path: Path) -> None:
    row = {
        **MBPP[1],
        "code": "class Node:\n  def __init__(self, x): self.x = x\ndef value(node): return node.x",
        "test_setup_code": "root = Node(7)",
        "test_list": ["assert value(root) == 7"],
    }
    (one,) = Mbpp(data=write(tmp_path / "a.jsonl", [row, MBPP[0]])).problems("train")
    assert one.data["entry"] == ["value", "Node"]
    with Sandbox() as sandbox:
        assert passes_tests(f"```python\n{row['code']}\n```", one, sandbox)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"test_list": []}, "row 1 lacks a description .* or tests"),
        ({"text": None}, "row 1 lacks a description"),
        ({"code": "def add(:"}, "row 1, task_id 601: its code or a test is no Python"),
        ({"test_list": ["assert ("]}, "its code or a test is no Python"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(tmp_path: Path, change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(DataError, match=wanted):
        Mbpp(data=write(tmp_path / "a.jsonl", [{**MBPP[1], **change}]))


def test_faults_of_the_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no task_id is a number among 11 to 510, the first is 601. Give eval_"):
        Mbpp(data=write(tmp_path / "c.jsonl", MBPP[1:]))
    with pytest.raises(DataError, match=r"no task_id is a number among 11 to 510, the first is '11'. Give eval_"):
        Mbpp(data=write(tmp_path / "c.jsonl", [{**MBPP[1], "task_id": "11"}]))


@real
def test_the_usual_splits_of_mbpp_have_their_sizes() -> None:
    task = Mbpp(data=str(REAL / "mbpp/mbpp.jsonl"))
    assert (len(task.problems("train")), len(task.problems("eval"))) == (374, 500)
    assert all(one.data["entry"] for one in task.problems("train"))
    validation = Mbpp(data=str(REAL / "mbpp/mbpp.jsonl"), eval_split="validation")
    assert len(validation.problems("eval")) == 90


# --- gsm8k and jsonl --------------------------------------------------------------------------------------------------


def test_further_questions_of_the_user_follow_the_answers(tmp_path: Path) -> None:
    task = Gsm8k(
        data=write(tmp_path / "a.jsonl", GSM8K), eval_data=write(tmp_path / "b.jsonl", HELD_OUT), answer_style="reply"
    )
    first, second = steps(task.environment(task.problems("train")[1]), "72", "Yes, 72.")
    assert (first.done, first.observations[0].content) == (False, "Are you sure?")
    assert (second.done, second.answer) == (True, "Yes, 72.")


def test_follow_ups_that_are_no_texts_are_named(tmp_path: Path) -> None:
    rows = [{**GSM8K[0], "follow_ups": [1]}]
    task = Gsm8k(data=write(tmp_path / "a.jsonl", rows), eval_data=write(tmp_path / "b.jsonl", HELD_OUT))
    with pytest.raises(ValueError, match="train-0: its follow_ups"):
        task.environment(task.problems("train")[0])


def test_the_code_format_explains_itself_and_its_expert_gives_up(tmp_path: Path) -> None:
    task = Gsm8k(
        data=write(tmp_path / "a.jsonl", GSM8K), eval_data=write(tmp_path / "b.jsonl", HELD_OUT), tool_format="code"
    )
    (system, _) = asyncio.run(task.environment(task.problems("train")[0]).start())
    assert system.content == CODE_SYSTEM
    assert task.expert(task.problems("train")[0]).reply(()) is None


QUESTIONS = ({"id": "a", "question": "1+1?"}, {"id": "b", "question": "2+2?"})


def jsonl(folder: Path, truths: str, *, name: str = "truth.json", rows: Sequence[Any] = QUESTIONS) -> Jsonl:
    (folder / name).write_text(truths, encoding="utf-8")
    return Jsonl(data=write(folder / "q.jsonl", rows), id="id", eval_share=0.01, ground_truth_file=str(folder / name))


@pytest.mark.parametrize(
    ("truths", "name"),
    [
        ('{"a": 2, "b": ["4", "four"]}', "truth.json"),
        ('{"id": "a", "answer": 2}\n{"id": "b", "answer": ["4", "four"]}\n', "truth.jsonl"),
    ],
)
def test_ground_truth_may_come_from_a_file_by_id(tmp_path: Path, truths: str, name: str) -> None:
    first, second = jsonl(tmp_path, truths, name=name).problems("train")
    assert first.answer == "2"
    assert (second.answer, second.data["aliases"]) == ("4", ["4", "four"])


@pytest.mark.parametrize(
    ("truths", "name", "wanted"),
    [
        ('{"a": 2}', "t.json", "it has no answer for 1 problems, the first is 'b'"),
        ('{"id": "a"}\n', "t.jsonl", "row 1 has no column 'answer'"),
        ('{"id": "a", "answer": 1}\n{"id": "a", "answer": 2}\n', "t.jsonl", "the same id 'a'"),
        ('{"a": 2, "b"', "t.json", "line 1"),
        ("", "t.jsonl", "is empty"),
    ],
)
def test_what_is_wrong_with_a_ground_truth_file_is_said(tmp_path: Path, truths: str, name: str, wanted: str) -> None:
    with pytest.raises(DataError, match=wanted):
        jsonl(tmp_path, truths, name=name)


def test_a_ground_truth_file_cannot_answer_two_problems_of_one_id(tmp_path: Path) -> None:
    """The held-out problem was judged by the answer of the other."""
    data, held_out = ([{"question": f"{split} 0", "id": 0}] for split in ("train", "eval"))
    with pytest.raises(DataError, match="the id '0' names a training and a held-out problem"):
        Jsonl(
            data=write(tmp_path / "a.jsonl", data),
            eval_data=write(tmp_path / "b.jsonl", held_out),
            id="id",
            ground_truth_file=write(tmp_path / "t.jsonl", [{"id": 0, "answer": "T0"}]),
        )


def test_a_ground_truth_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"reading the ground truth .*none.json: there is no such file"):
        Jsonl(data=write(tmp_path / "q.jsonl", QUESTIONS), id="id", ground_truth_file=str(tmp_path / "none.json"))
