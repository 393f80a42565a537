"""Short Python functions by a description (https://arxiv.org/abs/2108.07732), judged by asserts in the sandbox.

The usual split by ``task_id``: 1 to 10 are prompts, 11 to 510 test, 511 to 600 validation, 601 to 974 training. The
question names the function under test, which the description alone does not.
"""

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from condensegrpo.core.errors import DataError
from condensegrpo.core.protocols.task import Problem
from condensegrpo.storage.rows import Row, check_rows, read_rows
from condensegrpo.tasks.answers import AnswerStyle, QuestionTask, split

SYSTEM = (
    "Write the Python function that is asked for. You may use tools to try it out. End with the whole function in one "
    "```python fenced block."
)
TRAIN, VALIDATION, TEST = range(601, 975), range(511, 601), range(11, 511)
TESTS, SETUP, ENTRY = "tests", "test_setup", "entry"  # in Problem.data


@dataclass(kw_only=True, eq=False)
class Mbpp(QuestionTask):
    """Short Python functions (MBPP), judged by their asserts in the sandbox.

    Training descriptions that are in the evaluation data too are left out.

    Rows have ``task_id``, ``text`` (or ``prompt``), ``code`` and ``test_list``.
    """

    data: str  # one file of all tasks, which is split by ``task_id``; or training rows, if there is ``eval_data``
    eval_data: str | None = None  # held-out rows
    eval_split: Literal["test", "validation"] = "test"  # held out; of a Hub dataset or a folder, the one that is read
    system: str = SYSTEM  # the system message; empty for none
    answer_style: AnswerStyle = "reply"  # how an answer is read from a reply, see ``answers.read_answer``
    shown_tests: Annotated[int, Ge(0)] = 1  # asserts that the question shows; all of them judge
    challenge: bool = False  # whether the rows' ``challenge_test_list`` judges too

    def __post_init__(self) -> None:
        train = self._read(read_rows(self.data, split="train"), self.data)
        if self.eval_data is None:
            held_out = _of(train, TEST if self.eval_split == "test" else VALIDATION, self.data)
            train = _of(train, TRAIN, self.data)
        else:
            held_out = self._read(read_rows(self.eval_data, split=self.eval_split), self.eval_data)
        self._splits = split(train, held_out, source=self.data)

    def _read(self, rows: Sequence[Row], source: str) -> tuple[Problem, ...]:
        check_rows(rows, ("task_id", "code", "test_list"), source=source, texts=["code"], unique="task_id")
        return tuple(self._problem(row, number, source) for number, row in enumerate(rows, start=1))

    def _problem(self, row: Row, number: int, source: str) -> Problem:
        text, shown = row.get("text", row.get("prompt")), list(row["test_list"] or ())
        task_id, code = row["task_id"], row["code"]
        tests = shown + list((row.get("challenge_test_list") or ()) if self.challenge else ())
        if not isinstance(text, str) or not tests:
            raise DataError(
                f"reading the dataset {source}: row {number} lacks a description ('text' or 'prompt') or tests "
                f"('test_list'). It has: {', '.join(map(repr, row))}"
            )
        setup = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]).strip()
        try:
            names = entry_points(code, [*tests, setup])
        except (SyntaxError, ValueError, TypeError) as error:
            raise DataError(
                f"reading the dataset {source}: row {number}, task_id {task_id}: its code or a test is no "
                f"Python ({error})"
            ) from error
        columns = {"task_id": task_id, "code": code, "follow_ups": row.get("follow_ups")}
        question = f"{text.strip()} Call it {' and '.join(f'`{name}`' for name in names)}." if names else text.strip()
        if examples := "\n".join(shown[: self.shown_tests]):
            question += f"\nIt must pass tests such as:\n{examples}"
        return Problem(
            id=f"mbpp-{task_id}",
            question=question,
            answer=code,
            data={**columns, TESTS: tests, SETUP: setup, ENTRY: list(names)},
        )


def entry_points(code: str, tests: Sequence[str]) -> tuple[str, ...]:
    """The functions and classes of a solution that its tests and their set-up use, in the order of their use.

    >>> entry_points("def helper(): ...\\ndef add(a, b): ...", ["assert add(1, 2) == 3"])
    ('add',)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of solutions that write '\\w'
        tree, calls = ast.parse(code), [ast.parse(test) for test in tests]
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = (node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name))
    return tuple(dict.fromkeys(name for name in used if name in defined))


def _of(problems: Sequence[Problem], numbers: range, source: str) -> tuple[Problem, ...]:
    chosen = tuple(problem for problem in problems if problem.data["task_id"] in numbers)
    if not chosen:
        raise DataError(
            f"splitting {source}: no task_id is a number among {numbers.start} to {numbers.stop - 1}, the first is "
            f"{problems[0].data['task_id']!r}. Give eval_data, then nothing is split"
        )
    return chosen
