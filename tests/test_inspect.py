import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import typer
from builders import IDS, add_trajectory, condensation, ledger_episode, scored, trajectory, turn, write_tokenizer
from command import run as run_command
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer.testing import CliRunner, Result

from condensegrpo.cli.inspect import breaches, inspect_trajectory
from condensegrpo.core.errors import CondenseError, ConfigError, DataError, RunError, TrajectoryFileError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Rejected, Score, StopReason
from condensegrpo.display.theme import BAD, GOOD, PLAIN_WIDTH, console, excerpt, neutral, one_line, signed_style
from condensegrpo.display.trajectory_view import Glosses, token_grid
from condensegrpo.inspection.batches import choose, credit_of
from condensegrpo.inspection.filters import FIELDS
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.panes import TokenView, turns
from condensegrpo.inspection.records import IndexedTrajectory, groups
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import (
    Credit,
    Provenance,
    read_credit,
    read_trajectories,
    write_credit,
    write_trajectories,
)

CONFIG = """
name: demo
model: {new: {}}
task: {name: ledger}
rollout: {limits: {max_context_tokens: 48}}
"""
REPLIES = ["<note> 3 </note>", "<note> 5 </note>", "<note> 6 </note>", "<answer> 6 </answer>"]
OPERATIONS = ["+2", "+1", "done report"]
ALONE = """
import typer
from condensegrpo.cli.inspect import inspect_trajectory
typer.run(inspect_trajectory)
"""


def command() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(inspect_trajectory)
    return app


def inspect(*arguments: object) -> str:
    """What the command prints; its own errors are raised."""
    result = run(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(command(), [str(argument) for argument in arguments])


def episode(group: str, sample: int, total: float, *, keep_last: int | None = 1) -> ScoredTrajectory:
    name = f"{group}/{sample}"
    one = ledger_episode(REPLIES, OPERATIONS, keep_last=keep_last, id=name, group=group, answer="6", sample=sample)
    return scored(one, total, correct=float(total > 0), components={"correct": float(total > 0), "short": total / 10})


def credit(one: ScoredTrajectory, *advantages: float) -> Credit:
    return Credit(trajectory=one.trajectory.id, advantages=advantages, weights=(0.001,) * len(advantages))


SAMPLED_WITH = Provenance(
    evaluation=None, step=2, model="m", condenser="last_k", max_context_tokens=48, temperature=1.0, seed=0
)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """Two steps; in step 2, group p2 has no signal, p10 has: a right, short one and a wrong one with a long context."""
    folder = RunFolder.create(tmp_path / "demo")
    folder.config.write_text(CONFIG)
    add_trajectory(folder.trajectories(1), episode("p1", 0, 0.5), replace(SAMPLED_WITH, step=1))
    same = [episode("p2", sample, 0.5) for sample in (0, 1)]
    right, wrong = episode("p10", 0, 0.5), episode("p10", 1, 0.0, keep_last=None)
    write_trajectories(folder.trajectories(2), (wrong, *same, right), SAMPLED_WITH)
    flat = [credit(one, 0.0, 0.0, 0.0, 0.0) for one in same]
    write_credit(folder.credit(2), [*flat, credit(right, 1.0, 1.0, 1.0, 1.0), credit(wrong, -1.0, -1.0, -0.5, -1.0)])
    return folder.path


# --- what is shown


def test_groups_come_first_and_those_without_signal_are_flagged(demo: Path) -> None:
    lines = inspect(demo).splitlines()
    assert "step 2 · 4 trajectories" in lines[0]
    flagged = [line for line in lines if "no signal" in line]
    assert len(flagged) == 1
    assert flagged[0].split()[:3] == ["p2", "2", "1.00"]
    chosen = next(line for line in lines if line.strip().startswith("▶"))
    assert chosen.split()[1:4] == ["p10", "2", "0.50"]
    assert any("2 groups, 1 without signal" in line for line in lines)


def test_the_siblings_of_the_first_group_with_signal_are_listed(demo: Path) -> None:
    lines = inspect(demo).splitlines()
    title = next(place for place, line in enumerate(lines) if line.startswith("group p10"))
    table = lines[title : title + 6]
    assert table[2].split() == [
        "#",
        "trajectory",
        "score",
        "correct",
        "short",
        "advantage",
        "turns",
        "context",
        "output",
        "price",
        "stop",
        "answer",
    ]
    assert table[4].split() == [
        "▶",
        "2",
        "p10/0",
        "✓",
        "correct",
        "0.500",
        "1",
        "0.05",
        "+1.00",
        "4",
        "18",
        "16",
        "99",
        "answered",
        "6",
    ]
    assert table[5].split()[:8] == ["3", "p10/1", "✗", "wrong", "0.000", "0", "0", "-1.00"]
    assert "-1.00 … -0.50" in table[5]


@pytest.mark.parametrize(
    ("handling", "group", "heading"),
    [
        ("mask", "masked", "masked: its stop, answered, trains nothing"),
        ("drop", "dropped", "dropped: no trajectory of its group has an advantage"),
        ("train", "no signal", "no signal: it has no advantage at any turn"),
        ("penalise", "no signal", "penalised: its stop, answered, counts as wrong"),
    ],
)
def test_masked_dropped_and_idle_are_told_apart(
    demo: Path, handling: Literal["train", "mask", "penalise", "drop"], group: str, heading: str
) -> None:
    file = RunFolder(demo).credit(2)
    written = read_credit(file)
    write_credit(
        file, [replace(one, handling=handling) if name.startswith("p2/") else one for name, one in written.items()]
    )
    text = inspect(demo, "--trajectory", "p2/0")
    assert f"group p2: {group}, nothing is learned from it" in text
    assert heading in text
    assert ("answered (masked)" in text, "answered (penalised)" in text) == (handling == "mask", handling == "penalise")
    flagged = [line for line in inspect(demo).splitlines() if "○" in line]
    assert [line.rpartition("○")[2].strip() for line in flagged] == [group]


def test_a_trajectory_that_trains_says_nothing_of_how_it_was_handled(demo: Path) -> None:
    text = inspect(demo, "--trajectory", "p10/1")
    assert not [told for told in ("masked", "dropped: ", "penalised", "no signal: ") if told in text]


def test_a_group_of_which_one_is_masked_still_teaches(demo: Path) -> None:
    file = RunFolder(demo).credit(2)
    written = read_credit(file)
    flat = replace(written["p10/1"], advantages=(0.0,) * 4, weights=(0.0,) * 4, handling="mask")
    write_credit(file, (written | {"p10/1": flat}).values())
    text = inspect(demo, "--trajectory", "p10/1")
    assert "group p10: " not in text
    assert "masked: its stop, answered" in text


def test_the_credit_is_said_in_one_sentence_also_with_tokens(demo: Path) -> None:
    sentence = "credit       1 of 2 right, this one right; "
    for options in ((), ("--tokens",)):
        (line,) = [line for line in inspect(demo, *options).splitlines() if line.startswith(sentence)]
        assert line.endswith(": +1.00")
        assert " tokens against the siblings' " in line


def test_a_condensation_at_a_glance(demo: Path) -> None:
    """Each turn is one line: which units its prompt still shows, what the prompt is made of, tokens before → after."""
    lines = [line.rstrip() for line in inspect(demo).splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("turn  0  1  2  3"))
    glance = [line.split() for line in lines[start + 1 : start + 5]]
    assert glance[0][:2] == ["0", "▸"]
    assert glance[1][:3] == ["1", "■■", "▸"]
    assert glance[2][:4] == ["2", "░░", "■■", "▸"]
    assert glance[3][:5] == ["3", "░░", "░░", "■■", "▸"]
    assert glance[3][6:] == ["34", "→", "18", "4", "+1.00"]
    assert glance[0][3:] == ["9", "4", "+1.00"]
    bar = glance[3][5]
    assert len(bar) == 34
    assert list(dict.fromkeys(bar)) == ["█", "■", "◆", "░", "·"]
    assert "context of 48 tokens" in lines[start]


def test_every_turn_is_told(demo: Path) -> None:
    text = inspect(demo, "--turn", 3)
    assert "turn 3   condensed by last_k   34 → 18 tokens" in text
    assert "turn 2 " not in text
    assert [number for number in range(4) if f"\n   {number}  " in text] == [0, 1, 2, 3]  # the overview has every turn
    assert "░ dropped turns 0–1, 16 tokens" in text
    assert "■ kept turn 2, 9 tokens" in text
    assert "pinned 9  kept 4  newest 5  free 30" in text
    assert "sees user  done report" in text
    assert "reply      <answer> 6 </answer>" in text
    assert "advantage +1.000   weight 0.001 a token" in text


def test_tool_calls_and_results_are_told(tmp_path: Path) -> None:
    call = ToolCall(id="1", name="calculator", arguments='{"expression": "3+2"}')
    reply = Message(role="assistant", content="let me see", tool_calls=(call,))
    result = Message(role="tool", content="5", tool_call_id="1", name="calculator")
    one = replace(turn([1], [2]), reply=reply, observations=(result,), turn_rewards={"tool_calls": 0.25})
    add_trajectory(tmp_path / "t.parquet", scored(trajectory(one), 1.0))
    text = inspect(tmp_path / "t.parquet")
    assert 'calculator({"expression": "3+2"})' in text
    assert "then calculator  5" in text
    assert "tool_calls 0.25" in text


def test_what_the_reward_pays_a_turn_stands_beside_what_the_environment_does(tmp_path: Path) -> None:
    one = trajectory(replace(turn([1], [2]), turn_rewards={"hint": 0.25}), turn([1], [2]))
    add_trajectory(tmp_path / "t.parquet", scored(one, 1.0, turn_rewards=(0.1, 0.0)))
    first, _, second = inspect(tmp_path / "t.parquet").partition("turn 1 ")
    assert "hint 0.25" in first
    assert "of the turn 0.1\n" in first
    assert "of the turn 0\n" in second
    turns = json.loads(inspect(tmp_path / "t.parquet", "--json"))["turns"]
    assert [each["paid"] for each in turns] == [0.1, 0.0]


def test_a_turn_that_no_reward_pays_says_nothing_of_it(demo: Path) -> None:
    assert "of the turn" not in inspect(demo)


def test_a_step_and_a_file_can_be_named(demo: Path) -> None:
    assert "step 1 · 1 trajectory" in inspect(demo, "--step", 1)
    text = inspect(demo / "trajectories" / "step_000002.parquet")
    assert "+1.00" in text  # the credit beside it was found
    assert "context of 48 tokens" in text  # and the budget


def test_where_and_sort_choose(demo: Path) -> None:
    text = inspect(demo, "--where", "correct == 0")
    assert "1 trajectory where correct == 0" in text
    assert "p10/1   ✗ wrong   score 0" in text
    ordered = json.loads(inspect(demo, "--sort", "-context", "--json"))
    assert [one["id"] for one in ordered["matches"]] == ["p10/1", "p2/0", "p2/1", "p10/0"]
    assert ordered["trajectory"]["id"] == "p10/1"


def test_a_group_and_a_trajectory_can_be_named(demo: Path) -> None:
    text = inspect(demo, "--group", "p2")
    assert "groups," not in text
    assert "group p2: no signal, nothing is learned from it" in text
    assert "p2/1   ✓ correct" in inspect(demo, "--trajectory", "p2/1")
    assert "p2/1   ✓ correct" in inspect(demo, "p2/1")


def test_of_an_imported_log_the_budget_is_the_largest_context(demo: Path) -> None:
    file = RunFolder(demo).trajectories(2)
    write_trajectories(file, read_trajectories(file))  # as it is imported: without what it was sampled with
    assert "context of 34 tokens" in inspect(demo)


def test_a_trajectory_without_turns_is_shown(tmp_path: Path) -> None:
    failed = trajectory(stop=StopReason.SAMPLER_ERROR, answer=None)
    one = ScoredTrajectory.of(
        replace(failed, detail="out of memory"),
        Score(total=0.0, components={}, format_valid=False, correct=0.0, context_tokens=0),
    )
    add_trajectory(tmp_path / "t.parquet", one)
    text = inspect(tmp_path / "t.parquet")
    assert "no turn was sampled" in text
    assert "out of memory" in text
    assert "✗ malformed" in text


def test_question_and_ground_truth_are_shown_if_known(tmp_path: Path) -> None:
    one = trajectory(turn([1], [2]))
    add_trajectory(tmp_path / "t.parquet", scored(one, 1.0))
    assert "ground truth" not in inspect(tmp_path / "t.parquet")
    add_trajectory(tmp_path / "u.parquet", scored(replace(one, question="3 + 4?", ground_truth="7"), 1.0))
    lines = [line.strip() for line in inspect(tmp_path / "u.parquet").splitlines()]
    assert next(line for line in lines if line.startswith("p0/0")).endswith("answered '7'")
    assert "question     3 + 4?" in lines
    assert "ground truth 7" in lines
    (group,) = [line.split() for line in lines if line.startswith("▶  p0  ")]
    assert group[:6] == ["▶", "p0", "3", "+", "4?", "7"]
    found = inspect(tmp_path / "u.parquet", "--where", "'3 +' in question and ground_truth == answer", "--json")
    (match,) = json.loads(found)["matches"]
    assert (match["question"], match["ground_truth"], match["answer"]) == ("3 + 4?", "7", "7")


def test_a_task_without_an_answer_in_text_says_who_judges(tmp_path: Path) -> None:
    one = replace(trajectory(turn([1], [2])), question="Reach the door.", ground_truth=None, answer="done")
    add_trajectory(tmp_path / "t.parquet", scored(one, 0.5, components={"reached": 0.0, "steps": 0.5}))
    text = inspect(tmp_path / "t.parquet")
    assert "ground truth none in text: the environment or the reward judges" in text
    assert "reward parts reached 0   steps 0.5" in text


def test_a_long_question_is_shown_whole_on_demand(tmp_path: Path) -> None:
    one = replace(trajectory(turn([1], [2])), question="word " * 400, ground_truth="pass " * 400)
    add_trajectory(tmp_path / "t.parquet", scored(one, 1.0))
    short, full = inspect(tmp_path / "t.parquet", "--turn", 0), inspect(tmp_path / "t.parquet", "--turn", 0, "--full")
    assert short.count("word") < 100 > short.count("pass")
    assert (full.count("word") >= 400, full.count("pass") >= 400) == (True, True)


def test_long_texts_are_cut_unless_asked_for(tmp_path: Path) -> None:
    add_trajectory(tmp_path / "t.parquet", scored(trajectory(turn([1], [2], reply="word " * 400)), 1.0))
    short, full = inspect(tmp_path / "t.parquet"), inspect(tmp_path / "t.parquet", "--full")
    assert (short.count("word"), full.count("word")) == (120, 400)
    assert "(1400 more characters: --full)" in " ".join(short.split())


# --- tokens


def test_tokens_have_text_id_and_logprob(demo: Path) -> None:
    write_tokenizer(demo / "origin/new")
    lines = [line.strip() for line in inspect(demo, "--turn", 3, "--tokens").splitlines()]
    place = lines.index(next(line for line in lines if line.startswith("<answer>      6  </answer>")))
    assert lines[place].split() == ["<answer>", "6", "</answer>", "<end>"]
    assert lines[place + 1].split() == [str(IDS[word]) for word in ("<answer>", "6", "</answer>", "<end>")]
    assert lines[place + 2].split() == ["-0.50"] * 4


def test_tokens_without_a_tokenizer_are_ids_and_say_so(demo: Path) -> None:
    text = inspect(demo, "--turn", 3, "--tokens")
    assert "no tokenizer.json was found" in text
    assert f"{IDS['<answer>']}" in text


def test_the_tokenizer_of_the_recorded_model_is_found(demo: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "policy")
    file = RunFolder(demo).trajectories(2)
    write_trajectories(file, read_trajectories(file), replace(SAMPLED_WITH, model=str(tmp_path / "policy")))
    view = json.loads(inspect(demo, "--turn", 3, "--tokens", "--json"))
    assert view["tokenizer"] == str(tmp_path / "policy" / "tokenizer.json")
    assert [token["text"] for token in view["turns"][0]["tokens"]] == ["<answer>", "6", "</answer>", "<end>"]


def glosses(texts: list[str], *, width: int, logprob: float = -0.25) -> list[str]:
    tokens = tuple(TokenView(id=place, text=text, logprob=logprob) for place, text in enumerate(texts))
    screen = Console(width=width, color_system=None)
    with screen.capture() as capture:
        screen.print(Glosses(tokens, "red"))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_glosses_stand_under_each_other_and_wrap() -> None:
    assert glosses(["one", "three", "漢字"], width=18) == [
        "  one  three",
        "    0      1",
        "-0.25  -0.25",
        "",
        " 漢字",
        "    2",
        "-0.25",
        "",
    ]


def test_blanks_and_line_feeds_of_a_token_are_seen() -> None:
    assert glosses([" a\n", "\x1b"], width=80)[0] == "  ␣a⏎      ␛"
    assert glosses([], width=80) == []


def test_a_token_wider_than_the_console_still_has_its_line() -> None:
    assert len(glosses(["x" * 60, "y"], width=10)) >= 8


def test_tokens_that_are_not_trained_have_no_colour(demo: Path) -> None:
    index, file = Index(demo), choose(demo, None)
    index.update()
    one = read_trajectories(file)[0]
    untrained = Credit(trajectory=one.trajectory.id, advantages=(1.0,) * 4, weights=(0.0,) * 4)
    trained = replace(untrained, weights=(0.5,) * 4)
    styles = []
    for each in (untrained, trained):
        view = turns(one, each, budget=48, tokenizer=index.batch(file).texts)[0]
        screen = Console(width=100, force_terminal=True, color_system="truecolor")
        with screen.capture() as capture:
            screen.print(token_grid(view, 1.0))
        styles.append("48;2;12;128;103" in capture.get())  # the background of a full positive advantage
    assert styles == [False, True]


def test_a_condense_turn_is_told_as_one(tmp_path: Path) -> None:
    """A policy that writes its own summary: turn 1 condenses, turn 2 goes on from the summary."""
    summary = replace(turn([1, 2, 3, 4], [5, 6], reply="so far: 3"), kind="condense")
    rewritten = condensation("r", [3], before=9, after=5, condenser="summary")
    one = trajectory(turn([1, 2], [3]), summary, turn([1, 2, 5, 6, 8], [9], condensation=rewritten))
    reason = "it was cut off by its length"
    refused = Rejected(before=1, prompt_ids=(1,), output_ids=(5, 5), policy_version=0, text="so so", reason=reason)
    one = replace(one, rejected=(refused, replace(refused, before=3, text="late")))
    add_trajectory(tmp_path / "t.parquet", scored(one, 1.0))
    text = inspect(tmp_path / "t.parquet")
    assert "turn 1 condense" in text
    assert "2 tokens, rejected: it was cut off by its length: so so" in text
    views = json.loads(inspect(tmp_path / "t.parquet", "--json"))["turns"]
    assert [[each["text"] for each in view["rejected"]] for view in views] == [[], ["so so"], ["late"]]
    assert "condensed by summary   9 → 5 tokens" in text
    assert "▒ rewritten turn 0, 3 tokens" in text


def test_colours_follow_the_sign_and_size_of_the_advantage() -> None:
    strong, weak = signed_style(1.0, 1.0), signed_style(0.1, 1.0)
    assert strong == GOOD
    assert weak != strong
    assert signed_style(-1.0, 1.0) == BAD
    assert signed_style(0.0, 1.0) == signed_style(0.5, 0.0)
    assert signed_style(-1.0, 1.0, background=True) == "#ffffff on #a8581d"


# --- for machines


def test_json_is_one_object_with_everything(demo: Path) -> None:
    view = json.loads(inspect(demo, "--json"))
    assert (view["version"], view["step"]) == (5, 2)
    assert [(group["id"], group["signal"]) for group in view["groups"]] == [("p2", False), ("p10", True)]
    last = view["turns"][3]
    context = last["context"]
    assert context["pinned"] + context["kept"] + context["newest"] == context["tokens"] == 18
    assert last["condensation"]["spans"][0] == {"first": 0, "last": 0, "units": 1, "status": "dropped", "tokens": 8}
    assert (last["advantage"], last["weight"], last["tokens"]) == (1.0, 0.001, None)


def test_every_field_of_the_filter_is_known_of_a_trajectory(demo: Path) -> None:
    every = records(demo)
    assert all(tuple(one.fields)[: len(FIELDS)] == tuple(FIELDS) for one in every)
    assert [one.id for one in every] == ["p2/0", "p2/1", "p10/0", "p10/1"]


def test_a_group_has_signal_if_any_advantage_is_not_zero(tmp_path: Path) -> None:
    def signal(*totals: float, advantage: float | None = None) -> bool | None:
        known = None if advantage is None else Credit(trajectory="p0/0", advantages=(advantage,), weights=(1.0,))
        every = [replace(one, figures=replace(one.figures, total=total), credit=known) for total in totals]
        return groups(every)[0].signal

    add_trajectory(tmp_path / "t.parquet", episode("p0", 0, 1.0))
    (one,) = records(tmp_path / "t.parquet")

    assert signal(1.0, 1.0, advantage=0.1) is True
    assert signal(1.0, 0.0, advantage=0.0) is False
    assert signal(1.0, 1.0) is None  # no credit yet: an estimator may compare contexts where scores are equal


def records(path: Path) -> list[IndexedTrajectory]:
    """Those of the last step."""
    index, file = Index(path), choose(path, None)
    return list(index.batch(file).records())


def test_a_picture_shows_what_the_terminal_shows(demo: Path, tmp_path: Path) -> None:
    inspect(demo, "--svg", tmp_path / "glance.svg")
    svg = (tmp_path / "glance.svg").read_text()
    assert svg.startswith("<svg")
    assert "condensegrpo&#160;inspect" in svg
    assert "░░" in svg
    assert GOOD in svg
    assert "@font-face" not in svg
    assert "url(http" not in svg.replace('"', "")  # nothing is fetched, such as fonts


# --- checks


def checked(*some: ScoredTrajectory, tmp_path: Path, given: list[Credit] | None = None) -> tuple[str, ...]:
    folder = RunFolder.create(tmp_path / "run")
    folder.config.write_text(CONFIG)
    write_trajectories(folder.trajectories(1), some)
    if given is not None:
        write_credit(folder.credit(1), given)
    file = choose(folder.path, None)
    return breaches(read_trajectories(file), credit_of(file))


def test_a_sound_run_has_no_breach(demo: Path) -> None:
    assert "4 trajectories, 16 turns, no breach" in " ".join(inspect(demo, "--check").split())
    assert list(json.loads(inspect(demo, "--check", "--json"))["breaches"].values()) == [[], []]  # of both steps


def test_a_line_of_a_check_is_not_broken_however_long_the_path_is(demo: Path) -> None:
    (demo / "trajectories" / "step_000001.parquet").unlink()
    done = CliRunner(env={"COLUMNS": "30"}).invoke(command(), [str(demo), "--check"])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{demo}/trajectories/step_000002.parquet: 4 trajectories, 16 turns, no breach\n"


def test_an_undeclared_condensation_is_a_breach(tmp_path: Path) -> None:
    """The pitfall of the field: a rewritten prompt that nobody declared."""
    one = scored(trajectory(turn([1, 2], [10]), turn([1, 2, 99], [11])), 0.5)
    found = checked(one, tmp_path=tmp_path)
    assert len(found) == 1
    assert found[0].startswith("p0/0: turn 1 does not continue turn 0: at token 2 the prompt holds 99")


def test_scores_groups_and_ids_that_do_not_fit_are_breaches(tmp_path: Path) -> None:
    one = scored(trajectory(turn([1, 2], [10]), id="a"), 0.5)
    other = ScoredTrajectory.of(replace(one.trajectory, problem_id="another"), one.score)
    odd = ScoredTrajectory.of(replace(one.trajectory, id="b"), replace(one.score, context_tokens=9, correct=2.0))
    assert checked(one, other, odd, tmp_path=tmp_path) == (
        "b: the score counts 9 context tokens, its largest prompt has 2",
        "b: correct is 2.0, wanted a number from 0 to 1",
        "group p0 holds problem p0 and, in a, problem another",
        "a is in the file twice",
    )


def test_credit_that_does_not_fit_is_a_breach(tmp_path: Path) -> None:
    some = [scored(trajectory(turn([1], [10]), id=name), 0.5) for name in "abc"]
    given = [
        Credit(trajectory="a", advantages=(1.0, 2.0), weights=(0.1, 0.1)),
        Credit(trajectory="b", advantages=(float("nan"),), weights=(-1.0,)),
        Credit(trajectory="z", advantages=(), weights=()),
    ]
    assert checked(*some, tmp_path=tmp_path, given=given) == (
        "c has no credit",
        "a: it has 1 turns and credit for 2",
        "b: the advantage of turn 0 is nan",
        "b: the token weight of turn 0 is -1.0, wanted a finite number of at least 0",
        "the credit of z belongs to no trajectory of the file",
    )


def test_a_breach_ends_with_exit_code_1(demo: Path) -> None:
    file = demo / "trajectories" / "step_000002.parquet"
    whole = read_trajectories(file)
    unanswered = replace(whole[0], trajectory=replace(whole[0].trajectory, answer=None))
    write_trajectories(file, [unanswered, *whole[1:]])
    result = run(demo, "--check")
    assert result.exit_code == 1
    assert "✗ p10/1: the trajectory stopped as 'answered' with the answer None" in result.stdout
    assert "step_000001.parquet: 1 trajectory, 4 turns, no breach" in result.stdout
    file.write_bytes(file.read_bytes()[:-50])
    result = run(demo, "--check")
    assert result.exit_code == 1
    assert f"✗ reading {file}: it is not a whole Parquet file" in result.stdout
    assert run(demo, "--check", "--json").exit_code == 1


# --- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["--step", "7"], RunError, "step 7 has no trajectories. There are steps 1–2."),
        (["--group", "p3"], DataError, "looking for group 'p3': there are p2, p10."),
        (["--trajectory", "x"], DataError, "looking for trajectory 'x': there are p2/0, p2/1"),
        (["--where", "score > 9"], DataError, "none of 4 is left"),
        (["--where", "socre > 9"], ConfigError, "Did you mean 'score'?"),
        (["--sort", "-contxt"], ConfigError, "Did you mean 'context'?"),
        (["--view", "truncatd"], ConfigError, "Did you mean 'truncated'?"),
        (["--view", "lost-fact", "--view", "truncated"], ConfigError, "wanted one view"),
        (["--view", "truncated", "--where", "score > 9"], DataError, "where (truncated) and (score > 9): none of 4"),
        (["--html", "a.html", "--svg", "b.svg"], ConfigError, "reading --html: it goes without --svg"),
        (["--view", "got-worse", "--where", "correct == 0"], ConfigError, "it goes without --where. It lists problems"),
        (["--html", "page.pdf"], ConfigError, "wanted a name that ends in .html, for a page, or .svg"),
        (["--turn", "9"], DataError, "it has 4 turns, counted from 0"),
    ],
)
def test_what_is_not_there_is_named(demo: Path, arguments: list[str], kind: type[CondenseError], said: str) -> None:
    with pytest.raises(kind) as caught:
        inspect(demo, *arguments)
    assert said in str(caught.value)


def test_no_run_no_trajectories_and_no_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no config\.yaml"):
        inspect(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunError, match="there is no such run folder or trajectory file"):
        inspect(tmp_path / "none")
    run = RunFolder.create(tmp_path / "fresh")
    run.config.write_text(CONFIG)
    with pytest.raises(RunError, match="there are no trajectories yet"):
        inspect(run.path)
    write_trajectories(tmp_path / "empty.parquet", [])
    with pytest.raises(DataError, match="it holds no trajectory"):
        inspect(tmp_path / "empty.parquet")
    with pytest.raises(ConfigError, match="--step and --evaluation go with a folder"):
        inspect(tmp_path / "empty.parquet", "--step", 1)


def test_a_damaged_file_is_one_line_on_stderr_without_a_traceback(demo: Path) -> None:
    file = demo / "trajectories" / "step_000002.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    done = run_command("inspect-trajectory", str(demo))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "it is not a whole Parquet file" in done.stderr
    with pytest.raises(TrajectoryFileError):
        inspect(demo)


# --- model text is neutralised

EVIL = "\x1b[31mred\x1b[0m [red]markup[/red] [/nope] \x1b]8;;http://evil\x1b\\click\x1b]8;;\x07 "
EVIL += "\x9b2J \r\b\u202eback \ud800 :smile:"


def test_neutral_text_shows_what_would_act() -> None:
    shown = neutral(EVIL)
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 or char in "\u202e\ud800" for char in shown)
    assert shown.startswith("␛[31mred␛[0m [red]markup[/red]")
    assert "⟨U+009B⟩2J ␍␈⟨U+202E⟩back ⟨U+D800⟩" in shown
    assert neutral("plain text, ünïcödé, 漢字, 🙂\n") == "plain text, ünïcödé, 漢字, 🙂\n"
    assert neutral("a\x7fb") == "a␡b"
    assert one_line("a\nb" + "c" * 20, 6) == "a⏎bcc…"
    assert excerpt("abcdef", characters=6) == "abcdef"


def test_model_text_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    """Every place that shows text of a model, a tool or a file: reply, context, call, result, answer, ids, reasons."""
    call = ToolCall(id=EVIL, name=EVIL, arguments=EVIL)
    said = Message(role="tool", content=EVIL, name=EVIL)
    reply = Message(role="assistant", content=EVIL, tool_calls=(call,))
    head = Message(role="user", content=EVIL)
    first = replace(turn([1], [2]), context=(head,), reply=reply, observations=(said,), turn_rewards={EVIL: 1.0})
    declared = replace(condensation("d", [2], before=9, after=1), condenser=EVIL, reason=EVIL)
    second = replace(turn([5], [6], condensation=declared), context=(head, reply, said), reply=reply)
    one = replace(trajectory(first, second, id=EVIL, group=EVIL, answer=EVIL), detail=EVIL)
    add_trajectory(tmp_path / "t.parquet", scored(one, 1.0, components={EVIL: 1.0}))
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "140", "TERM": "xterm-256color"}
    shown = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "t.parquet"), "--full"],
        capture_output=True,
        check=True,
        env=environment,
    ).stdout.decode()
    sequences = {part.split("m")[0] for part in shown.split("\x1b")[1:]}
    assert all(sequence.startswith("[") and set(sequence[1:]) <= set("0123456789;") for sequence in sequences)
    assert not any(char in shown for char in "\x9b\r\b\x07\u202e")
    assert "[red]markup[/red] [/nope]" in shown.replace("\n", "")
    assert ":smile:" in shown
    as_json = inspect(tmp_path / "t.parquet", "--json")
    assert as_json.isascii()
    assert "\x1b" not in as_json
    assert json.loads(as_json)["turns"][0]["reply"] == EVIL.replace("\ud800", "?")
    check = run(tmp_path / "t.parquet", "--check")
    assert "\x1b" not in check.stdout


def test_a_console_neutralises_what_no_caller_did(capsys: pytest.CaptureFixture[str]) -> None:
    screen = console()
    screen.print(Text(EVIL), EVIL, Panel(EVIL))
    assert "\x1b" not in capsys.readouterr().out


def test_a_picture_neutralises_too(tmp_path: Path) -> None:
    add_trajectory(tmp_path / "t.parquet", scored(trajectory(turn([1], [2], reply=EVIL + "<script>")), 1.0))
    inspect(tmp_path / "t.parquet", "--svg", tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    assert "\x1b" not in svg
    assert "<script>" not in svg


def test_an_option_is_done_or_refused(tmp_path: Path) -> None:
    add_trajectory(tmp_path / "t.parquet", scored(trajectory(turn([1], [2], reply="ok")), 1.0))
    assert json.loads(inspect(tmp_path / "t.parquet", "--json", "--svg", tmp_path / "x.svg"))["turns"]
    assert (tmp_path / "x.svg").is_file()
    page = ("--html", tmp_path / "x.html")
    for options, wanted in (
        (("--check", *page, "--where", "turns > 3"), "reading --check: it goes without --where, --html"),
        ((*page, "--json", "--turn", "0"), "reading --html: it goes without --json, --turn"),
        (("0/0/0", "--trajectory", "1"), "found the trajectory 0/0/0 and --trajectory 1"),
    ):
        assert wanted in str(run(tmp_path / "t.parquet", *options).exception)
    assert not (tmp_path / "x.html").exists()


# --- the console


def test_output_that_is_no_terminal_is_plain_and_wide(demo: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(demo)],
        capture_output=True,
        check=True,
        env={**environment, "PYTHONIOENCODING": "ascii"},
    )
    text = done.stdout.decode("ascii")  # a terminal without such letters gets question marks
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) == PLAIN_WIDTH


def test_the_command_does_not_load_heavy_packages() -> None:
    code = """
import sys
import condensegrpo.cli.inspect, condensegrpo.cli.doctor, condensegrpo.cli.init
heavy = {"torch", "transformers", "deepspeed", "matplotlib", "numpy", "tokenizers", "pydantic", "yaml"}
sys.exit(", ".join(heavy & set(sys.modules)) or None)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_narrow_terminal_keeps_what_it_cost(demo: Path) -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(command(), [str(demo)])
    row = next(line for line in result.stdout.splitlines() if "p10/0" in line and "0.500" in line)
    assert row.split() == ["▶", "2", "p10/0", "✓", "0.500", "+1.00", "4", "18", "99", "answered"]
    group = next(line for line in result.stdout.splitlines() if "0.000…0.500" in line)
    assert group.split()[:5] == ["▶", "p10", "2", "0.50", "0.000…0.500"]
    narrower = CliRunner(env={"COLUMNS": "60"}).invoke(command(), [str(demo)]).stdout.splitlines()
    assert [line.split()[-3:] for line in narrower if line.startswith("   0  ▸")] == [["9", "4", "+1.00"]]
    assert [line.split()[1:4] for line in narrower if "0.000…0.500" in line] == [["p10", "2", "0.50"]]
    assert [line.split()[-1] for line in narrower if "p10/0" in line and "+1.00" in line] == ["answered"]
    assert all(len(line) <= 60 and line == line.rstrip() for line in narrower)


def test_markup_is_never_parsed() -> None:
    screen = console(None)
    assert isinstance(screen, Console)
    with screen.capture() as capture:
        screen.print("[red]x[/red]", Text("[bold]"), "[/]")
    assert capture.get() == "[red]x[/red] [bold] [/]\n"


def test_what_does_not_fit_on_a_line_goes_on_below_its_beginning(demo: Path) -> None:
    narrow = CliRunner(env={"COLUMNS": "52"}).invoke(command(), [str(demo)]).stdout.splitlines()
    credit = next(number for number, line in enumerate(narrow) if line.startswith("credit"))
    assert narrow[credit].startswith("credit       1 of 2 right")
    assert narrow[credit + 1].startswith(" " * len("credit       ") + "against")
    assert narrow[credit + 2].startswith("stop answered · 4 turns · largest context")
    assert narrow[credit + 3].startswith(" " * len("stop ") + "16 output tokens · price")
    legend = next(number for number, line in enumerate(narrow) if line.startswith("█ pinned"))
    assert narrow[legend : legend + 3] == [
        "█ pinned   ■ kept   ▒ rewritten",
        "◆ newest observation   ░ dropped",
        "· free, of 48 tokens",
    ]
