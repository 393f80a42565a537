"""The figures of trajectory files, and views and searches over all steps."""

from dataclasses import replace
from pathlib import Path

import pytest
from builders import add_trajectory, condensation, ledger_episode, scored, trajectory, turn, user
from command import run as run_command
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import condensegrpo as cg
from condensegrpo.cli.app import app
from condensegrpo.core.errors import ConfigError, TrajectoryFileError
from condensegrpo.core.messages import Message
from condensegrpo.core.scored_trajectory import ScoredTrajectory, holds
from condensegrpo.core.trajectory import SpanStatus, StopReason
from condensegrpo.inspection.batches import trajectory_files
from condensegrpo.inspection.filters import FIELDS
from condensegrpo.inspection.history import PieceStatus, WordChange, history, word_changes
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.panes import context_views
from condensegrpo.inspection.views import READY_VIEWS, find, full_text, fuzzy, got_worse, ready_view, search, select
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder
from condensegrpo.storage.trajectories import (
    Credit,
    Provenance,
    part_file,
    start_file,
    write_credit,
    write_trajectories,
)

REPLIES = ["<note> 3 </note>", "<note> 5 </note>", "<answer> 6 </answer>"]


def episode(step: int, problem: int, sample: int, *, correct: float = 1.0, truth: str = "6") -> ScoredTrajectory:
    group = f"{step}/{problem}"
    one = ledger_episode(
        REPLIES, ["+2", "done report"], keep_last=1, id=f"{group}/{sample}", group=group, sample=sample
    )  # fmt: skip
    return scored(
        replace(one, problem_id=f"p{problem}", question="start 3", ground_truth=truth), correct, correct=correct
    )


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Two steps of two problems; in step 2 a correct trajectory has a negative advantage."""
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("model: {new: {}}\ntask: {name: ledger}\n")
    for step in (1, 2):
        some = [(problem, sample) for problem in (10, 2) for sample in (0, 1)]
        every = [episode(step, problem, sample, correct=float(sample == 0)) for problem, sample in some]
        write_trajectories(run.trajectories(step), every)
    write_credit(
        run.credit(2),
        [
            Credit(trajectory=f"2/{problem}/{sample}", advantages=(value,) * 3, weights=(0.1,) * 3)
            for problem, sample, value in ((2, 0, -1.0), (2, 1, 1.0), (10, 0, 0.0), (10, 1, 0.0))
        ],
    )
    return run


def opened(path: Path) -> Index:
    index = Index(path)
    index.update()
    return index


def test_batches_groups_and_records_are_in_order(run: RunFolder) -> None:
    index = opened(run.path)
    first, second = index.batches()
    assert [(batch.number, batch.trajectories, batch.success, batch.signal) for batch in (first, second)] == [
        (1, 4, 0.5, None),
        (2, 4, 0.5, 0.5),
    ]
    assert [(group.id, group.signal) for group in second.groups()] == [("2/2", True), ("2/10", False)]
    assert [group.id for group in second.groups(1, 1)] == ["2/10"]
    records = list(index.records())
    assert [record.number for record in records] == [0, 1, 2, 3] * 2
    assert records[5].id == records[5].read().trajectory.id == "2/2/1"
    assert records[5].credit == Credit(trajectory="2/2/1", advantages=(1.0,) * 3, weights=(0.1,) * 3)
    assert records[7].id == "2/10/1"
    assert records[7] == second.group(records[7]).siblings[1]
    assert [(batch.number, group.id) for batch, group in index.follow("p10")] == [(1, "1/10"), (2, "2/10")]


def test_a_file_that_was_replaced_is_read_again_and_one_that_is_gone_is_forgotten(run: RunFolder) -> None:
    index, file = opened(run.path), run.trajectories(2)
    file.unlink()
    add_trajectory(file, episode(2, 7, 0))
    run.trajectories(1).unlink()
    index.update()
    assert [record.id for record in index.records()] == ["2/7/0"]


def test_batches_are_those_of_the_files_as_they_are_now(run: RunFolder) -> None:
    index = opened(run.path)
    every = [f"1/{problem}/{sample}" for problem in (10, 2) for sample in (0, 1)]
    write_credit(run.credit(1), [Credit(trajectory=name, advantages=(0.5,) * 3, weights=(0.1,) * 3) for name in every])
    assert find(index, None, where="step == 1 and advantage > 0", sort=None).total == 4
    assert [group.signal for _, group in index.follow("p2")] == [True, True]
    write_trajectories(run.trajectories(1), [episode(9, 3, 0)])  # as of a run that was resumed
    write_trajectories(part_file(run.trajectories(1), 1), [episode(9, 3, 1)])
    for found in (
        find(index, None, where="step == 1", sort=None).records,
        [hit.record for hit in full_text(index, "done report")][:2],
        [hit.record for hit in fuzzy(index, "9/3")],
    ):
        assert (
            [record.id for record in found] == [record.read().trajectory.id for record in found] == ["9/3/0", "9/3/1"]
        )
    run.trajectories(1).write_bytes(b"")
    assert [batch.trajectories for batch in index.batches()] == [2, 4]


def test_parts_of_a_batch_are_shown_as_one_and_numbers_count_its_groups_in_order(run: RunFolder) -> None:
    alone = trajectory(turn([1], [2], reply="found here"), id="1/7/0", group="1/7")
    write_trajectories(part_file(run.trajectories(1), 1), [episode(1, 7, 1), scored(alone, 1.0)])
    index = opened(run.path)
    (first, _) = index.batches()
    assert [record.id for record in first.records()] == ["1/2/0", "1/2/1", "1/7/0", "1/7/1", "1/10/0", "1/10/1"]
    assert [record.read().trajectory.id for record in first.records()][2:4] == ["1/7/0", "1/7/1"]
    assert [group.id for group in first.groups(1, 1)] == ["1/7"]
    assert [hit.record.id for hit in full_text(index, "DONE REPORT")][:2] == ["1/2/0", "1/2/1"]
    assert [hit.record.id for hit in full_text(index, "found here")] == ["1/7/0"]
    assert trajectory_files(run.path) == (run.trajectories(1), run.trajectories(2))


def test_a_run_that_was_moved_to_another_name_is_shown(run: RunFolder, tmp_path: Path) -> None:
    JsonlTracker(run.metrics).log(1, {"success": 0.5})
    path = run.path.rename(tmp_path / "my rün 测试")

    def printed(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    assert "step 2 · 4 trajectories" in printed("inspect", path)
    assert "8 of 8" in printed("inspect", path, "--html", tmp_path / "page.html")
    report = tmp_path / "my report.html"
    assert printed("report", path, "--output", report).strip() == str(report)
    assert not (path / "report.html").exists()
    assert "my rün 测试" in printed("runs", "--runs-dir", tmp_path)
    assert "success in training" in printed("runs", "compare", path)
    assert len(cg.Run(path).trajectories()) == 8
    assert report.stat().st_size > 0


# --- views and search


def test_ready_views_select_over_all_steps(run: RunFolder, tmp_path: Path) -> None:
    index = opened(run.path)
    view = ready_view("pushed-down")
    assert [record.id for record in select(index.records(), where=view.where, sort=view.sort).records] == ["2/2/0"]
    every = select(index.records(), where="correct == 0", sort="-context", most=2)
    assert (len(every.records), every.total) == (2, 4)
    every_field = " or ".join(f"{name} == 1" for name in index.field_names())
    for where, sort in ((every_field, None), (None, "group"), *((each.where, each.sort) for each in READY_VIEWS)):
        assert find(index, None, where=where, sort=sort) == select(index.records(), where=where, sort=sort)
    in_step = find(index, index.batches()[1], where="advantage < 0", sort=None).records
    assert [record.id for record in in_step] == ["2/2/0"]
    with pytest.raises(ConfigError, match="Did you mean 'truncated'"):
        ready_view("trunkated")


def test_a_condition_knows_the_step_the_evaluation_and_the_parts_of_the_reward(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    for step in (1, 2):
        one = replace(episode(step, 0, 0).trajectory)
        parts = {"brevity": step / 10, "of two words": 1.0}
        failed = scored(replace(one, id=f"{step}/0/9"), 0.0, components={})
        write_trajectories(run.trajectories(step), [failed, scored(one, 1.0, components=parts)])
    index = opened(run.path)
    assert index.field_names() == (*FIELDS, "brevity")  # the other name cannot be written in a condition
    for where in ("step == 2 and evaluation == None and score == 1", "brevity > 0.1", "step == 2 and brevity == 0.2"):
        for found in (find(index, None, where=where, sort="-brevity"), select(index.records(), where=where)):
            assert [record.id for record in found.records] == ["2/0/0"]
    with pytest.raises(ConfigError, match="Did you mean 'brevity'"):
        find(index, None, where="brevty > 0", sort=None)


def test_a_part_of_a_later_reward_and_one_in_other_letters_are_found(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    for sample, parts in enumerate(({"correct": 1.0}, {"correct": 1.0, "größe": 3.0})):
        add_trajectory(run.trajectories(1), scored(episode(1, 0, sample).trajectory, 1.0, components=parts))
    index = opened(run.path)
    assert index.field_names() == (*FIELDS, "größe")  # correct is a field itself
    for found in (find(index, None, where="größe > 1", sort=None), select(index.records(), where="größe > 1")):
        assert [record.id for record in found.records] == ["1/0/1"]


def test_problems_got_worse_from_the_first_half_of_their_visits_to_the_last(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("model: {new: {}}\ntask: {name: ledger}\n")
    successes = {0: (1, 1, 0), 1: (0, 1, 0), 2: (1, 0, 0)}  # by problem, of steps 1 to 3
    for step in (1, 2, 3):
        every = [episode(step, problem, 0, correct=values[step - 1]) for problem, values in successes.items()]
        once = [episode(3, 9, 0, correct=0.0)] if step == 3 else []
        write_trajectories(run.trajectories(step), every + once)
    index = opened(run.path)
    changes = got_worse(index)
    assert [(each.problem, each.before, each.after, len(each.visits)) for each in changes] == [
        ("p0", 1.0, 0.0, 3),
        ("p2", 1.0, 0.0, 3),
    ]
    last = changes[0].visits[-1]
    assert last.batch.at(last.worst).id == "3/0/0"
    lines = run_command("inspect", str(run.path), "--view", "got-worse").stdout.splitlines()
    assert lines == [
        "2 problems got worse: first half of the steps → last half",
        "1.00 → 0.00  training, 3 times  p0  now, for example, 3/0/0",
        "1.00 → 0.00  training, 3 times  p2  now, for example, 3/2/0",
    ]
    for step, correct in ((4, 1.0), (5, 0.0)):
        known = Provenance(
            evaluation="K=20", step=step, model="", condenser="last_k", max_context_tokens=64, temperature=0.0, seed=0
        )
        start_file(run.evaluation(step, "K=20"))
        add_trajectory(run.evaluation(step, "K=20"), episode(step, 7, 0, correct=correct), known)
    worse = run_command("inspect", str(run.path), "--view", "got-worse").stdout
    assert "1.00 → 0.00  K=20, 2 times  p7  now, for example, 5/7/0 --evaluation K=20" in worse
    shown = run_command("inspect", str(run.path), "5/7/0", "--evaluation", "K=20", "--plain").stdout
    assert "5/7/0" in shown


def test_a_damaged_file_hides_only_itself(run: RunFolder) -> None:
    run.trajectories(1).write_bytes(run.trajectories(1).read_bytes()[:-10])
    index = Index(run.path)
    with pytest.raises(TrajectoryFileError, match=r"step_000001\.parquet: it is not a whole Parquet file"):
        index.update()
    assert [(batch.number, batch.trajectories) for batch in index.batches()] == [(2, 4)]


def test_a_fact_is_lost_if_an_earlier_prompt_states_it_and_the_last_does_not(tmp_path: Path) -> None:
    # dropped, still there, in the question, never there, only in the policy's own dropped reply
    cases = {"+2": True, "done": False, "3": False, "7": False, "<note> 3 </note>": False}
    wrong = [episode(1, number, 0, correct=0.0, truth=truth) for number, truth in enumerate(cases)]
    write_trajectories(tmp_path / "t.parquet", [*wrong, episode(1, 9, 0, correct=1.0, truth="+2")])
    assert [record.figures.lost_fact for record in opened(tmp_path / "t.parquet").records()] == [*cases.values(), False]


@pytest.mark.parametrize(
    ("fact", "text", "stands"),
    [
        ("7", "it is 7.", True),
        ("7", "17 +7 -7 7.5 0.7 1,7", False),
        ("Avocado", "the avocado toast", True),
        ("avocado", "avocados", False),
        ("a.b", "a.b (c)", True),
        ("a.b", "axb", False),
    ],
)
def test_a_fact_stands_in_a_text_by_itself(fact: str, text: str, stands: bool) -> None:
    assert holds(fact, text) is stands


def test_truncated_and_tool_errors_are_counted(tmp_path: Path) -> None:
    one = trajectory(
        replace(turn([1], [2]), tool_attempts=3, tool_successes=1), stop=StopReason.OUTPUT_LENGTH, answer=None
    )
    add_trajectory(tmp_path / "t.parquet", scored(one, 0.0, correct=0.0))
    (record,) = opened(tmp_path / "t.parquet").records()
    assert (record.figures.tool_errors, record.figures.truncated, record.fields["truncated"]) == (2, True, True)


def test_a_search_finds_figures_by_their_letters_and_texts_as_they_stand(run: RunFolder) -> None:
    late = trajectory(turn([1], [2], reply="the Quick “fox”\nruns", context=[user("q")]), id="3/0/0", group="3/0")
    add_trajectory(run.trajectories(3), scored(late, 1.0))
    index = opened(run.path)
    assert [(hit.record.id, hit.turn) for hit in search(index, "quick “fox”\nr")] == [("3/0/0", 0)]
    assert [hit.record.id for hit in fuzzy(index, "2/10")] == ["2/10/0", "2/10/1"]
    assert len(fuzzy(index, "strt3")) == 8  # start 3
    assert not list(search(index, "added_ids"))  # a name in the file, which no message has
    assert not list(search(index, " "))


@pytest.mark.parametrize("query", ["Überprüfe Москва", "ÜBERPRÜFE МОСКВА", "überprüfe москва"])
def test_a_search_finds_letters_of_any_alphabet_in_either_case(tmp_path: Path, query: str) -> None:
    add_trajectory(tmp_path / "t.parquet", scored(trajectory(turn([1], [2], reply="Überprüfe Москва 12")), 1.0))
    index = opened(tmp_path / "t.parquet")
    assert [hit.turn for hit in search(index, query)] == [0]
    assert not list(search(index, f"{query} 13"))


def test_a_search_of_letters_ends_soon_and_takes_the_shortest_part(tmp_path: Path) -> None:
    for number, answer in enumerate(("a-bc, a--b-c", "0" * 60)):  # a pattern with alternatives would try 3^16 of them
        one = trajectory(turn([1], [2]), id=f"1/{number}/0", group=f"1/{number}", answer=answer)
        add_trajectory(tmp_path / "t.parquet", scored(one, 0.0, correct=0.0))
    index = opened(tmp_path / "t.parquet")
    assert [hit.excerpt for hit in fuzzy(index, "ABC")] == ["a-bc, a--b-c"]
    assert not fuzzy(index, "0" * 16 + "1")
    assert not fuzzy(index, "acb")


# --- the whole history beside what a prompt shows of it


def test_history_shows_dropped_rewritten_and_added_messages_in_place() -> None:
    said = [Message(role="assistant", content=text) for text in "abcd"]
    results = [user(text) for text in "uvwx"]
    note = user("[turn 0 omitted]")
    pinned = user("question")
    prompt = (pinned, note, said[1], user("[masked]"), said[2], results[2])
    turns = [replace(turn([1], [2], context=(pinned,)), reply=said[0], observations=(results[0],))]
    turns += [replace(turns[0], reply=said[at], observations=(results[at],)) for at in (1, 2)]
    declared = condensation("drk", [3, 3, 3], before=12, after=9)
    turns.append(turn([1], [2], context=prompt, condensation=declared))
    pieces = history(trajectory(*turns), 3, context_views(trajectory(*turns), 20)[3].statuses)
    assert [(piece.turn, piece.text, piece.status, piece.rewritten) for piece in pieces] == [
        (None, "question", PieceStatus.PINNED, None),
        (0, "a", PieceStatus.DROPPED, None),
        (0, "u", PieceStatus.DROPPED, None),
        (None, "[turn 0 omitted]", PieceStatus.ADDED, None),
        (1, "b", PieceStatus.KEPT, None),
        (1, "v", PieceStatus.REWRITTEN, "[masked]"),
        (2, "c", PieceStatus.KEPT, None),
        (2, "w", PieceStatus.KEPT, None),
    ]


def test_history_begins_with_the_messages_that_an_environment_put_in_the_place_of_the_first() -> None:
    reply, result = Message(role="assistant", content="a"), user("u")
    turns = [
        replace(turn([1], [2], context=(user("be brief"), user("question"))), reply=reply, observations=(result,)),
        turn([1], [2], context=(user("shorter question"), reply, result)),
    ]
    pieces = history(trajectory(*turns), 1, {0: SpanStatus.KEPT})
    assert [(piece.turn, piece.text, piece.status) for piece in pieces] == [
        (None, "shorter question", PieceStatus.PINNED), (0, "a", PieceStatus.KEPT), (0, "u", PieceStatus.KEPT),
    ]  # fmt: skip


@pytest.mark.parametrize("summary", ["a or b", "a"])  # one may read as a reply that it stands for
def test_history_names_the_turn_that_wrote_a_summary_and_strikes_out_what_it_stands_for(summary: str) -> None:
    said = [Message(role="assistant", content=text) for text in ("a", f"<think>hm</think> {summary}")]
    pinned, note = user("question"), user("[turns up to 0 omitted]")
    turns = [
        replace(turn([1], [2], context=(pinned,)), reply=said[0], observations=(user("u"),)),
        replace(turn([1], [2], context=(pinned,)), reply=said[1], kind="condense"),
        turn([1], [2], context=(pinned, Message(role="assistant", content=summary), note)),
    ]
    pieces = history(trajectory(*turns), 2, {0: SpanStatus.REWRITTEN})
    assert [(piece.turn, piece.text, piece.status, piece.rewritten) for piece in pieces] == [
        (None, "question", PieceStatus.PINNED, None),
        (0, "a", PieceStatus.REWRITTEN, ""),
        (0, "u", PieceStatus.REWRITTEN, ""),
        (1, summary, PieceStatus.ADDED, None),
        (None, "[turns up to 0 omitted]", PieceStatus.ADDED, None),
    ]


def test_of_equal_replies_the_newest_is_the_one_that_was_kept() -> None:
    one = ledger_episode(["<note> 3 </note>"] * 3, ["+1", "+1"], keep_last=1)
    pieces = history(one, 2, {0: SpanStatus.DROPPED, 1: SpanStatus.KEPT})
    assert [(piece.turn, piece.status.value) for piece in pieces] == [
        (None, "pinned"), (0, "dropped"), (0, "dropped"), (1, "kept"), (1, "kept"),
    ]  # fmt: skip


def test_a_rewriting_is_told_word_by_word() -> None:
    assert word_changes("the long result", "the short result") == (
        (WordChange.SAME, "the "),
        (WordChange.REMOVED, "long"),
        (WordChange.INSERTED, "short"),
        (WordChange.SAME, " result"),
    )
    assert word_changes("a b c", "a b") == ((WordChange.SAME, "a b"), (WordChange.REMOVED, " c"))
    assert word_changes("a", "a") == ((WordChange.SAME, "a"),)


@given(*[st.lists(st.sampled_from(["a", "b", "c", " "]), max_size=12).map("".join)] * 2)
def test_a_rewriting_holds_both_texts(before: str, after: str) -> None:
    parts = word_changes(before, after)
    assert "".join(words for change, words in parts if change is not WordChange.INSERTED) == before
    assert "".join(words for change, words in parts if change is not WordChange.REMOVED) == after
