"""Reads the memory questions of BFCL v4 (Apache-2.0): what a user said in five scenarios, and questions about it.

    BFCL_v4_memory.json                         a question a line: id, scenario, question
    possible_answer/BFCL_v4_memory.json         its answers, by id
    memory_prereq_conversation/memory_*.json    the user's messages of a scenario, a conversation a line

The files are in the wheel of the package bfcl-eval, which need not be installed.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from condensegrpo.core.errors import DataError
from condensegrpo.storage.bfcl import PACKAGE, bfcl_folder, bfcl_rows

QUESTIONS = "BFCL_v4_memory.json"
Match = Literal["words", "substring"]
_PLACEHOLDER = re.compile(r"\[(?:\d+ )?turns? [^\[\]]* omitted[^\[\]]*\]")  # its numbers are no answers
_IGNORED = str.maketrans("'", '"', ",./-_*^()")  # as BFCL's own checker


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
        """The questions of some scenarios."""
        if unknown := [name for name in scenarios if name not in self.messages]:
            raise DataError(f"choosing scenarios: found no {', '.join(unknown)}; there are {', '.join(self.messages)}")
        return MemoryQuestions(
            questions=tuple(each for each in self.questions if each.scenario in scenarios),
            messages={name: self.messages[name] for name in scenarios},
        )


def read_memory_questions(source: Path | None = None) -> MemoryQuestions:
    """The benchmark in a folder, in a wheel of bfcl-eval, or by default in the installed package."""
    folder = bfcl_folder(QUESTIONS, source)
    answers = {str(row["id"]): row for row in bfcl_rows(folder / "possible_answer" / QUESTIONS, "id", "ground_truth")}
    messages: dict[str, tuple[str, ...]] = defaultdict(tuple)
    files = (file for file in (folder / "memory_prereq_conversation").iterdir() if file.name.endswith(".json"))
    for file in sorted(files, key=lambda file: file.name):
        for row in bfcl_rows(file, "scenario", "question"):
            messages[row["scenario"]] += tuple(message["content"] for turn in row["question"] for message in turn)
    rows = bfcl_rows(folder / QUESTIONS, "id", "scenario", "question")
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
