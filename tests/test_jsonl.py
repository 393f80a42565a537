"""Reading rows of any kind, and the generic task over them."""

import asyncio
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import DataError, PluginError
from condensegrpo.core.messages import Message
from condensegrpo.storage.rows import read_rows
from condensegrpo.tasks.answers import is_held_out
from condensegrpo.tasks.jsonl import SYSTEM, Jsonl

ROWS: list[dict[str, Any]] = [{"question": f"What is {n} and {n}?", "answer": 2 * n} for n in range(40)]
REAL = Path(__file__).resolve().parents[2] / "shared" / "data"


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def lines(*rows: Mapping[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_new_model_knows_the_words_of_the_rows(tmp_path: Path) -> None:
    rows = [{"question": "one?", "answer": "1"}, {"question": "two?", "answer": ["2", "ii"]}]
    task = Jsonl(data=write(tmp_path / "a.jsonl", lines(*rows)), eval_data=write(tmp_path / "b.jsonl", lines(*ROWS)))
    said = [SYSTEM, "one?", "<answer>1</answer>", "two?", "<answer>2</answer>", "<answer>ii</answer>"]
    assert list(task.corpus()) == said


# --- rows that are read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\n{"a": 2}\n',
        '{"a": 1}\r\n{"a": 2}\r\n',
        '{"a": 1}\n\n{"a": 2}',
        '\ufeff{"a": 1}\n{"a": 2}\n',
    ],
    ids=["plain", "crlf", "blank line, no last line break", "byte order mark"],
)
def test_a_jsonl_file_has_a_row_a_line(tmp_path: Path, text: str) -> None:
    assert read_rows(write(tmp_path / "a.jsonl", text), split="train") == [{"a": 1}, {"a": 2}]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    text = '{"a": "one\u2028two\x85three"}\n'
    assert read_rows(write(tmp_path / "a.jsonl", text), split="train") == [{"a": "one\u2028two\x85three"}]


def test_parquet_is_read(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": ["x", "y"]}, {"a": 2, "b": []}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(str(tmp_path / "a.parquet"), split="train") == rows


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(*ROWS))
    assert read_rows(path, split="train", limit=2) == ROWS[:2]
    with pytest.raises(PluginError, match="the option max_examples is 0, wanted at least 1"):
        build_plugin("tasks", "jsonl", {"data": path, "max_examples": 0})


def test_of_a_folder_the_files_of_the_split_are_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train-00001.jsonl", '{"a": 2}\n')
    write(tmp_path / "train-00000.jsonl", '{"a": 1}\n')
    write(tmp_path / "test.jsonl", '{"a": 3}\n')
    write(tmp_path / "train.md", "not data")
    assert read_rows(str(tmp_path), split="train") == [{"a": 1}, {"a": 2}]
    assert read_rows(str(tmp_path), split="test") == [{"a": 3}]


# --- rows that cannot be read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty, wanted at least one row"),
        (b"\n\n", "it is empty"),
        (b'{"a": 1}\n{"a": ', r"line 2: the last line is cut off"),
        (b'{"a": 1}\n{"a": "\xc3', r"line 2: byte 8 of it is not UTF-8"),
        (b'{"a": 1}\n{a: 2}\n{"a": 3}\n', r"line 2: it is not JSON \(Expecting property name.*at character 2\)"),
        (b'[{"a": 1}]\n', r"line 1: found a list, wanted one JSON object a line"),
        ('{"a": "caf\u00e9"}\n'.encode("latin-1"), r"line 1: byte 11 of it is not UTF-8. Convert"),
        ('{"a": 1}\n'.encode("utf-16"), r"line 1: byte 1 of it is not UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html>\n<html></html>\n", "it is a web page, not data"),
        (b"\n  <html><body>Not found</body></html>", "it is a web page, not data"),
        (b"\x1f\x8bnot gzip at all", "Is the file whole and readable"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path / "a.jsonl", content)
    with pytest.raises(DataError, match=message) as raised:
        read_rows(path, split="train")
    assert path in str(raised.value)


def test_a_gzip_file_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": 1}\n' * 100)
    with pytest.raises(DataError, match="Is the file whole"):
        read_rows(write(tmp_path / "a.jsonl.gz", whole[:-12]), split="train")


def test_a_damaged_parquet_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: it is not a whole Parquet file"):
        read_rows(write(tmp_path / "a.parquet", b"PAR1 and then nothing"), split="train")


def test_a_pointer_in_place_of_a_parquet_file_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Git LFS pointer"):
        read_rows(write(tmp_path / "a.parquet", b"version https://git-lfs.github.com/spec/v1\n"), split="train")


@pytest.mark.parametrize("source", ["./data", "../a/b", "data/train.jsonl", "train.parquet", "a/b/c", "/data", "~/x"])
def test_a_path_that_does_not_exist_is_never_asked_of_the_hub(source: str) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        read_rows(source, split="train")


def test_a_folder_without_the_split_lists_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "dev.jsonl", '{"a": 1}\n')
    with pytest.raises(DataError, match=r"begins with 'train'. Found: dev\.jsonl"):
        read_rows(str(tmp_path), split="train")


# --- the task -------------------------------------------------------------------------------------------------------


def test_questions_are_split_by_their_hash_when_there_is_no_evaluation_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(*ROWS))
    backwards = write(tmp_path / "b.jsonl", lines(*reversed(ROWS)))
    task, other = Jsonl(data=path, eval_share=0.3), Jsonl(data=backwards, eval_share=0.3)
    train, held_out = task.problems("train"), task.problems("eval")
    assert len(train) + len(held_out) == 40
    assert 4 <= len(held_out) <= 20
    assert not {p.question for p in train} & {p.question for p in held_out}
    assert {p.question for p in held_out} == {p.question for p in other.problems("eval")}


def test_a_question_with_half_an_emoji_has_a_split(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"question": "{n} \\ud83d?", "answer": "1"}}\n' for n in range(40)), encoding="ascii")
    task = Jsonl(data=str(file))
    assert len(task.problems("train")) + len(task.problems("eval")) == 40


def test_the_share_held_out_is_the_share_asked_for() -> None:
    assert sum(is_held_out(f"question {n}", share=0.1) for n in range(5000)) == pytest.approx(500, abs=80)
    assert is_held_out(" A  question", share=0.5) == is_held_out("a question", share=0.5)


def test_columns_are_mapped_and_the_rest_of_the_row_is_kept(tmp_path: Path) -> None:
    row = {"text": "Who?", "gold": 7, "key": "k1", "level": "easy"}
    other = {"text": "Where?", "gold": "here", "key": "k2"}
    data, held_out = write(tmp_path / "a.jsonl", lines(row)), write(tmp_path / "b.jsonl", lines(other))
    task = Jsonl(data=data, eval_data=held_out, question="text", answer="gold", id="key")
    (problem,) = task.problems("train")
    assert (problem.id, problem.question, problem.answer) == ("k1", "Who?", "7")
    assert problem.data["level"] == "easy"
    assert [problem.id for problem in task.problems("eval")] == ["k2"]


def test_a_list_of_answers_gives_the_aliases(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", lines({"question": "Who?", "answer": ["Ann", "Anna"]}))
    held_out = write(tmp_path / "b.jsonl", lines(*ROWS))
    (problem,) = Jsonl(data=data, eval_data=held_out).problems("train")
    assert problem.answer == "Ann"
    assert problem.data["aliases"] == ["Ann", "Anna"]


def test_missing_values_are_no_answers(tmp_path: Path) -> None:
    rows = [
        {**ROWS[0], "answer": value} for value in (float("nan"), None, [float("nan"), "Ann"], [None])
    ]  # as pandas writes
    data = write(tmp_path / "a.jsonl", lines(*({**row, "question": f"{n}?"} for n, row in enumerate(rows))))
    problems = Jsonl(data=data, eval_data=write(tmp_path / "b.jsonl", lines(*ROWS))).problems("train")
    assert [problem.answer for problem in problems] == [None, None, "Ann", None]
    assert problems[2].data["aliases"] == ["Ann"]


def test_an_integer_column_with_a_gap_has_integers_for_truths(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate((2.0, None, 1.5, -3.0, 1e300))]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    held_out = write(tmp_path / "b.jsonl", lines(*ROWS))
    problems = Jsonl(data=str(tmp_path / "a.parquet"), eval_data=held_out).problems("train")
    assert [problem.answer for problem in problems] == ["2", None, "1.5", "-3", str(int(1e300))]


@pytest.mark.parametrize("truth", [{"value": "2"}, [{"value": "2"}], [["2"]]])
def test_a_column_of_dicts_is_no_ground_truth(tmp_path: Path, truth: object) -> None:
    data = write(tmp_path / "a.jsonl", lines(ROWS[0], {"question": "?", "gold": truth, "answer": truth}))
    with pytest.raises(
        DataError, match=rf"row 2 has the answer {re.escape(repr(truth))}, wanted a text.*options.answer"
    ):
        Jsonl(data=data)
    held_out = write(tmp_path / "b.jsonl", lines(*ROWS[5:6]))
    answers = [("train-0", "4"), ("train-1", truth), ("test-0", "1")]
    by_id = write(tmp_path / "truths.jsonl", lines(*({"id": id_, "answer": answer} for id_, answer in answers)))
    with pytest.raises(DataError, match=rf"truths\.jsonl: it has the answer {re.escape(repr(truth))}, wanted a text"):
        Jsonl(data=data, eval_data=held_out, ground_truth_file=by_id)


def test_questions_without_ground_truth_have_none(tmp_path: Path) -> None:
    data, held_out = (
        write(tmp_path / "a.jsonl", lines({"q": "Who?"})),
        write(tmp_path / "b.jsonl", lines({"q": "Why?"})),
    )
    (problem,) = Jsonl(data=data, eval_data=held_out, question="q", answer=None).problems("train")
    assert problem.answer is None


REPOSITORIES = [{"question": "Make the tests pass.", "repo": f"repo-{n}", "answer": str(n)} for n in range(40)]


def test_rows_with_one_question_and_another_column_are_different_problems(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", lines(*REPOSITORIES))
    shared = Jsonl(data=data, eval_share=0.3)
    assert 4 <= len(shared.problems("eval")) <= 20
    assert len(shared.problems("train")) == 40 - len(shared.problems("eval")) == shared.alike
    assert shared.left_out == 0
    again = {**REPOSITORIES[3], "question": " make the TESTS pass."}
    other = {**REPOSITORIES[3], "repo": "another"}
    task = Jsonl(data=data, eval_data=write(tmp_path / "b.jsonl", lines(again, other)))
    assert [problem.answer for problem in task.problems("train")] == [str(n) for n in range(40) if n != 3]
    assert (task.left_out, task.alike) == (1, 39)


def test_a_column_that_is_null_is_as_one_that_is_missing(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", lines(*ROWS))
    task = Jsonl(data=data, eval_data=write(tmp_path / "b.jsonl", lines({**ROWS[0], "hint": None})))
    assert (task.left_out, task.alike) == (1, 0)


def test_faults_of_the_columns_are_said_before_anything_runs(tmp_path: Path) -> None:
    twice = write(tmp_path / "a.jsonl", lines({"q": "a", "n": 1}, {"q": "b", "n": 1}))
    with pytest.raises(DataError, match=r"row 1 has no column 'question'. It has: 'q', 'n'"):
        Jsonl(data=twice, answer=None)
    with pytest.raises(PluginError, match="the option eval_share is 1, wanted less than 1"):
        build_plugin("tasks", "jsonl", {"data": twice, "eval_share": 1})


@pytest.mark.parametrize(
    ("question", "found"),
    [(None, "None"), (["x"], "['x']"), ({"a": 1}, "{'a': 1}"), ("", "''"), (" ", "' '"), (7, "7")],
)
def test_a_question_that_is_no_text_is_named_with_its_row(tmp_path: Path, question: object, found: str) -> None:
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": question, "answer": "2"}]
    data = write(tmp_path / "questions.jsonl", lines(*rows))
    with pytest.raises(DataError, match=re.escape(f"{data}: row 2 has the question {found}, wanted a text")):
        Jsonl(data=data)


def test_an_episode_is_one_answer(tmp_path: Path) -> None:
    task = Jsonl(data=write(tmp_path / "a.jsonl", lines(*ROWS)))
    environment = task.environment(task.problems("train")[0])
    system, question = asyncio.run(environment.start())
    assert (system.role, system.content, question.role) == ("system", SYSTEM, "user")
    assert asyncio.run(environment.step(Message(role="assistant", content="<answer>4</answer>"))).answer == "4"
    (alone,) = asyncio.run(replace(task, system="").environment(task.problems("train")[0]).start())
    assert alone.role == "user"


@pytest.mark.skipif(not REAL.is_dir(), reason="the real datasets are not beside this checkout (../shared/data)")
def test_real_questions_with_aliases_are_read() -> None:
    task = Jsonl(data=str(REAL / "nq_open" / "nq-open-oracle.jsonl.gz"), answer="answers")
    assert len(task.problems("train")) + len(task.problems("eval")) == 2655
    assert all(problem.answer in problem.data["aliases"] for problem in task.problems("train"))
