"""``benchmarks/retention.py``: the reader of BFCL's memory questions, what counts as kept, and the command."""

import json
import zipfile
from fractions import Fraction
from pathlib import Path

import pytest
from memory_questions import write_memory_questions
from retention import main, methods, parsed_shares, retention
from rich.console import Console

from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.display.tables import show_folding, table
from condensegrpo.rewards.matches import contains_answer
from condensegrpo.studies.tasks.bfcl_memory import read_memory_questions

SAID = {  # in the order of conversations; four words each, so that half the budget holds two of four messages
    "travel": [["My home is Lisbon.", "The train leaves 09:40."], ["We packed 135 books.", "Nothing else to say."]],
    "garden": [["Roses need much water.", "I bought two spades."]],
}
ASKED = [  # scenario, question, answers
    ("travel", "Where is my home?", ["Lisbon"]),
    ("travel", "How many books did we pack?", ["35", "thirty five"]),  # no whole word of what was said
    ("garden", "How many spades?", ["2", "two"]),
]


def write(folder: Path) -> Path:
    """The benchmark's files with these messages and questions."""
    return write_memory_questions(folder, SAID, ASKED)


def test_questions_and_messages_are_read_in_order(tmp_path: Path) -> None:
    data = read_memory_questions(write(tmp_path))
    assert [(each.scenario, each.question, list(each.answers)) for each in data.questions] == ASKED
    assert data.messages["travel"] == (
        *("My home is Lisbon.", "The train leaves 09:40."),
        *("We packed 135 books.", "Nothing else to say."),
    )


def test_a_wheel_is_read_without_installing_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "bfcl_eval" / "data")
    wheel = tmp_path / "bfcl_eval-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in folder.rglob("*.json"):
            archive.write(file, file.relative_to(tmp_path))
    assert read_memory_questions(wheel) == read_memory_questions(tmp_path)


def test_some_scenarios_have_their_own_questions_and_messages(tmp_path: Path) -> None:
    garden = read_memory_questions(write(tmp_path)).of(["garden"])
    assert [each.question for each in garden.questions] == ["How many spades?"]
    assert set(garden.messages) == {"garden"}
    with pytest.raises(DataError, match="found no attic; there are garden, travel"):
        read_memory_questions(tmp_path).of(["garden", "attic"])


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no BFCL_v4_memory.json. Run `pip download --no-deps bfcl-eval=="):
        read_memory_questions(tmp_path)
    folder = write(tmp_path / "data")
    (folder / "memory_prereq_conversation" / "memory_garden.json").unlink()
    with pytest.raises(DataError, match="memory_2 has no conversation of the scenario 'garden'"):
        read_memory_questions(folder)
    answers = folder / "possible_answer" / "BFCL_v4_memory.json"
    answers.write_text(answers.read_text().replace("ground_truth", "truth"))
    with pytest.raises(DataError, match="row 1 lacks one of id, ground_truth"):
        read_memory_questions(folder)
    answers.write_text("{")
    with pytest.raises(DataError, match=r"possible_answer.BFCL_v4_memory.json: .*Fetch bfcl-eval"):
        read_memory_questions(folder)


@pytest.mark.parametrize(
    ("answer", "text", "match", "found"),
    [
        ("Lisbon", "in LISBON.", "words", True),
        ("1.8", "about 1.8 inches", "words", True),
        ("35", "135 books", "words", False),
        ("35", "135 books", "substring", True),
        ("7", "[turn 7, observation omitted: 35 tokens]", "substring", False),
        ("7", "[turn 3, observation omitted: 35 tokens] 7 crates", "words", True),
    ],
)
def test_an_answer_stands_as_words_or_inside_a_word_and_never_in_a_placeholder(
    answer: str, text: str, match: str, found: bool
) -> None:
    assert contains_answer([answer], text, match) is found  # type: ignore[arg-type]  # parametrised as str


def test_half_the_words_hold_the_newest_or_what_the_question_asks_for(tmp_path: Path) -> None:
    """Of four words a message: travel keeps two of four messages, garden one of two. ``35`` stands nowhere."""
    data = read_memory_questions(write(tmp_path))
    entrants = methods([("truncate", {}), ("full", {})])
    figures = {each.name: each for each in retention(data, entrants, [Fraction(1, 2)])}
    assert {name: round(3 * each.retained.mean) for name, each in figures.items() if name != "random"} == {
        "newest": 1,  # the spades are the newest message; Lisbon is the oldest of four
        "bm25": 2,
        "truncate": 1,
        "full": 2,
    }
    assert 0 < figures["random"].retained.mean < 2 / 3  # over eight orders of each question
    assert {name: each.used for name, each in figures.items()} == pytest.approx(
        {"newest": 0.5, "random": 0.5, "bm25": 0.5, "truncate": 0.5, "full": 1.0}
    )
    assert figures["newest"].difference is None
    assert figures["bm25"].difference is not None
    assert figures["bm25"].difference.mean == pytest.approx(1 / 3)
    assert [name for name, each in figures.items() if each.sees_question] == ["bm25"]


@pytest.mark.parametrize(
    ("condensers", "words"),
    [
        ([("summary", {})], "asks a policy for text"),
        ([("truncate", {}), ("truncate", {})], "truncate: it is named twice"),
        ([("attention", {})], "scorer 'policy' of the condenser: there is no policy here"),
    ],
)
def test_what_needs_a_policy_is_refused(
    condensers: list[tuple[str, dict[str, object]]], words: str, tmp_path: Path
) -> None:
    data = read_memory_questions(write(tmp_path))
    with pytest.raises(ConfigError, match=words):
        retention(data, methods(condensers), [Fraction(1, 2)])


def test_budgets_are_shares() -> None:
    assert parsed_shares("1/2, 0.25,1") == [Fraction(1, 2), Fraction(1, 4), Fraction(1)]


@pytest.mark.parametrize("text", ["", "1/4,", "0", "3/2", "1/0", "a"])
def test_what_is_no_list_of_shares_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted shares above 0 and at most 1"):
        parsed_shares(text)


@pytest.mark.parametrize("width", [200, 60])
def test_a_table_that_does_not_fit_loses_neither_names_nor_figures(width: int) -> None:
    headings = ["condenser", "sees the question", *(f"1/{part}" for part in (2, 4, 8, 16))]
    rows = [[name, "no", *["0.52 [0.45, 0.59]\n-0.12 [-0.20, +0.03]"] * 4] for name in ("observation_mask", "anchors")]
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        show_folding(console, table("answers that are kept", headings, rows, left=2))
    shown = capture.get()
    assert "answers that are kept" in shown
    assert all(name in shown for name in ("observation_mask", "anchors"))
    assert shown.count("[-0.20, +0.03]") == shown.count("0.52 [0.45, 0.59]") == 8


def test_the_script_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data")
    main(["--data", str(data), "--condensers", "truncate", "--budgets", "1/2", "--scenarios", "travel"])
    shown = capsys.readouterr().out
    assert "2 questions about 4 messages, budgets in words" in shown
    assert shown.count("\n| ") == 6  # headings, rule, four methods
    main(["--data", str(data), "--scenarios", "travel", "--condensers", "truncate", "--budgets", "1/2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["questions"], report["messages"], report["budget"]) == (2, 4, "words")
    assert [figure["name"] for figure in report["figures"]] == ["newest", "random", "bm25", "truncate"]
