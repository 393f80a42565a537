"""The inspector on a terminal: one run of the application presses every key; each test reads what was on the screen."""

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from builders import add_trajectory, assistant, ledger_episode, scored, user, write_tokenizer
from rich.color import Color, ColorSystem
from rich.console import Console
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static, TabbedContent
from textual.widgets._footer import FooterKey

from condensegrpo.cli import inspect_selection
from condensegrpo.cli.inspect_app import InspectorApp
from condensegrpo.cli.inspect_selection import Listing, Selection
from condensegrpo.core.trajectory import StopReason
from condensegrpo.display.inspector import sparkline
from condensegrpo.inspection.filters import FIELDS
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.views import MOST, Hit
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import (
    Credit,
    CreditTerm,
    Provenance,
    read_trajectories,
    write_credit,
    write_trajectories,
)

SAMPLED_WITH = Provenance(
    evaluation=None, step=1, model="m", condenser="last_k", max_context_tokens=64, temperature=1.0, seed=0
)
REPLIES = ["<note> 3 </note>", "<note> 5 </note>", "<answer> 6 </answer>"]
OTHER = ["<note> 3 </note>", "<note> 1 </note>", "<answer> 2 </answer>"]


def compared(advantage: float) -> CreditTerm:
    """The term that is behind an advantage, but for 0.05."""
    numbers = {"R": (float(advantage > 0),) * 3, "mean": (0.5,) * 3, "deviation": (0.5**0.5,) * 3}
    return CreditTerm(name="N(R)", values=(advantage + 0.05,) * 3, numbers=numbers)


def add_step(run: RunFolder, step: int, *, evaluation: str | None = None, solved: tuple[int, ...] = (0, 1)) -> None:
    """Two problems, a solved one with a right and a wrong trajectory; the right one of the second is pushed down."""
    known = replace(SAMPLED_WITH, step=step, evaluation=evaluation)
    file = run.evaluation(step, evaluation) if evaluation else run.trajectories(step)
    file.parent.mkdir(parents=True, exist_ok=True)
    some = []
    for problem in (0, 1):
        for sample, replies in ((0, REPLIES), (1, OTHER)):
            group = f"{step}/{problem}"
            one = ledger_episode(
                replies, ["+2", "done report"], keep_last=1, id=f"{group}/{sample}", group=group, sample=sample,
                answer=replies[-1].split()[1], stop=StopReason.ANSWERED,
            )  # fmt: skip
            one = replace(one, problem_id=f"p{problem}", question="start 3", ground_truth="6")
            correct = 1.0 if sample == 0 and problem in solved else 0.0
            some.append(scored(one, correct, correct=correct))
    write_trajectories(file, some, known)
    credit = {f"{step}/0/0": 0.7, f"{step}/0/1": -0.7, f"{step}/1/0": -0.1, f"{step}/1/1": 0.1}
    if evaluation is None:
        write_credit(
            run.credit(step),
            [
                Credit(trajectory=name, advantages=(value,) * 3, weights=(0.01,) * 3, terms=(compared(value),))
                for name, value in credit.items()
            ],
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "demo")
    run.config.write_text(
        "name: demo\nmodel: {new: {}}\ntask: {name: ledger}\nalgorithm: {advantage: {estimator: grpo}}\n"
    )
    for step in (1, 2):
        add_step(run, step)
    add_step(run, 2, evaluation="held-out")
    write_tokenizer(run.path)
    return run


def text(app: InspectorApp, name: str) -> str:
    """What a static text shows, as plain text of 100 columns."""
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(app.screen.query_one(f"#{name}", Static).content)
    return capture.get()


def rows_of(app: InspectorApp, name: str) -> list[str]:
    return [str(option.prompt) for option in app.query_one(f"#{name}", OptionList).options]


class Recorder:
    """The screens after each key."""

    def __init__(self, app: InspectorApp, pilot: "Pilot[None]") -> None:
        self.app, self.pilot = app, pilot
        self.screens: dict[str, dict[str, str]] = {}

    async def press(self, name: str, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()
        await self.app.workers.wait_for_complete()
        await self.pilot.pause()
        tab = self.app.query_one(TabbedContent).active
        texts = (
            {each: text(self.app, each) for each in ("top", "head", "list-title", f"{tab}-text")}
            if len(self.app.screen_stack) == 1
            else {}
        )
        lists = {each: "\n".join(rows_of(self.app, each)) for each in ("list", "siblings", "turns")}
        command = self.app.selection.command(self.app.listing)
        self.screens[name] = {**texts, **lists, "tab": tab, "command": command}


@pytest.fixture(scope="module")
def screens(run: RunFolder) -> dict[str, dict[str, str]]:
    """One run of the application; pages are written beside the run."""

    async def scenario() -> dict[str, dict[str, str]]:
        app = InspectorApp(Selection(Index(run.path), run.trajectories(2)))
        async with app.run_test(size=(140, 40)) as pilot:
            seen = Recorder(app, pilot)
            await seen.press("start")
            await seen.press("turn", "j", "j")
            await seen.press("turn back", "k")
            await seen.press("sibling", "l")
            await seen.press("sibling back", "h")
            for number, name in enumerate(("shown", "full", "reply", "credit", "raw"), 1):
                await seen.press(name, str(number))
            await seen.press("ids", "t")
            await seen.press("compare", "d")
            seen.screens["compare"] |= {name: text(app, name) for name in ("difference", "left", "right")}
            await seen.press("compared turn", "j", "l", "h", "k")
            await seen.press("keys", "escape", "question_mark")
            seen.screens["keys"]["keys"] = str(app.screen.query_one(".box Static", Static).content)
            await seen.press("problem", "escape", "p")
            await seen.press("groups", "escape")
            await seen.press("view", "v", "enter")
            await seen.press("search", "slash", *"nte5", "enter")
            await seen.press("listed evaluation", "slash", "equals_sign", *"evaluation", "enter")
            await seen.press(
                "condition", "slash", *["equals_sign", *"correct", "equals_sign", "equals_sign", "0"], "enter"
            )
            await seen.press("no condition", "slash", "equals_sign", *"stp", "equals_sign", "equals_sign", "1", "enter")
            seen.screens["no condition"]["input"] = app.query_one("#search", Input).value
            await seen.press("corrected", *["left"] * 4, "e", "enter")
            await seen.press("step", "escape", "left_square_bracket")
            await seen.press("no step", "left_square_bracket")
            await seen.press("evaluation", "right_square_bracket", "e")
            await seen.press("training", "e")
            await seen.press("arrow", "down")
            await pilot.click("#siblings", offset=(4, 1))
            await seen.press("copy", "y")
            seen.screens["copy"]["clipboard"] = app.clipboard
            await seen.press("follow", "f")
            await seen.press("compared live", "d")
            add_step(run, 3, solved=(0,))
            app._poll()
            await seen.press("compared live", "l", "l")
            seen.screens["compared live"]["difference"] = text(app, "difference")
            await seen.press("live", "escape")
            await seen.press("worse", "w")
            await seen.press("export", "j", "x")
            await pilot.press("q")
        return seen.screens

    with contextlib.chdir(run.path.parent):
        return asyncio.run(scenario())


Screens = dict[str, dict[str, str]]


def test_the_first_screen_has_steps_groups_siblings_and_turns(screens: Screens) -> None:
    start = screens["start"]
    assert "demo training · step 2 · 4 trajectories" in start["top"]
    assert "success ▅▅ 0.50" in " ".join(start["top"].split())
    assert "groups without signal ▁▁ 0.00" in start["top"]
    assert start["list"].splitlines()[:2] == ["2/0 ████░░░░ 1/2  ● signal", "start 3 → 6"]
    assert [line.split()[:3] for line in start["siblings"].splitlines()] == [["0", "✓", "1.000"], ["1", "✗", "0.000"]]
    assert [line.split() for line in start["turns"].splitlines()] == [
        ["0", "9", "ctx", "+0.70", "▸"],
        ["1", "17", "ctx", "+0.70", "■■", "▸"],
        ["2", "18/26", "ctx", "+0.70", "░░", "■■", "▸"],
    ]
    assert start["head"].startswith("2/0/0   turn 0 of 3")


def test_keys_move_through_turns_siblings_and_steps(screens: Screens) -> None:
    heads = {
        name: screens[name]["head"].split("   ") for name in ("turn", "turn back", "sibling", "sibling back", "step")
    }
    assert [head[1].strip() for head in heads.values()] == [
        "turn 2 of 3", "turn 1 of 3", "turn 1 of 3", "turn 1 of 3", "turn 0 of 3",
    ]  # fmt: skip
    assert [head[0] for head in heads.values()] == ["2/0/0", "2/0/0", "2/0/1", "2/0/0", "1/0/0"]
    assert "step 1 " in screens["no step"]["top"]
    assert screens["arrow"]["head"].startswith("2/1/0")


def test_the_tabs_show_prompt_history_reply_credit_and_the_stored_turn(screens: Screens) -> None:
    assert "<user> start 3 keep a note <end> <assistant> <note> 3 </note>" in " ".join(
        screens["shown"]["shown-text"].split()
    )
    assert "■ turn 0 · user · kept" in screens["full"]["full-text"]
    assert "turn 1 saw the whole history" in screens["full"]["full-text"]
    reply = screens["reply"]["reply-text"]
    assert "advantage +0.700 ▲ made likelier (underlined)" in reply
    assert "<note> 5 </note> <end>" in reply
    credit = " ".join(screens["credit"]["credit-text"].split())
    assert "group 2 trajectories, scores 1 0" in credit
    assert "N(R) +0.75 R 1 mean 0.5 deviation 0.7071" in credit
    assert "advantage +0.7 grpo: N(R); these give +0.75" in credit  # as if something had changed it afterwards
    assert '"prompt_ids": [' in screens["raw"]["raw-text"]
    assert "-0.50" in screens["ids"]["reply-text"]


def test_siblings_are_compared_from_their_first_difference(screens: Screens) -> None:
    assert "2/0/0 and 2/0/1: first difference: the reply of turn 1" in " ".join(
        screens["compare"]["difference"].split()
    )
    assert "<note> 5 </note>" in screens["compare"]["left"]
    assert "<note> 1 </note>" in screens["compare"]["right"]


def test_a_problem_is_followed_through_training(screens: Screens) -> None:
    assert [line.split(" ████")[0] for line in screens["problem"]["list"].splitlines()[::2]] == [
        "step 1", "step 2", "held-out 2",
    ]  # fmt: skip
    assert screens["problem"]["list-title"].startswith("p0 ")
    assert screens["groups"]["list-title"].startswith("2 groups")
    assert screens["groups"]["head"] == screens["problem"]["head"]  # the same trajectory
    assert "training · step 1" in screens["problem"]["top"]  # its step, not that of the groups before


def test_problems_that_got_worse_are_listed_by_their_fall(screens: Screens) -> None:
    assert screens["worse"]["list-title"].startswith("1 problem got worse")
    assert screens["worse"]["list"].splitlines() == ["0.50 → 0.00 ▅▅▁  training, 3 times", "p1  start 3"]
    assert screens["worse"]["head"].startswith("3/1/0")


def test_what_is_shown_is_written_as_a_page(screens: Screens, run: RunFolder) -> None:
    page = (run.path.parent / "inspect-demo-3-1-0.html").read_text()
    assert '"3/1/1"' in page  # the sibling
    assert '"3/0/0"' not in page  # it is not listed


def test_views_searches_and_conditions_list_trajectories_of_all_steps(screens: Screens) -> None:
    def ids(name: str) -> list[str]:
        return [line.split()[0] for line in screens[name]["list"].splitlines()[::2]]

    assert ids("view") == ["1/1/0", "2/1/0"]
    assert screens["view"]["list-title"].startswith("correct but pushed down: 2")
    first = screens["view"]["list"].splitlines()[0]  # a narrow list cuts the end of a row
    assert re.search(r" \d+ ctx  price \d+  3 turns  ", first)
    assert ids("condition") == ["1/0/1", "1/1/1", "2/0/1", "2/1/1", "2/0/1", "2/1/1"]
    assert "'nte5': 0" in screens["search"]["list-title"]
    assert ids("no condition") == ids("condition")  # a notice says what is wrong, and it can be corrected
    assert screens["no condition"]["input"] == "=stp==1"
    assert ids("corrected") == ["1/0/0", "1/0/1", "1/1/0", "1/1/1"]
    assert screens["view"]["command"].endswith("--step 1 --trajectory 1/1/0 --turn 0 --view pushed-down")
    assert screens["condition"]["command"].endswith("--where correct==0")


def test_the_curves_at_the_top_are_those_of_what_is_shown(screens: Screens) -> None:
    assert "training · step 1" in screens["corrected"]["top"]
    assert "success ▅▅ 0.50   groups without signal ▁▁ 0.00" in screens["corrected"]["top"]
    assert "evaluation held-out · step 2" in screens["listed evaluation"]["top"]
    assert screens["listed evaluation"]["top"].splitlines()[1].rstrip() == "success ▅ 0.50"


def test_a_search_that_stops_counting_says_so(run: RunFolder) -> None:
    index = Index(run.path)
    index.update()
    (record, *_) = index.batch(run.trajectories(1)).records()
    found = [Hit(record, None, "start")] * MOST
    assert inspect_selection.hits("start", found, "").title == "'start': 1,000+"
    assert inspect_selection.hits("start", found[1:], "").title == "'start': 999"


def test_evaluations_are_beside_training(screens: Screens) -> None:
    assert "evaluation held-out · step 2" in screens["evaluation"]["top"]
    assert "training · step 2" in screens["training"]["top"]


def test_evaluations_and_training_are_shown_of_the_same_step(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(tmp_path / "other")
    other.config.write_text(run.config.read_text())
    for step in (1, 2):
        add_step(other, step)
        add_step(other, step, evaluation="held-out")
    selection = Selection(Index(other.path), other.trajectories(1))
    assert selection.other_kind() == other.evaluation(1, "held-out")
    selection.go_to(other.evaluation(1, "held-out"))
    assert selection.other_kind() == other.trajectories(1)


def test_the_command_that_shows_this_is_copied(screens: Screens, run: RunFolder) -> None:
    wanted = f"condensegrpo inspect {run.path} --step 2 --trajectory 2/1/1 --turn 0"
    assert screens["copy"]["clipboard"] == screens["copy"]["command"] == wanted


def test_a_live_run_is_followed(screens: Screens) -> None:
    assert "following" in screens["follow"]["top"]
    assert "training · step 3" in screens["live"]["top"]
    assert "--step 3" in screens["compared live"]["command"]
    assert screens["compared live"]["difference"].startswith("2/0/0 and 2/0/1: ")


XTERM = (
    (0, 0, 0), (205, 0, 0), (0, 205, 0), (205, 205, 0), (0, 0, 238), (205, 0, 205), (0, 205, 205), (229, 229, 229),
    (127, 127, 127), (255, 0, 0), (0, 255, 0), (255, 255, 0), (92, 92, 255), (255, 0, 255), (0, 255, 255), (255,) * 3,
)  # fmt: skip


def luminance(color: Color, system: ColorSystem) -> float:
    """The relative luminance of WCAG 2.2, of the ANSI 16 colours with the values of xterm."""
    shown = color.downgrade(system)
    number = shown.number
    parts = shown.get_truecolor() if number is None or number > 15 else XTERM[number]
    red, green, blue = (
        part / 255 / 12.92 if part <= 0.04045 * 255 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrasts(app: InspectorApp) -> Iterator[tuple[float, str]]:
    """The contrast of each text on the screen to its background, in all colours and in the terminal's sixteen."""
    for widget in app.screen.query("*").results(Widget):
        strips = [] if widget.children else widget.render_lines(Region(0, 0, *widget.region.size))
        for text, style, _ in chain.from_iterable(strips):
            if style is not None and style.color and style.bgcolor and any(map(shows_text, text)):
                for system in (ColorSystem.TRUECOLOR, ColorSystem.STANDARD):
                    low, high = sorted(luminance(color, system) for color in (style.color, style.bgcolor))
                    yield (high + 0.05) / (low + 0.05), f"{text!r} in #{widget.id}, {style}"


def shows_text(character: str) -> bool:
    return character.isalnum() or character in "✓✗◐●○▲▼"


@pytest.mark.parametrize("no_color", [False, True])
def test_every_text_stands_out_from_its_background(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")

    async def scenario() -> list[tuple[float, str]]:
        app = InspectorApp(Selection(Index(run.path), run.trajectories(1)))
        async with app.run_test(size=(140, 40)) as pilot:
            await app.workers.wait_for_complete()
            found = []
            for keys in ([], ["tab"], ["tab", "3"], ["2", "j", "j"], ["v"]):
                await pilot.press(*keys)
                await pilot.pause()
                found += contrasts(app)
        return found

    found = asyncio.run(scenario())
    assert len(found) > 100
    assert [each for each in found if each[0] < 4.5] == []


def test_every_key_is_explained(screens: Screens) -> None:
    keys = screens["keys"]["keys"]
    for key in ("[ ]", "e ", "f ", "h l", "j k", "/ ", "v ", "p ", "d ", "y ", "t ", "q ", "Esc", "w ", "x ", *FIELDS):
        assert key in keys


def test_a_condition_and_a_trajectory_can_be_shown_first(run: RunFolder) -> None:
    selection = Selection(Index(run.path), run.trajectories(1))
    record = selection.groups[1].siblings[1]
    selection.show(record)
    wrong = Listing("wrong", "correct == 0", None, (), run.trajectories(1), record)

    async def scenario() -> tuple[str, str, int]:
        app = InspectorApp(selection, first=wrong)
        async with app.run_test(size=(60, 20)) as pilot:  # as narrow as a terminal may be
            await app.workers.wait_for_complete()
            await pilot.pause()
            await app.workers.wait_for_complete()
            await pilot.pause()
            left, middle = app.query_one("#left").region, app.query_one("#middle").region
            assert (left.x, left.bottom) == (middle.x, middle.y)  # above each other
            assert [key.description for key in app.query(FooterKey) if key.region.right <= 60][:2] == ["help", "quit"]
            return text(app, "list-title"), text(app, "head"), app.query_one("#list", OptionList).highlighted or 0

    title, head, place = asyncio.run(scenario())
    assert title.startswith("wrong: 2 ")  # of step 1 alone
    assert (head.split()[0], place) == ("1/1/1", 1)


def test_a_view_begins_with_the_requested_turn(run: RunFolder) -> None:
    async def scenario() -> str:
        pushed_down = Listing("pushed down", "correct >= 1 and advantage < 0", None, ("--view", "pushed-down"))
        app = InspectorApp(Selection(Index(run.path), run.trajectories(1)), turn=2, first=pushed_down)
        async with app.run_test(size=(60, 20)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await app.workers.wait_for_complete()
            await pilot.pause()
            return text(app, "head")

    assert asyncio.run(scenario()).split("   ")[1].strip() == "turn 2 of 3"


def test_a_view_without_a_match_says_what_it_looked_for(run: RunFolder) -> None:
    async def scenario() -> str:
        selection = Selection(Index(run.path), run.trajectories(1))
        app = InspectorApp(selection, first=Listing("slow", "turns > 99", None, ()))
        async with app.run_test(size=(60, 20)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await app.workers.wait_for_complete()
            await pilot.pause()
            return text(app, "list-title")

    assert " ".join(asyncio.run(scenario()).split()).startswith("slow: 0. No trajectory has turns > 99")


def test_no_text_of_a_file_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\x9b31m"
    file = tmp_path / "trajectories.parquet"
    for sample in (0, 1):
        name = f"{evil}{sample}"
        one = ledger_episode(["now"] * (sample + 1), [], id=name, group=evil, sample=sample, answer=evil)
        turns = tuple(replace(turn, context=(user(evil),), reply=assistant(evil)) for turn in one.turns[:1])
        one = replace(one, turns=turns, problem_id=evil, question=evil, ground_truth=evil, detail=evil)
        add_trajectory(file, scored(one, 1.0, components={evil: 1.0}), replace(SAMPLED_WITH, evaluation=evil))

    async def scenario() -> list[str]:
        app = InspectorApp(Selection(Index(file), file))
        async with app.run_test(size=(140, 40)) as pilot:
            pictures = []
            for keys in (["2"], ["3"], ["t"], ["4"], ["5"], ["p"], ["escape", "v"], ["escape", "d"], ["escape", "y"]):
                await pilot.press(*keys)
                await app.workers.wait_for_complete()
                await pilot.pause()
                pictures.append(app.export_screenshot())
        return pictures

    pictures = asyncio.run(scenario())
    assert all("\x1b" not in picture and "\x07" not in picture and "\x9b" not in picture for picture in pictures)
    assert all("␛" in picture for picture in pictures)


def test_a_live_step_grows_and_the_next_may_be_empty(run: RunFolder, tmp_path: Path) -> None:
    live = RunFolder.create(tmp_path / "live")
    live.config.write_text(run.config.read_text())
    whole = read_trajectories(run.trajectories(1))
    file = live.trajectories(1)
    write_trajectories(file, whole[:1])

    async def scenario() -> list[tuple[str, str, int]]:
        app = InspectorApp(Selection(Index(live.path), file))
        async with app.run_test(size=(120, 30)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.press("f")
            seen = []
            for other in (None, (), whole[:2]):
                write_trajectories(file, whole)
                if other is not None:
                    write_trajectories(live.trajectories(2), other)
                for _ in range(2):  # the application itself may have looked just before
                    app._poll()
                    await app.workers.wait_for_complete()
                await pilot.pause()
                seen.append(
                    (text(app, "top").split(" · ")[1], text(app, "list-title").strip(), len(rows_of(app, "list")))
                )
        return seen

    assert asyncio.run(scenario()) == [("step 1", "2 groups", 2), ("step 1", "2 groups", 2), ("step 2", "1 group", 1)]


def test_a_sparkline_averages_what_does_not_fit() -> None:
    assert sparkline([0.0, 1.0, None], 8) == "▁█ "
    assert sparkline([0.0, 1.0, 0.0, 1.0], 2) == "▅▅"
    assert sparkline([], 8) == ""


FIRST_SCREEN = """
import asyncio, sys
from pathlib import Path
from typer.testing import CliRunner
from condensegrpo.cli.app import app
from condensegrpo.cli.inspect_app import InspectorApp
from condensegrpo.cli.inspect_selection import Selection
from condensegrpo.inspection.batches import choose
from condensegrpo.inspection.index import Index

async def opened(path):
    inspector = InspectorApp(Selection(Index(path), choose(path, None)))
    async with inspector.run_test() as pilot:
        await pilot.pause()
        await inspector.workers.wait_for_complete()
        assert inspector.selection.opened is not None

for path in map(Path, sys.argv[1:]):
    asyncio.run(opened(path))
    printed = CliRunner().invoke(app, ["inspect", str(path), "--plain"])
    assert printed.exit_code == 0, printed.output
    print(*sorted({"torch", "transformers", "condensegrpo.config.schema", "tokenizers", "pandas"} & set(sys.modules)))
"""


def test_the_first_screen_loads_no_model_and_no_configuration(run: RunFolder, tmp_path: Path) -> None:
    """A tokenizer only where the run has one."""
    bare = shutil.copytree(run.path, tmp_path / "run")
    (bare / "tokenizer.json").unlink()
    order = [sys.executable, "-c", FIRST_SCREEN, str(bare), str(run.path)]
    done = subprocess.run(order, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (["", "tokenizers"], "")
