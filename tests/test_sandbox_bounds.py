"""The table of docs/explanation/sandbox.md is true: for each row and backend a program tries to get more."""

import asyncio
import json

import bounds
import pytest
from confined import BACKENDS, ROOT, USERS, needs, printed_by_nobody

PAGE = ROOT / "docs" / "explanation" / "sandbox.md"
HEADER = "| code that tries to get | `namespaces` | `landlock` | `none` |"


def promised() -> dict[str, dict[str, str]]:
    """The cells of the table by backend and by row."""
    lines = PAGE.read_text(encoding="utf-8").partition(HEADER)[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: {row[0]: row[column] for row in rows} for column, name in enumerate((*BACKENDS, "none"), start=1)}


def test_the_table_has_a_row_for_every_attempt_and_uses_the_words_that_it_explains() -> None:
    for cells in promised().values():
        assert list(cells) == list(bounds.ATTEMPTS)
        assert set(cells.values()) <= {"refused", "capped", "ended", "not bounded"}


@pytest.mark.parametrize(("isolation", "user"), [*zip(BACKENDS, USERS, strict=True)])
def test_what_code_gets_is_what_the_table_says(isolation: str, user: str) -> None:
    needs(isolation, user)
    if user == "current user":
        results = {
            name: bounds.observed(name, result) for name, result in asyncio.run(bounds.run_all(isolation)).items()
        }
    else:
        results = json.loads(printed_by_nobody("bounds.py", isolation))
    assert results == promised()[isolation]


def test_without_isolation_code_gets_what_the_table_says() -> None:
    results = asyncio.run(bounds.run_all("none"))
    assert {name: bounds.observed(name, result) for name, result in results.items()} == promised()["none"]
