"""Reads the memory questions of BFCL v4 (Apache-2.0): what a user said in five scenarios, and questions about it.

    BFCL_v4_memory.json                         a question a line: id, scenario, question
    possible_answer/BFCL_v4_memory.json         its answers, by id
    memory_prereq_conversation/memory_*.json    the user's messages of a scenario, a conversation a line

The files are in the wheel of the package bfcl-eval, which need not be installed.
"""

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from condensegrpo.core.errors import DataError, DataMissing

PACKAGE = "bfcl-eval==2026.3.23"
QUESTIONS = "BFCL_v4_memory.json"
FOLDERS = (".", "bfcl_eval/data", "data")  # where the files may be, below what the user names
Match = Literal["words", "substring"]
_PLACEHOLDER = re.compile(r"\[(?:\d+ )?turns? [^\[\]]* omitted[^\[\]]*\]")  # its numbers are no answers
_IGNORED = str.maketrans("'", '"', ",./-_*^()")  # as BFCL's own checker
_Place = Path | zipfile.Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """A question about what a user said."""

    id: str
    scenario: str
    question: str
    answers: tuple[str, ...]  # spellings of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestions:
    """The questions, and the user's messages of each scenario, in order."""

    questions: tuple[MemoryQuestion, ...]
    messages: Mapping[str, tuple[str, ...]]

    def of(self, scenarios: Sequence[str]) -> "MemoryQuestions":
        """The questions of some scenarios.

        Raises:
            DataError: there is no such scenario.
        """
        if unknown := [name for name in scenarios if name not in self.messages]:
            raise DataError(f"choosing scenarios: found no {', '.join(unknown)}; there are {', '.join(self.messages)}")
        return MemoryQuestions(
            questions=tuple(each for each in self.questions if each.scenario in scenarios),
            messages={name: self.messages[name] for name in scenarios},
        )


def read_memory_questions(source: Path | None = None) -> MemoryQuestions:
    """The benchmark in a folder, in a wheel of bfcl-eval, or by default in the installed package.

    Raises:
        DataMissing: it is not there.
        DataError: a file is damaged or lacks something.
    """
    folder = _folder(source)
    answers = {str(row["id"]): row for row in _rows(folder / "possible_answer" / QUESTIONS, "id", "ground_truth")}
    messages: dict[str, tuple[str, ...]] = defaultdict(tuple)
    files = (file for file in (folder / "memory_prereq_conversation").iterdir() if file.name.endswith(".json"))
    for file in sorted(files, key=lambda file: file.name):
        for row in _rows(file, "scenario", "question"):
            messages[row["scenario"]] += tuple(message["content"] for turn in row["question"] for message in turn)
    rows = _rows(folder / QUESTIONS, "id", "scenario", "question")
    for row in rows:
        if row["id"] not in answers or row["scenario"] not in messages:
            lacking = "answer" if row["id"] not in answers else f"conversation of the scenario {row['scenario']!r}"
            raise DataError(f"reading the memory questions in {folder}: {row['id']} has no {lacking}. Fetch {PACKAGE}")
    questions = tuple(
        MemoryQuestion(
            id=row["id"],
            scenario=row["scenario"],
            question=row["question"][0][-1]["content"],
            answers=tuple(map(str, answers[row["id"]]["ground_truth"])),
        )
        for row in rows
    )
    return MemoryQuestions(questions=questions, messages=dict(messages))


def contains_answer(answers: Iterable[str], text: str, match: Match = "words") -> bool:
    """Whether one of the answers is in a text, whatever its case and punctuation.

    ``words`` asks for whole words, as BFCL's own checker; ``substring`` finds 35 in 135 too. Placeholders do not count.
    """
    plain = _plain(_PLACEHOLDER.sub(" ", text))
    edge = r"\b" if match == "words" else ""
    return any(re.search(f"{edge}{re.escape(_plain(answer))}{edge}", plain) for answer in answers)


def _plain(text: str) -> str:
    return text.translate(_IGNORED).lower()


def _folder(source: Path | None) -> _Place:
    """The folder that has the files, also inside a wheel."""
    roots: list[_Place] = []
    if source is None:
        spec = find_spec("bfcl_eval")
        roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    elif source.is_dir():
        roots = [source]
    elif zipfile.is_zipfile(source):
        roots = [zipfile.Path(source)]
    for place in (root / folder if folder != "." else root for root in roots for folder in FOLDERS):
        if (place / QUESTIONS).is_file():
            return place
    looked = "the package bfcl_eval is not installed" if source is None else f"{source} has no {QUESTIONS}"
    raise DataMissing(
        f"reading BFCL's memory questions: {looked}. Run `pip download --no-deps {PACKAGE}` and name the wheel with "
        f"--data, or install it: `pip install --no-deps {PACKAGE}`"
    )


def _rows(file: _Place, *columns: str) -> list[dict[str, Any]]:
    """The rows of a file, each with these columns."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"reading the memory questions in {file}: {error}. Fetch {PACKAGE} again") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not all(row.get(column) for column in columns):
            raise DataError(f"reading {file}: row {number} lacks one of {', '.join(columns)}. Fetch {PACKAGE} again")
    return rows
