"""The page of ``inspect --html`` in a browser: the panes, the keys, the address, and text that must not run."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from browsing import Watched, chromium
from builders import (
    assistant,
    condensation,
    ids,
    ledger_episode,
    scored,
    trajectory,
    turn,
    user,
    write_tokenizer,
)
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.cli.inspect_selection import MEGABYTE, Choice, chosen_batches, write_html
from condensegrpo.core.errors import DataError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.inspection.batches import trajectory_files
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.views import search
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import (
    Credit,
    Provenance,
    provenance_of,
    read_figures,
    read_trajectories,
    write_credit,
    write_trajectories,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>\u2028\u202enow\x1b[31m"
VISIBLE = HOSTILE.replace("\u2028", "⟨U+2028⟩").replace("\u202e", "⟨U+202E⟩").replace("\x1b", "␛")
REPLIES = ["<note> 3 </note>", "<note> 5 </note>", "<note> 6 </note>", "<answer> 6 </answer>"]
OPERATIONS = ["+2", "+1", "done report"]


def episode(step: int, problem: int, sample: int) -> ScoredTrajectory:
    """Sample 0 is wrong and says what a page must not run; sample 1 is correct and pushed down."""
    group = f"{step}/{problem}"
    one = ledger_episode(REPLIES, OPERATIONS, keep_last=1, id=f"{group}/{sample}", group=group, sample=sample)
    one = replace(one, problem_id=f"p{problem}", question=f"question {problem}", ground_truth="6")
    if sample == 0:
        last = replace(one.turns[-1], reply=replace(one.turns[-1].reply, content=HOSTILE))
        one = replace(one, turns=(*one.turns[:-1], last), answer=HOSTILE)
    return scored(one, float(sample), correct=float(sample))


def masked() -> ScoredTrajectory:
    """A trajectory whose second prompt has a placeholder for most of an observation."""
    pinned, reply, full, short = user("start 3"), assistant("ok"), user("the value was 5"), user("the value omitted")
    first = turn(ids("start 3"), ids("done"), context=(pinned,), reply="ok", observations=(full,))
    declared = condensation("r", [9], before=12, after=8, condenser="observation_mask")
    second = turn(ids("start 3 keep"), ids("done"), condensation=declared, context=(pinned, reply, short))
    return scored(trajectory(first, second, id="2/2/0", group="2/2"), 1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two problems with two samples each, and an evaluation after step 2."""
    folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "demo")
    folder.config.write_text("name: demo\nmodel: {new: {}}\ntask: {name: ledger}\n")
    write_tokenizer(folder.path)
    for step, evaluation in ((1, None), (2, None), (2, "held-out")):
        file = folder.trajectories(step) if evaluation is None else folder.evaluation(step, evaluation)
        file.parent.mkdir(parents=True, exist_ok=True)
        known = Provenance(
            evaluation=evaluation,
            step=step,
            model="m",
            condenser="last_k",
            max_context_tokens=48,
            temperature=1,
            seed=0,
        )
        some = [episode(step, problem, sample) for problem in (0, 1) for sample in (0, 1)]
        write_trajectories(file, [*some, *([masked()] if evaluation else [])], known)
        if evaluation is None:
            credit = (
                Credit(trajectory=one.trajectory.id, advantages=(0.5 - one.score.correct,) * 4, weights=(0.001,) * 4)
                for one in some
            )
            write_credit(folder.credit(step), credit)
    return folder.path


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    index = Index(run)
    write_html(run / "page.html", index, chosen_batches(index, tuple(trajectory_files(run)), Choice()), limited=False)
    return run / "page.html"


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def watched(browser: "Browser") -> Watched:
    return Watched.of(browser)


def pane(tab: "Page") -> str:
    return tab.get_by_role("tabpanel").inner_text()


def head(tab: "Page") -> str:
    return pane(tab).splitlines()[0]


def test_an_address_opens_the_turn_and_the_pane(watched: Watched, file: Path) -> None:
    tab = watched.open(file, "#step=2&t=2/1/1&turn=3&tab=full")
    assert head(tab) == "2/1/1 ✓ correct step 2 · turn 3 of 4 · score 1 · answered"
    assert "assistant, turn 0: dropped\n<note> 3 </note>" in pane(tab)
    assert "assistant, turn 2: kept\n<note> 6 </note>" in pane(tab)
    current = tab.locator("[aria-current=true]")
    assert [text.split("\n")[0] for text in current.all_inner_texts()] == ["2/1", "#1", "turn 3"]
    assert current.nth(2).locator(".strip i").evaluate_all("marks => marks.map(mark => mark.className)") == [
        "d",
        "d",
        "k",
    ]
    tab = watched.open(file, "#step=2&evaluation=held-out&t=2/0/0&turn=1")
    assert head(tab) == "2/0/0 ✗ wrong held-out, after step 2 · turn 1 of 4 · score 0 · answered"


def test_rewritten_text_is_shown_as_a_difference(watched: Watched, file: Path) -> None:
    tab = watched.open(file, "#step=2&evaluation=held-out&t=2/2/0&turn=1&tab=full")
    assert "observation_mask (every turn): 12 → 8 tokens" in pane(tab)
    assert (tab.locator("del").all_inner_texts(), tab.locator("ins").all_inner_texts()) == (["was 5"], ["omitted"])
    assert tab.locator("[aria-current=true] .strip i").evaluate_all("marks => marks.map(mark => mark.className)") == [
        "r"
    ]


def test_every_pane_shows_the_turn(watched: Watched, file: Path) -> None:
    tab = watched.open(file, "#step=1&t=1/0/1&turn=2")
    assert "last_k (every turn): " in pane(tab)
    assert "user\n+1" in pane(tab)
    assert "<note> 3 </note>" not in pane(tab)
    tab.keyboard.press("3")
    tokens = tab.locator(".tokens span")
    assert tokens.all_inner_texts() == ["<note>", "6", "</note>", "<end>"]
    assert tokens.first.get_attribute("class") == "down"  # correct, and pushed down
    assert "log-probability -0.5" in (tokens.first.get_attribute("title") or "")
    tab.keyboard.press("t")
    assert tab.locator(".tokens sub").count() == 4
    tab.keyboard.press("4")
    assert "advantage" in pane(tab)
    assert "-0.5" in pane(tab)
    tab.keyboard.press("5")
    assert '"logprobs"' in pane(tab)


def test_keys_move_through_steps_groups_siblings_and_turns(watched: Watched, file: Path) -> None:
    tab = watched.open(file)
    shown = [head(tab)[:5]]
    for key in ("ArrowDown", "l", "j", "]", "e", "[", "h", "k"):
        tab.keyboard.press(key)
        shown.append(f"{head(tab)[:5]} {tab.evaluate('at.turn')} {tab.evaluate('batch().title')}")
    assert shown == [
        "1/0/0",
        "1/1/0 0 step 1",
        "1/1/1 0 step 1",
        "1/1/1 1 step 1",
        "2/0/0 0 step 2",
        "2/0/0 0 held-out, after step 2",
        "2/0/0 0 step 2",
        "2/0/0 0 step 2",
        "2/0/0 0 step 2",
    ]
    tab.keyboard.press("?")
    assert "this problem in all steps" in tab.get_by_role("dialog").inner_text()
    tab.keyboard.press("Escape")
    tab.keyboard.press("p")
    assert tab.locator("section").first.locator("button").count() == 3  # two steps and the evaluation
    tab.keyboard.press("Escape")
    assert tab.locator("section").first.locator("button").count() == 2


def test_ready_views_and_the_search_list_groups_of_all_steps(watched: Watched, file: Path) -> None:
    tab = watched.open(file)
    tab.keyboard.press("v")
    assert tab.locator("section h2").first.inner_text() == "4 groups: correct but pushed down"
    assert head(tab).startswith("1/0/1")
    tab.keyboard.press("p")  # a problem in all steps, also where nothing matches the view
    assert tab.locator("section h2").first.inner_text() == "3 groups: problem p0"
    tab.keyboard.press("Escape")
    for query in ("nothing", "QUESTION 1"):  # the second replaces the first
        tab.keyboard.press("/")
        tab.keyboard.type(query)
        tab.keyboard.press("Enter")
    assert tab.locator("section h2").first.inner_text() == "3 groups"
    assert tab.locator("mark").first.inner_text() == "question 1"


def test_the_page_says_what_it_holds(watched: Watched, file: Path) -> None:
    tab = watched.open(file)
    assert tab.locator(".extent").inner_text() == "13 of 13 trajectories: steps 1–2; held-out after step 2"


def test_a_page_of_some_siblings_shows_the_success_of_their_group_and_says_that_some_are_missing(
    watched: Watched, run: Path, tmp_path: Path
) -> None:
    index, files, page = Index(run), tuple(trajectory_files(run)), tmp_path / "page.html"
    write_html(page, index, chosen_batches(index, files, Choice(where="correct >= 1")), limited=True)
    tab = watched.open(page, "#step=1&t=1/0/0")  # a wrong sibling of a shown one
    assert tab.get_by_role("status").inner_text() == "the page does not hold 1/0/0"
    assert tab.locator(".rate").first.get_attribute("title") == "0.5 correct"
    assert "1 sibling is not on this page" in tab.get_by_label("siblings and turns").inner_text()


def test_siblings_have_the_height_of_the_page(browser: "Browser", run: Path) -> None:
    index, page = Index(run), run / "many.html"
    folder = RunFolder(run.parent / "many")
    folder.trajectories(1).parent.mkdir(parents=True)
    write_trajectories(folder.trajectories(1), [episode(1, 0, sample) for sample in range(8)])
    index = Index(folder.path)
    write_html(page, index, chosen_batches(index, trajectory_files(folder.path), Choice()), limited=False)
    tab = Watched.of(browser, width=1400).open(page)
    last = tab.locator(".halves > div").first.locator("button").last.bounding_box()
    assert last is not None
    assert last["y"] + last["height"] < 900


@pytest.mark.parametrize(
    "query",
    [
        "qsto1",  # letters in order in the question, at most two others between them
        "DONE rep",  # a message
        "done report ok",  # nothing
        "logprobs",  # a name in the JSON, no text
    ],
)
def test_the_search_finds_what_it_finds_on_the_terminal(watched: Watched, run: Path, file: Path, query: str) -> None:
    index = Index(run)
    index.update(trajectory_files(run))
    records = [hit.record for hit in search(index, query)]
    found = dict.fromkeys((record.file, record.figures.group_id) for record in records)
    tab = watched.open(file)
    tab.locator("input").fill(query)
    heading = tab.locator("section h2").first.inner_text()
    assert heading == f"{len(found)} group{'' if len(found) == 1 else 's'}"
    assert not records or head(tab).startswith(records[0].id)


def test_generated_searches_find_what_they_find_on_the_terminal(watched: Watched, run: Path, file: Path) -> None:
    index, chance = Index(run), Random(0)
    index.update(trajectory_files(run))
    texts = ("question 1", "2/0/1", "done report", "<note> 5 </note>", "the value was 5", "p0", HOSTILE)
    queries = ["".join(letter for letter in chance.choice(texts) if chance.random() < 0.7) for _ in range(100)]
    queries = [query for query in queries if query.strip()]
    tab = watched.open(file)
    found = tab.evaluate(
        """queries => queries.map(query => data.batches.flatMap(batch => batch.groups.flatMap(group => group.siblings)
            .filter(trajectory => searchOf(query).fit(trajectory) !== null)
            .map(({ figures }) => `${figures.id} ${batch.title}`)))""",
        queries,
    )
    expected = [
        [f"{hit.record.id} {index.batch(hit.record.file).title}" for hit in search(index, query)] for query in queries
    ]
    for query, left, right in zip(queries, found, expected, strict=True):
        assert sorted(left) == sorted(right), query
    assert 10 < sum(bool(hits) for hits in expected) < len(queries) - 10


def test_two_siblings_are_compared_from_their_first_difference(watched: Watched, file: Path) -> None:
    tab = watched.open(file, "#step=1&t=1/0/0")
    tab.keyboard.press("d")
    dialog = tab.get_by_role("dialog")
    assert dialog.locator("h2").inner_text() == "1/0/0 and 1/0/1: first difference: the reply of turn 3"
    assert dialog.locator("mark").all_inner_texts() == [VISIBLE[1:], "answer> 6 </answer>"]  # both begin with <
    tab.keyboard.press("k")
    address = tab.evaluate("location.hash")
    assert address == "#step=1&t=1/0/0&turn=2&with=1/0/1"
    tab = watched.open(file, address)  # the link leads to the comparison
    assert "turn 2 of 4" in tab.get_by_role("dialog").inner_text()
    tab.keyboard.press("Escape")
    tab.keyboard.press("f")
    assert "a page cannot follow a run" in tab.get_by_role("status").inner_text()


def test_text_of_a_model_is_shown_and_never_run(watched: Watched, file: Path) -> None:
    for settings in ("", "&tab=full", "&tab=reply", "&tab=raw"):
        tab = watched.open(file, f"#step=1&t=1/0/0&turn=3{settings}")
        assert VISIBLE in pane(tab) or "</script><img src=x onerror=alert(1)>" in pane(tab)
        assert tab.locator("img").count() == 0
    assert (watched.dialogs, watched.errors, watched.requests) == ([], [], [])


def test_it_is_dark_where_the_system_is_and_fits_a_telephone(browser: "Browser", file: Path) -> None:
    watched = Watched.of(browser, width=400, scheme="dark")
    tab = watched.open(file)
    assert watched.background() == "rgb(20, 23, 27)"
    assert tab.evaluate("document.documentElement.scrollWidth") == 400


def test_the_command_writes_the_step_a_group_or_what_matches_in_all_steps(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for options, count in (
        (["--step", "1"], "4 of 4"),
        (["--group", "2/1"], "2 of 4"),
        (["--trajectory", "2/1/1"], "2 of 4"),  # with its siblings
        (["--view", "pushed-down"], "4 of 13"),
        (["--evaluation", "held-out", "--where", "correct < 1"], "2 of 5"),
    ):
        result = CliRunner().invoke(app, ["inspect", str(run), "--html", str(page), *options])
        assert result.stdout.startswith(f"{page}: {count} trajectories: "), result.output


def test_what_is_written_is_said_and_can_be_limited(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, files, page = Index(run), tuple(trajectory_files(run)), tmp_path / "page.html"
    write_html(page, index, chosen_batches(index, files, Choice(where="correct >= 1 and advantage < 0")), limited=True)
    assert capsys.readouterr().out.startswith(f"{page}: 4 of 13 trajectories: steps 1–2, 0.")
    group = chosen_batches(index, files[:1], Choice(trajectory="#2"))
    assert [record.id for _, records in group for record in records] == ["1/1/0", "1/1/1"]
    every = chosen_batches(index, files, Choice())
    with pytest.raises(DataError, match=r"13 trajectories of 0 MB are more than .* Take fewer with --step"):
        write_html(page, index, every, limited=True, largest=1)
    with pytest.raises(DataError, match="no trajectory is left"):
        write_html(page, index, chosen_batches(index, files, Choice(where="turns > 9")), limited=True)


def test_a_page_of_a_long_run_has_the_first_and_the_last_of_each_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, page = RunFolder(shutil.copytree(run, tmp_path / "long")), tmp_path / "page.html"
    step, held_out = long.trajectories(1).read_bytes(), read_trajectories(long.evaluation(2, "held-out"))
    known = provenance_of(read_figures(long.evaluation(2, "held-out")))
    assert known is not None
    for number in range(3, 41):
        long.trajectories(number).write_bytes(step)
    for number, name in ((0, "held-out"), (20, "held-out"), (40, "held-out"), (0, "K=20"), (40, "K=20")):
        file = long.evaluation(number, name)
        file.parent.mkdir(exist_ok=True)
        write_trajectories(file, held_out, replace(known, evaluation=name, step=number))
    index = Index(long.path)
    every = chosen_batches(index, trajectory_files(long.path), Choice())
    write_html(page, index, every, limited=False, comfortable=MEGABYTE * 2 // 5)
    said, hint = capsys.readouterr().out.splitlines()
    evaluated = "K=20 after steps 0, 40; held-out after steps 0, 2, 20, 40"
    assert f"of 190 trajectories: steps 1, 9, 17, 25, 33, 40; {evaluated}, " in said
    assert hint.startswith("spread over the run; --step")
    write_html(page, index, every, limited=False, comfortable=1)
    evaluated = "K=20 after steps 0, 40; held-out after steps 0, 2, 20, 40; at most the first 1 group of each"
    assert evaluated in capsys.readouterr().out
    assert evaluated in page.read_text()
