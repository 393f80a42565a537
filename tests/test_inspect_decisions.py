"""What the policy took out of its view and saw again: on a terminal, in the application, and on the page."""

from pathlib import Path

import pytest
from builders import add_trajectory, scored
from deciding import call, played, stages
from rich.console import Console
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.display.inspector import full
from condensegrpo.inspection.index import Index

REPLIES = (
    "look",
    call("branch", description="look around"),
    "look again",
    call("memory_write", name="key", text="in the hall"),
    call("return", message="the hall"),
    call("recall", turn=2),
    call("prune", turns=[0, 1], note="looked"),
)
FOLDED = "folded turns 2–3 by the policy's return in turn 4"
NOTES = "showed the policy's notes key again"
PRUNED = "pruned turns 0–1 by the policy's call in turn 6"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    one = played(stages("fold", "prune", "recall", "memory"), *REPLIES)
    file = tmp_path_factory.mktemp("inspected") / "t.parquet"
    add_trajectory(file, scored(one, 1.0))
    return file


def inspect(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_the_terminal_says_whose_decision_took_what_out_of_the_view_and_what_was_shown_again(file: Path) -> None:
    shown = inspect(file)
    assert "rewritten turn 0, 40 tokens ░ dropped turns 2–3, 221 tokens" in shown
    assert f"why fold: {FOLDED}; memory: {NOTES}" in shown
    assert f"why fold: {FOLDED}; prune: {PRUNED}; memory: {NOTES}" in shown
    assert "call recall({" in shown
    assert "[recalled from turn 2]" in shown


def test_the_application_says_it_beside_the_whole_history_also_where_the_prompt_only_continues(file: Path) -> None:
    index = Index(file)
    index.update()
    (batch,) = index.batches()
    (record,) = index.records()
    opened = batch.open(record)
    console = Console(width=200, color_system=None)

    def tab(turn: int) -> str:
        with console.capture() as capture:
            console.print(full(opened, turn))
        return capture.get()

    assert "turn 1 saw the whole history" in tab(1)
    assert f"turn 5 did not see: turns 2–3 dropped; turn 0 rewritten\nchosen: fold: {FOLDED}" in tab(5)
    assert f"chosen: fold: {FOLDED}" in tab(6)
    assert PRUNED in tab(7)


def test_the_page_holds_it_too(file: Path, tmp_path: Path) -> None:
    inspect(file, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for said in ("by the policy's return in turn 4", NOTES, "by the policy's call in turn 6", "[recalled from turn 2]"):
        assert said in page or said.replace("'", "\\u0027") in page
