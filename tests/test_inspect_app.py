"""The inspector on a terminal: one run of the application presses every key; each test reads what was on the screen."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest
from builders import ledger_episode, scored, write_tokenizer
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import OptionList, Static, TabbedContent

from condensegrpo.cli.inspect_app.app import InspectorApp
from condensegrpo.cli.inspect_app.selection import Selection, sparkline
from condensegrpo.core.trajectory import Stop
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.views import ready_view
from condensegrpo.storage.credit import Credit, write_credit
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import Provenance, write_trajectory

SAMPLED_WITH = Provenance(
    evaluation=None, step=1, model="m", condenser="last_k", max_context_tokens=64, temperature=1.0, seed=0
)
REPLIES = ["<note> 3 </note>", "<note> 5 </note>", "<answer> 6 </answer>"]
OTHER = ["<note> 3 </note>", "<note> 1 </note>", "<answer> 2 </answer>"]


def add_step(run: RunFolder, step: int, *, evaluation: str | None = None) -> None:
    """Two problems, each with a right and a wrong trajectory; the right one of the second is pushed down."""
    known = replace(SAMPLED_WITH, step=step, evaluation=evaluation)
    file = run.evaluation(step, evaluation) if evaluation else run.trajectories(step)
    file.parent.mkdir(parents=True, exist_ok=True)
    for problem in (0, 1):
        for sample, replies in ((0, REPLIES), (1, OTHER)):
            group = f"{step}/{problem}"
            one = ledger_episode(
                replies, ["+2", "done report"], keep_last=1, id=f"{group}/{sample}", group=group, sample=sample,
                answer=replies[-1].split()[1], stop=Stop.ANSWERED,
            )  # fmt: skip
            one = replace(one, problem_id=f"p{problem}", question="start 3", ground_truth="6")
            write_trajectory(file, scored(one, 1.0 - sample, correct=1.0 - sample), known)
    credit = {f"{step}/0/0": 0.7, f"{step}/0/1": -0.7, f"{step}/1/0": -0.1, f"{step}/1/1": 0.1}
    if evaluation is None:
        write_credit(
            run.credit(step),
            [Credit(trajectory=name, advantages=(value,) * 3, weights=(0.01,) * 3) for name, value in credit.items()],
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
        self.screens[name] = {**texts, **lists, "tab": tab, "command": self.app.selection.command()}


@pytest.fixture(scope="module")
def screens(run: RunFolder) -> dict[str, dict[str, str]]:
    """One run of the application."""

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
            seen.screens["keys"]["keys"] = str(app.screen.query_one(".box", Static).content)
            await seen.press("problem", "escape", "p")
            await seen.press("groups", "escape")
            await seen.press("view", "v", "enter")
            await seen.press("search", "slash", *"nte5", "enter")
            await seen.press(
                "condition", "slash", *["equals_sign", *"correct", "equals_sign", "equals_sign", "0"], "enter"
            )
            await seen.press("no condition", "slash", "equals_sign", "x", "enter")
            await seen.press("step", "escape", "left_square_bracket")
            await seen.press("no step", "left_square_bracket")
            await seen.press("evaluation", "right_square_bracket", "e")
            await seen.press("training", "e")
            await seen.press("arrow", "down")
            await pilot.click("#siblings", offset=(4, 1))
            await seen.press("copy", "y")
            seen.screens["copy"]["clipboard"] = app.clipboard
            await seen.press("follow", "f")
            add_step(run, 3)
            app._poll()
            await seen.press("live")
            await pilot.press("q")
        return seen.screens

    return asyncio.run(scenario())


Screens = dict[str, dict[str, str]]


def test_the_first_screen_has_steps_groups_siblings_and_turns(screens: Screens) -> None:
    start = screens["start"]
    assert "demo training · step 2 · 4 trajectories" in start["top"]
    assert "success ▅▅ 0.50" in " ".join(start["top"].split())
    assert "groups with signal ██ 1.00" in start["top"]
    assert start["list"].splitlines()[:2] == ["2/0 ████░░░░ 1/2  ● signal", "start 3 → 6"]
    assert [line.split()[:3] for line in start["siblings"].splitlines()] == [["0", "✓", "1.000"], ["1", "✗", "0.000"]]
    assert [line.split() for line in start["turns"].splitlines()] == [
        ["0", "9", "tokens", "+0.70", "▸"],
        ["1", "17", "tokens", "+0.70", "■■", "▸"],
        ["2", "18/26", "tokens", "+0.70", "░░", "■■", "▸"],
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
    reply = screens["reply"]["reply-text"]
    assert "advantage +0.700 ▲ made likelier (underlined)" in reply
    assert "<note> 5 </note> <end>" in reply
    credit = " ".join(screens["credit"]["credit-text"].split())
    assert (
        "N(R) +0.7071 the reward against the group: (R − mean) / (deviation + ε) = (1 − 0.5) / (0.7071 + 1e-06)"
        in credit
    )
    assert "advantage +0.7 grpo: N(R); these give +0.7071" in credit  # of 0.7 in the file
    assert '"added_ids": [' in screens["raw"]["raw-text"]
    assert "-0.50" in screens["ids"]["reply-text"]


def test_siblings_are_compared_from_their_first_difference(screens: Screens) -> None:
    assert "2/0/0 and 2/0/1: first difference: the reply of turn 1" in " ".join(
        screens["compare"]["difference"].split()
    )
    assert "<note> 5 </note>" in screens["compare"]["left"]
    assert "<note> 1 </note>" in screens["compare"]["right"]


def test_a_problem_is_followed_through_training(screens: Screens) -> None:
    assert [line.split(" ████")[0] for line in screens["problem"]["list"].splitlines()[::2]] == [
        "step 1 · 1/0", "step 2 · 2/0", "evaluation step 2 · 2/0",
    ]  # fmt: skip
    assert screens["problem"]["list-title"].startswith("p0 ")
    assert screens["groups"]["list-title"].startswith("2 groups")


def test_views_searches_and_conditions_list_trajectories_of_all_steps(screens: Screens) -> None:
    def ids(name: str) -> list[str]:
        return [line.split()[0] for line in screens[name]["list"].splitlines()[::2]]

    assert ids("view") == ["1/1/0", "2/1/0"]
    assert screens["view"]["list-title"].startswith("correct but pushed down: 2")
    assert ids("condition") == ["1/0/1", "1/1/1", "2/0/1", "2/1/1", "2/0/1", "2/1/1"]
    assert "'nte5': 0" in screens["search"]["list-title"]
    assert ids("no condition") == ids("condition")  # a notice says what is wrong


def test_evaluations_are_beside_training(screens: Screens) -> None:
    assert "evaluation held-out · step 2" in screens["evaluation"]["top"]
    assert "training · step 2" in screens["training"]["top"]


def test_the_command_that_shows_this_is_copied(screens: Screens, run: RunFolder) -> None:
    wanted = f"condensegrpo inspect {run.path} --step 2 --trajectory 2/1/1 --turn 0"
    assert screens["copy"]["clipboard"] == screens["copy"]["command"] == wanted


def test_a_live_run_is_followed(screens: Screens) -> None:
    assert "following" in screens["follow"]["top"]
    assert "training · step 3" in screens["live"]["top"]


def test_every_key_is_explained(screens: Screens) -> None:
    keys = screens["keys"]["keys"]
    for key in ("[ ]", "e ", "f ", "h l", "j k", "/ ", "v ", "p ", "d ", "y ", "t ", "q ", "Esc"):
        assert key in keys


def test_the_first_view_can_be_chosen(run: RunFolder) -> None:
    async def scenario() -> str:
        app = InspectorApp(Selection(Index(run.path), run.trajectories(1)), view=ready_view("pushed-down"))
        async with app.run_test(size=(60, 20)) as pilot:  # as narrow as a terminal may be
            await app.workers.wait_for_complete()
            await pilot.pause()
            return text(app, "list-title")

    assert asyncio.run(scenario()).startswith("correct but pushed down")


def test_a_sparkline_averages_what_does_not_fit() -> None:
    assert sparkline([0.0, 1.0, None], 8) == "▁█ "
    assert sparkline([0.0, 1.0, 0.0, 1.0], 2) == "▅▅"
    assert sparkline([], 8) == ""


def test_the_application_loads_no_torch() -> None:
    code = "import sys, condensegrpo.cli.inspect_app.app; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
