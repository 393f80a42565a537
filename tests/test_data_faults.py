"""Damaged and strange data: every task says what is wrong, in which file and where, and reads all that can be read."""

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import trajectory, turn
from datasets import Dataset, DatasetDict
from recipe_world import GSM8K, HELD_OUT, HELD_OUT_TRIVIA, MBPP, TRIVIA
from tiny import qwen3, tokenizer

from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.protocols.task import Problem, Task
from condensegrpo.learner.model_folder import configuration, in_main_memory, load_policy, load_tokenizer, write_policy
from condensegrpo.rewards.outcome import Correct
from condensegrpo.tasks.answers import fold
from condensegrpo.tasks.gsm8k import Gsm8k
from condensegrpo.tasks.jsonl import Jsonl
from condensegrpo.tasks.mbpp import Mbpp
from condensegrpo.tasks.search_qa import SearchQa

Rows = list[dict[str, Any]]


def lines(rows: Rows, *, end: str = "\n") -> bytes:
    return "".join(json.dumps(row) + end for row in rows).encode()


def put(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


FLAT = [{"question": row["question"], "answer": "1,080"} for row in GSM8K]
TASKS: dict[str, tuple[Callable[..., Task], Rows, Rows, str]] = {  # how it is built, its rows, held-out rows, a column
    "gsm8k": (Gsm8k, list(GSM8K), list(HELD_OUT), "question"),
    "search_qa": (SearchQa, list(TRIVIA), list(HELD_OUT_TRIVIA), "question"),
    "mbpp": (Mbpp, list(MBPP[1:]), [MBPP[0]], "test_list"),
    "jsonl": (Jsonl, FLAT, [{"question": "else?", "answer": "1"}], "question"),
}
ALL = pytest.mark.parametrize("name", TASKS)


def built(name: str, folder: Path, data: bytes, *, suffix: str = ".jsonl", **options: Any) -> Task:
    make, _, held_out, _ = TASKS[name]
    return make(
        data=put(folder / f"train{suffix}", data), eval_data=put(folder / "held_out.jsonl", lines(held_out)), **options
    )


@ALL
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    """What else may be wrong with a file: test_jsonl.py."""
    with pytest.raises(DataError, match=r"train.jsonl, line \d: the last line is cut off"):
        built(name, tmp_path, lines(TASKS[name][1])[:-9])


@ALL
def test_a_missing_column_is_named_with_those_that_exist(tmp_path: Path, name: str) -> None:
    _, rows, _, column = TASKS[name]
    spoilt = [*rows[:1], {("q" if key == column else key): value for key, value in rows[1].items()}]
    with pytest.raises(DataError, match=rf"row 2 has no column '{column}'\. It has: .*'q'"):
        built(name, tmp_path, lines(spoilt))


@ALL
def test_faults_of_the_held_out_file_are_told_before_training(tmp_path: Path, name: str) -> None:
    make, rows, _, _ = TASKS[name]
    with pytest.raises(DataError, match=r"held_out\.jsonl: it is empty"):
        make(data=put(tmp_path / "train.jsonl", lines(rows)), eval_data=put(tmp_path / "held_out.jsonl", b""))


@pytest.mark.parametrize(
    "data",
    [
        lines(FLAT),
        lines(FLAT, end="\r\n"),
        b"\xef\xbb\xbf" + lines(FLAT),
        gzip.compress(lines(FLAT)),
        lines(FLAT)[:-1],
        lines(FLAT, end="\n\n \n"),
    ],
    ids=["unix", "dos", "byte order mark", "gzip", "no last line end", "blank lines"],
)
def test_what_only_looks_strange_is_read_whole(tmp_path: Path, data: bytes) -> None:
    task = built("jsonl", tmp_path, data)
    assert [problem.question for problem in task.problems("train")] == [row["question"] for row in FLAT]


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path: Path) -> None:
    train, test = Dataset.from_list(FLAT), Dataset.from_list([{"question": "else?", "answer": "1"}])
    train.save_to_disk(tmp_path / "one")
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "several")
    DatasetDict(validation=test).save_to_disk(tmp_path / "other")
    one, several, other = (str(tmp_path / name) for name in ("one", "several", "other"))
    both, alone = Jsonl(data=several, eval_data=several), Jsonl(data=one, eval_data=f"{several}/test")
    assert both.problems("train") == alone.problems("train")
    assert [problem.question for problem in both.problems("eval")] == ["else?"]
    with pytest.raises(DataError, match=r"it has no split 'test'\. Give the folder of one: .*other/validation"):
        Jsonl(data=one, eval_data=other)
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match=r"one: FileNotFoundError: .*Is the folder whole"):
        Jsonl(data=one)


def test_ids_that_occur_twice_are_named_where_rows_have_ids(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows 1 and 2 have the same task_id '601'"):
        built("mbpp", tmp_path, lines([MBPP[1], MBPP[1]]))
    with pytest.raises(DataError, match="rows 1 and 3 have the same id 'a'"):
        built("jsonl", tmp_path, lines([{**row, "id": key} for row, key in zip(FLAT, "aba", strict=True)]), id="id")


@ALL
def test_a_problem_id_names_one_problem(tmp_path: Path, name: str) -> None:
    task = built(name, tmp_path, lines(TASKS[name][1]))
    everybody = [*task.problems("train"), *task.problems("eval")]
    assert len({problem.id for problem in everybody}) == len(everybody)


@ALL
def test_no_question_is_in_both_splits_however_it_is_written(tmp_path: Path, name: str) -> None:
    """Case and white space make no other question."""
    make, rows, held_out, _ = TASKS[name]
    key = "text" if name == "mbpp" else "question"
    twins = [{**row, key: f"  {row[key].upper()} \n"} for row in held_out]
    if name == "mbpp":
        twins = [{**row, "task_id": 900} for row in twins]
    task = make(
        data=put(tmp_path / "train.jsonl", lines([*rows, *twins])),
        eval_data=put(tmp_path / "held_out.jsonl", lines(held_out)),
    )
    train, held = ({fold(one.question) for one in task.problems(split)} for split in ("train", "eval"))
    assert not train & held
    assert (len(task.problems("train")), task.left_out) == (len(rows), len(twins))
    with pytest.raises(DataError, match=r"all \d+ questions are held out"):
        make(data=str(tmp_path / "held_out.jsonl"), eval_data=str(tmp_path / "held_out.jsonl"))


@pytest.mark.parametrize("name", ["search_qa", "jsonl"])
def test_a_share_held_out_is_the_same_questions_in_any_order(tmp_path: Path, name: str) -> None:
    make, rows, _, _ = TASKS[name]
    many = [{**rows[0], "question": f"question {number}?"} for number in range(60)]
    tasks = [
        make(data=put(tmp_path / f"{at}.jsonl", lines(order)), eval_share=0.3)
        for at, order in enumerate((many, many[::-1], [*many, *({**row} for row in many[:9])]))
    ]
    held = [{one.question for one in task.problems("eval")} for task in tasks]
    assert held[0] == held[1] == held[2]
    assert 8 <= len(held[0]) <= 28
    assert not any(held[0] & {one.question for one in task.problems("train")} for task in tasks)


@pytest.mark.parametrize("name", ["gsm8k", "search_qa", "jsonl"])
def test_a_question_of_a_megabyte_is_read_and_asked_whole(tmp_path: Path, name: str) -> None:
    _, rows, _, _ = TASKS[name]
    long = "why " * 250_000 + "?"
    task = built(name, tmp_path, lines([{**rows[0], "question": long}, *rows[1:]]))
    head = asyncio.run(task.environment(task.problems("train")[0]).start())
    assert head[-1].content == long


@pytest.mark.parametrize(
    ("truth", "answer", "worth"),
    [("1,080", "1080", 1.0), ("1080", "$1,080.00", 1.0), ("1,080", "1.08", 0.0), ("12,345,678", "12345678", 1.0)],
)
def test_thousands_separators_make_no_other_number(truth: str, answer: str, worth: float) -> None:
    one = trajectory(turn([1], [2]), answer=answer)
    problem = Problem(id="p", question="?", answer=truth)
    assert Correct(match="number")(one, problem).total == worth
    assert Correct(match="last_number")(one, problem).total == worth
    assert Correct(match="math")(one, problem).total == worth


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, made = tmp_path_factory.mktemp("m") / "model", qwen3()
    write_policy(folder, made.config, in_main_memory(made.named_parameters()), tokenizer=tokenizer())
    return folder


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"<!DOCTYPE html>\n<html>Sign in</html>", "it is a web page, not data"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "it is a Git LFS pointer"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_page_or_a_pointer_in_place_of_a_models_file_is_named(
    tmp_path: Path, model: Path, file: str, content: bytes, wanted: str
) -> None:
    for source in model.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / file).write_bytes(content)
    for read in (configuration, load_tokenizer, lambda path: load_policy(path, dtype="float32")):
        with pytest.raises(ConfigError, match=rf"{file}: {wanted}"):
            read(str(tmp_path))
