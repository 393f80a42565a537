"""The page of a run in a browser: what a reader can do with it, and what the text of a model cannot."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import Watched, chromium
from builders import ledger_episode, scored

from condensegrpo.reporting.run_report import write_page
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder
from condensegrpo.storage.trajectories import Provenance, write_trajectories

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
REPLIES = ["<note> 3 </note>", "<note> 5 </note>", "<answer> 5 </answer>"]


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "<b>bold")
    run.config.write_text(f"name: bold\ntrain: {{steps: 3}}\nnote: '{HOSTILE}'\n")
    tracker = JsonlTracker(run.metrics)
    for step in range(4):
        if step in (0, 3):
            bounds = {"eval/success_low": 0.125, "eval/success_high": 0.5 + step / 10}
            tracker.log(step, {"eval/success": 0.25 + step / 10, **bounds, "eval/K=20/success": 0.1})
            write(run.evaluation(step, "held-out"), step, "held-out")
        if step:
            tracker.log(step, {"success": step / 10, "loss": -step / 4, f"reward/{HOSTILE}": 1.0})
            write(run.trajectories(step), step, None)
    return write_page(run.path)


def write(file: Path, step: int, evaluation: str | None) -> None:
    """Four trajectories, of which the first fails and says what a page must not run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    known = Provenance(
        evaluation=evaluation, step=step, model="m", condenser="last_k", max_context_tokens=48, temperature=1, seed=0
    )
    some = []
    for sample in range(4):
        one = ledger_episode(REPLIES, ["+2", "done report"], keep_last=1, id=f"{step}/0/{sample}", sample=sample)
        if sample == 0:
            last = replace(one.turns[-1], reply=replace(one.turns[-1].reply, content=HOSTILE))
            one = replace(one, turns=(*one.turns[:-1], last), answer=HOSTILE, question=HOSTILE)
        some.append(scored(one, float(sample > 0), correct=float(sample > 0)))
    write_trajectories(file, some, known)


@pytest.fixture(scope="module")
def watched(browser: "Browser") -> Watched:
    return Watched.of(browser)


@pytest.fixture
def tab(watched: Watched, report: Path) -> "Page":
    return watched.open(report)


def at(tab: "Page", title: str, share: float, height: float = 0.5) -> tuple[float, float]:
    """A point in a diagram, ``share`` of the way from its first to its last step."""
    drawing = tab.locator("figure", has_text=title).first.locator("svg")
    drawing.scroll_into_view_if_needed()  # a click outside the window never ends
    box = drawing.bounding_box()
    assert box is not None
    return box["x"] + 46 + share * (box["width"] - 56), box["y"] + height * box["height"]


def test_hovering_shows_the_values_of_a_step_with_their_intervals(tab: "Page") -> None:
    tab.mouse.move(*at(tab, "Success", 0.98))
    tip = tab.locator(".tip:visible")
    assert tip.locator("b").first.inner_text() == "step 3"
    assert tip.locator("tr").all_inner_texts() == ["training\t0.3", "held-out\t0.55 [0.125, 0.8]", "K=20\t0.1"]
    tab.mouse.move(*at(tab, "Success", 0.34))
    assert tip.locator("tr").all_inner_texts()[1] == "held-out\t0.25 [0.125, 0.5] at 0"
    assert tab.locator("polygon.band").count() == 1


def test_a_click_shows_the_trajectories_of_the_step(tab: "Page") -> None:
    tab.mouse.click(*at(tab, "Success", 0.66, height=0.95))
    assert tab.locator("#trajectories h2").inner_text() == "Trajectories: training, step 2"
    cards = tab.locator(".sample")
    assert [text.split("\n")[0] for text in cards.all_inner_texts()] == ["✓ correct", "✗ wrong", "✓ correct"]
    assert "<note> 5 </note>" in cards.first.inner_text()
    assert "price " in cards.first.inner_text()
    assert "price –" not in cards.first.inner_text()
    assert cards.first.locator(".turn").nth(2).locator(".strip i").count() == 2
    assert "--step 2" in tab.locator("#trajectories code").inner_text()
    x, y = at(tab, "Success", 1.0, height=(8 + (1 - 0.55) * 160) / 190)
    tab.mouse.click(x, y)
    assert tab.locator("#trajectories h2").inner_text() == "Trajectories: held-out, after 3 steps"
    assert "#step=3&evaluation=held-out" in tab.url


def test_the_address_opens_the_step_and_the_metrics_again(watched: Watched, report: Path) -> None:
    tab = watched.open(report, "#metrics=loss&step=3&evaluation=held-out")
    assert tab.locator("figure").first.locator("b").inner_text() == "loss"
    assert tab.locator("#trajectories h2").inner_text() == "Trajectories: held-out, after 3 steps"


def test_every_metric_is_found_and_drawn(tab: "Page") -> None:
    tab.get_by_label("search metrics").fill("LOSS")
    rows = tab.locator("#metrics tbody tr:visible")
    assert rows.all_inner_texts() == ["loss\ttraining\t-0.25\t-0.75\t1–3"]
    rows.get_by_role("button").click()
    assert tab.locator("figure").first.locator("b").inner_text() == "loss"
    tab.get_by_title("remove loss").click()
    assert tab.locator("figure").first.locator("b").inner_text() == "Success"
    tab.get_by_label("search the configuration").fill("train.st")
    assert tab.locator("#configuration tr:visible").all_inner_texts() == ["train.steps\t3"]


def test_the_keyboard_moves_from_step_to_step(tab: "Page") -> None:
    tab.locator("figure").first.focus()
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    assert tab.locator(".tip:visible b").first.inner_text() == "step 2"
    tab.keyboard.press("Enter")
    assert tab.locator("#trajectories h2").inner_text() == "Trajectories: training, step 2"


def test_text_of_a_model_is_shown_and_never_run(watched: Watched, tab: "Page") -> None:
    tab.locator(".sample", has_text="✗ wrong").locator("summary").click()
    assert HOSTILE in tab.locator(".sample", has_text="✗ wrong").inner_text()
    assert HOSTILE in tab.locator("#metrics").inner_text()
    assert tab.locator("h1").inner_text() == "<b>bold"
    assert tab.locator("img").count() == 0
    assert watched.requests == []
    with tab.expect_event("requestfailed"):
        tab.evaluate("""const script = document.createElement("script"); script.textContent = "alert(3)";
            document.body.append(script); const image = new Image(); image.src = "https://example.org/x.png";""")
    assert watched.refused == ["https://example.org/x.png csp"]
    assert watched.dialogs == []
    assert watched.errors == []


def test_it_is_dark_where_the_system_is_and_fits_a_telephone(browser: "Browser", report: Path) -> None:
    watched = Watched.of(browser, width=400, scheme="dark")
    tab = watched.open(report)
    assert watched.background() == "rgb(20, 23, 27)"
    assert tab.evaluate("document.documentElement.scrollWidth") == 400
    tab.get_by_role("button", name="colours").click()
    assert watched.background() == "rgb(255, 255, 255)"
