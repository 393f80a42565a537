import errno
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import datasets
import pandas
import polars
import pyarrow.parquet
import pytest
from builders import add_trajectory, assistant, ledger_episode, scored, trajectory, turn, user
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.cli.serve import SESSIONS_A_FILE, RecordedSessions
from condensegrpo.core.errors import DataError, RunError, TrajectoryFileError
from condensegrpo.core.messages import MediaPart, Message, TextPart, ToolCall
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.shared_sequence import shared, shared_ids
from condensegrpo.core.trajectory import MAX_REWARD, Condensation, Score, Span, SpanStatus, StopReason, Trajectory, Turn
from condensegrpo.display.run_log import RunLog
from condensegrpo.storage.codec import dump_line
from condensegrpo.storage.files import append_line, write_atomically
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder, read_metrics
from condensegrpo.storage.trajectories import (
    Credit,
    Provenance,
    StoredTrajectory,
    find_text,
    opened,
    part_file,
    parts_of,
    read_credit,
    read_figures,
    read_trajectories,
    read_trajectory,
    sample_trajectories,
    trajectory_schema,
    write_credit,
    write_trajectories,
)

TEXT = st.text(max_size=12)  # without lone surrogates, which are stored as "?"
FLOAT = st.floats(allow_nan=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.builds(ToolCall, id=TEXT, name=TEXT, arguments=TEXT)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXT,
    reasoning=TEXT,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    tool_call_id=st.none() | TEXT,
    name=st.none() | TEXT,
)
SPANS = st.builds(
    Span,
    first=st.integers(0, 9),
    last=st.integers(0, 9),
    units=st.integers(1, 9),
    status=st.sampled_from(SpanStatus),
    tokens=st.integers(0, 99),
)
CONDENSATIONS = st.builds(
    Condensation,
    condenser=TEXT,
    reason=TEXT,
    tokens_before=st.integers(0, 999),
    tokens_after=st.integers(0, 999),
    spans=st.lists(SPANS, max_size=3).map(tuple),
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    outputs = draw(st.lists(st.tuples(st.integers(0, 2**20), FLOAT), max_size=4))
    attempts = draw(st.integers(0, 9))
    return Turn(
        prompt_ids=tuple(draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=5))),
        output_ids=tuple(token for token, _ in outputs),
        logprobs=tuple(logprob for _, logprob in outputs),
        policy_version=draw(st.integers(0, 99)),
        kind=draw(st.sampled_from(["act", "condense"])),
        condensation=draw(st.none() | CONDENSATIONS),
        context=tuple(draw(st.lists(MESSAGES, max_size=2))),
        reply=draw(MESSAGES),
        observations=tuple(draw(st.lists(MESSAGES, max_size=2))),
        turn_rewards=draw(st.dictionaries(TEXT, st.floats(-1e9, 1e9), max_size=2)),
        tool_attempts=attempts,
        tool_successes=draw(st.integers(0, attempts)),
    )


TRAJECTORIES = st.builds(
    Trajectory,
    id=TEXT,
    problem_id=TEXT,
    group_id=TEXT,
    sample=st.integers(0, 99),
    question=st.none() | TEXT,
    ground_truth=st.none() | TEXT,
    turns=st.lists(turns(), max_size=3).map(tuple),
    stop=st.sampled_from(StopReason),
    answer=st.none() | TEXT,
    seconds=FINITE,
    detail=TEXT,
)
REWARD = st.floats(-MAX_REWARD, MAX_REWARD)
SCORES = st.builds(
    Score,
    total=REWARD,
    components=st.dictionaries(TEXT, REWARD, max_size=3),
    format_valid=st.booleans(),
    correct=REWARD,
    context_tokens=st.integers(0, 9999),
    turn_rewards=st.lists(REWARD, max_size=3).map(tuple),
)


def example(id: str = "p0/0") -> ScoredTrajectory:  # noqa: A002  the field's name
    return scored(trajectory(turn([1, 2], [10]), turn([1, 2, 10, 3], [11, 12]), id=id), 0.5)


def run_folder(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs" / "first")
    run.config.write_text("name: first\n")
    return run


# --- trajectories


@settings(max_examples=20, deadline=None)
@given(st.lists(st.builds(ScoredTrajectory.of, TRAJECTORIES, SCORES), max_size=3))
def test_any_trajectory_reads_back_equal(every: list[ScoredTrajectory]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_trajectories(Path(folder) / "t.parquet", every)
        assert read_trajectories(Path(folder) / "t.parquet") == tuple(every)


WORDS = [*map(user, "abc"), *map(assistant, "abc")]


@st.composite
def episodes(draw: st.DrawFn) -> Trajectory:
    """Turns that continue each other or not, as shared sequences or tuples, of a few messages, many of them equal."""
    some = st.lists(st.sampled_from(WORDS), max_size=3).map(tuple)
    ids, context, played = shared_ids([0]), shared(draw(some)), list[Turn]()
    for _ in range(draw(st.integers(0, 5))):
        output = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
        one = turn(ids, output, context=context, reply="a", observations=draw(some))
        if draw(st.booleans()):
            one = replace(one, prompt_ids=ids, context=context)
        played.append(one)
        added = draw(st.lists(st.integers(0, 2), max_size=2))
        if draw(st.integers(0, 2)):
            ids, context = ids.extended((*output, *added)), context.extended((one.reply, *one.observations))
        else:
            ids, context = shared_ids([*draw(st.sampled_from([ids, ids[:1]])), *added]), shared(draw(some))
    return trajectory(*played)


@settings(max_examples=25, deadline=None)
@given(episodes())
def test_an_episode_reads_back_equal_whatever_its_turns_share(one: Trajectory) -> None:
    with tempfile.TemporaryDirectory() as folder:
        add_trajectory(Path(folder) / "t.parquet", scored(one, 1.0))
        assert read_trajectories(Path(folder) / "t.parquet") == (scored(one, 1.0),)


def long_episode(turns: int) -> ScoredTrajectory:
    """Every prompt continues the last; replies and observations are the same in every turn."""
    ids, context, played = shared_ids(range(1000, 1100)), shared([user("start")]), list[Turn]()
    for _ in range(turns):
        observed = (user("+1"),)
        played.append(replace(turn([1], [7, 8], observations=observed), prompt_ids=ids, context=context))
        ids, context = ids.extended((7, 8, 9)), context.extended((played[-1].reply, *observed))
    return scored(trajectory(*played), 1.0)


def test_a_trajectory_read_back_shares_what_its_turns_share_and_holds_a_message_once(tmp_path: Path) -> None:
    sizes, path = [], tmp_path / "t.parquet"
    for turns in (64, 256):
        write_trajectories(path, [long_episode(turns)])
        sizes.append(path.stat().st_size)
        (read,) = read_trajectories(path)
        assert read == long_episode(turns)
        assert len({id(each.prompt_ids._storage) for each in read.trajectory.turns}) == 1  # type: ignore[attr-defined]  # a shared sequence, declared as a tuple
        assert len({id(each.context._storage) for each in read.trajectory.turns}) == 1  # type: ignore[attr-defined]  # a shared sequence, declared as a tuple
    assert sizes[1] < 1.3 * sizes[0]  # the ids of 256 whole prompts are 0.5 MB
    row = pyarrow.parquet.read_table(path).to_pylist()[0]
    assert len(row["messages"]) == 1 + 2 * 256
    assert row["turns"][255]["context"] == list(range(511))


def test_a_file_gives_back_what_was_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.parquet"
    failed = replace(ledger_episode([], []), answer=None, detail="lone \udc80 surrogate \x1b[31m")
    odd = scored(failed, 0.0, correct=0.0)
    write_trajectories(path, [example("b"), odd, example("a")])
    first, second, third = read_trajectories(path)
    assert (first, third) == (example("b"), example("a"))
    assert second.trajectory == replace(odd.trajectory, detail="lone ? surrogate \x1b[31m")
    assert [each.trajectory.id for each in sample_trajectories(path, 2)] == ["b", odd.trajectory.id]


def test_a_message_with_pictures_reads_back_by_their_hashes(tmp_path: Path) -> None:
    parts = (TextPart(text="look: "), MediaPart.of(b"bytes", "image/png"))
    one = scored(trajectory(turn([1], [2], context=[Message(role="user", content=parts)])), 1.0)
    write_trajectories(tmp_path / "t.parquet", [one])
    assert read_trajectories(tmp_path / "t.parquet") == (one,)
    (message,) = pyarrow.parquet.read_table(tmp_path / "t.parquet")["messages"].to_pylist()[0][:1]
    assert message["content"] == f"look: {parts[1].text}"
    assert [part["sha256"] for part in message["parts"]] == [None, parts[1].sha256]


def test_libraries_of_data_frames_and_datasets_read_a_folder(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    known = Provenance(
        evaluation=None, step=1, model="m", condenser="last_k", max_context_tokens=64, temperature=1.0, seed=0
    )
    for step, name in ((1, "a"), (2, "b")):
        write_trajectories(run.trajectories(step), [example(name)], replace(known, step=step))
    write_trajectories(part_file(run.trajectories(2), 1), [example("c")], replace(known, step=2))
    frame = pandas.read_parquet(run.trajectory_folder)
    assert frame[["step", "id", "correct", "turn_count"]].to_numpy().tolist() == [
        [1, "a", 1.0, 2], [2, "b", 1.0, 2], [2, "c", 1.0, 2],
    ]  # fmt: skip
    assert frame.turns[0][1]["output_ids"].tolist() == [11, 12]
    assert frame.messages[0][frame.turns[0][1]["reply"]]["content"] == "ok"
    assert polars.read_parquet(f"{run.trajectory_folder}/*.parquet")["stop"].to_list() == ["answered"] * 3
    features = datasets.Features.from_arrow_schema(trajectory_schema())  # what the Hub's viewer must know
    pair = {"name": datasets.Value("string"), "value": datasets.Value("float64")}
    assert features["components"] == datasets.List(pair)
    assert parts_of(run.trajectories(2)) == [run.trajectories(2), part_file(run.trajectories(2), 1)]
    assert [each.trajectory.id for each in read_trajectories(run.trajectories(2))] == ["b", "c"]
    assert run.steps() == (1, 2)


def test_one_trajectory_is_read_from_its_row_group(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [example(str(number)) for number in range(150)])
    assert opened(path).num_row_groups == 3
    assert read_trajectory(StoredTrajectory(path, 130)) == example("130")
    with pytest.raises(TrajectoryFileError, match="it has no row 150"):
        read_trajectory(StoredTrajectory(path, 150))
    assert [size for size, _ in find_text(path, "OK")] == [64, 64, 22]
    assert [row for _, rows in find_text(path, "OK") for row in rows] == list(range(150))


def test_sessions_of_a_proxy_are_in_files_of_a_few_as_soon_as_they_end(tmp_path: Path) -> None:
    path = tmp_path / "step_000000.parquet"
    known = Provenance(
        evaluation=None, step=0, model="m", condenser="full", max_context_tokens=64, temperature=1.0, seed=0
    )
    sessions = RecordedSessions(path, known)
    for number in range(SESSIONS_A_FILE + 2):
        sessions.add(example(str(number)))
    assert len(read_trajectories(path)) == SESSIONS_A_FILE + 2
    assert [opened(part).metadata.num_rows for part in parts_of(path)] == [SESSIONS_A_FILE, 2]


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [example()])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TrajectoryFileError, match=rf"reading {path}: it is not a whole Parquet file.* Remove it\.$"):
        read_trajectories(path)
    with pytest.raises(TrajectoryFileError, match=r"Wanted a run folder or trajectories\.$"):
        read_trajectories(path.rename(tmp_path / "settings.yaml"))


def test_a_file_with_other_columns_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a"]}), path)
    with pytest.raises(TrajectoryFileError, match="its columns are not those of this version"):
        read_trajectories(path)


def test_an_edited_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [example("a"), example("b")])
    table = pyarrow.parquet.read_table(path)
    stops = table.schema.get_field_index("stop")
    pyarrow.parquet.write_table(table.set_column(stops, "stop", pyarrow.array(["answered", "bored"])), path)
    with pytest.raises(TrajectoryFileError, match=r"t\.parquet, trajectory b: 'bored' is not a valid StopReason"):
        read_trajectories(path)


@pytest.mark.parametrize("column", ["correct", "turn_count", "messages"])
def test_a_value_that_was_removed_is_named(tmp_path: Path, column: str) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [example("a"), example("b")])
    table = pyarrow.parquet.read_table(path)
    index = table.schema.get_field_index(column)
    kept = pyarrow.array([table[column][0].as_py(), None], type=table.schema.field(column).type)
    pyarrow.parquet.write_table(table.set_column(index, table.schema.field(column), kept), path)
    with pytest.raises(TrajectoryFileError, match=r"t\.parquet, trajectory b: .*The file was edited"):
        read_trajectories(path)


@pytest.mark.parametrize("column", ["turns", "turns.prompt_ids", "turns.output_ids", "turns.logprobs", "messages"])
def test_a_value_removed_from_a_list_is_named_with_row_and_column(tmp_path: Path, column: str) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [example("a"), example("b")])
    table = pyarrow.parquet.read_table(path)
    edited, inner = table.to_pylist(), column.partition(".")[2]
    values = edited[1]["turns"][0][inner] if inner else edited[1][column]
    values[0] = None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(edited, schema=table.schema), path, row_group_size=1)
    with pytest.raises(TrajectoryFileError, match=rf"t\.parquet, row 1: a list in the column {column} lacks a value"):
        read_trajectories(path)


@pytest.mark.parametrize("part", ["name", "value"])
def test_half_of_a_pair_that_was_removed_is_named_by_every_reader(tmp_path: Path, part: str) -> None:
    path = tmp_path / "t.parquet"
    write_trajectories(path, [example("a"), example("b")])
    table = pyarrow.parquet.read_table(path)
    edited = table.to_pylist()
    edited[1]["components"][0][part] = None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(edited, schema=table.schema), path, row_group_size=1)
    for read in (read_trajectories, read_figures):
        with pytest.raises(TrajectoryFileError, match=r"row 1: a list in the column components lacks a value"):
            read(path)


def test_a_value_removed_from_a_credit_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    write_credit(path, [Credit(trajectory="a", advantages=(1.0,), weights=(0.1,))])
    table = pyarrow.parquet.read_table(path)
    column = pyarrow.array([[None]], type=table.schema.field("weights").type)
    pyarrow.parquet.write_table(table.set_column(2, table.schema.field("weights"), column), path)
    with pytest.raises(TrajectoryFileError, match=r"c\.parquet, row 0: a list in the column weights lacks a value"):
        read_credit(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryFileError, match=r"none\.parquet: No such file"):
        read_trajectories(tmp_path / "none.parquet")


def test_a_value_that_is_no_data_is_refused_when_writing() -> None:
    with pytest.raises(TypeError, match="set cannot be stored as JSON"):
        dump_line({"found": {1, 2}})


# --- credit


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(TEXT, st.lists(st.tuples(FLOAT, FLOAT), max_size=4), max_size=4))
def test_credit_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, given_credit: dict[str, list[tuple[float, float]]]
) -> None:
    path = tmp_path_factory.mktemp("credit") / "c.parquet"
    expected = {
        name: Credit(trajectory=name, advantages=tuple(a for a, _ in pairs), weights=tuple(w for _, w in pairs))
        for name, pairs in given_credit.items()
    }
    write_credit(path, expected.values())
    assert read_credit(path) == expected


def test_credit_is_replaced_not_appended_and_leaves_no_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    write_credit(path, [Credit(trajectory="a", advantages=(1.0,), weights=(0.1,))])
    write_credit(path, [Credit(trajectory="b", advantages=(2.0,), weights=(0.2,))])
    assert list(read_credit(path)) == ["b"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_that_is_killed_while_it_writes_leaves_whole_files_only(tmp_path: Path) -> None:
    run, code = (
        run_folder(tmp_path),
        """
        import os, sys
        sys.path.insert(0, "tests")
        from pathlib import Path
        from builders import scored, trajectory, turn
        from condensegrpo.storage.trajectories import write_trajectories
        sys.addaudithook(lambda event, _: os._exit(9) if event == "os.rename" else None)
        write_trajectories(Path(sys.argv[1]), [scored(trajectory(turn([1], [2])), 1.0)])
    """,
    )
    write_trajectories(run.trajectories(1), [example()])
    for step in (1, 2):
        command = [sys.executable, "-c", textwrap.dedent(code), str(run.trajectories(step))]
        assert subprocess.run(command, check=False, cwd=Path(__file__).parent.parent).returncode == 9
    assert read_trajectories(run.trajectories(1)) == (example(),)
    assert run.steps() == (1,)
    assert len([*run.trajectory_folder.iterdir()]) == 3
    run.remove_leftovers()
    assert [*run.trajectory_folder.iterdir()] == [run.trajectories(1)]


# --- metrics


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_metrics_read_back_without_a_cut_off_last_line(tmp_path: Path, size: int) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path).log(1, {"success": 0.25})
    JsonlTracker(path).log(2, {"success": 0.5, "eval/success": 0.75})
    with path.open("a") as file:
        file.write('{"step": 3, "succ' + "c" * size)
    whole = ({"step": 1, "success": 0.25}, {"step": 2, "success": 0.5, "eval/success": 0.75})
    assert read_metrics(path) == whole
    JsonlTracker(path).log(3, {"success": 1.0})  # removes it
    assert read_metrics(path) == (*whole, {"step": 3, "success": 1.0})


def test_no_metrics_file_is_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == ()


def test_a_bad_metrics_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": "two"}\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"line 2: wanted numbers by name, found {'step': 'two'}"):
        read_metrics(path)


def test_truncating_forgets_what_lies_after_the_resumed_step(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    for step in (9, 10, 11, 12):
        add_trajectory(run.trajectories(step), example())
        write_credit(run.credit(step), [])
        JsonlTracker(run.metrics).log(step, {"loss": float(step)})
    JsonlTracker(run.metrics).log(10, {"eval/success": 0.5})
    with run.metrics.open("a") as file:
        file.write('{"step": 13, ')
    run.truncate_after(10)
    assert run.steps() == (9, 10)
    assert sorted(file.name for file in run.credit_folder.iterdir()) == ["step_000009.parquet", "step_000010.parquet"]
    assert [line["step"] for line in read_metrics(run.metrics)] == [9, 10, 10]
    JsonlTracker(run.metrics).log(11, {"loss": 1.0})
    assert read_metrics(run.metrics)[-1] == {"step": 11, "loss": 1.0}


def test_a_resumed_copy_is_written_to_although_its_empty_folders_were_not_copied(tmp_path: Path) -> None:
    """Object stores have no folders: a run of no steps comes back without those of trajectories and credit."""
    run = RunFolder(tmp_path)
    run.truncate_after(0)
    add_trajectory(run.trajectories(1), example())
    write_credit(run.credit(1), [])
    assert run.steps() == (1,)


# --- the run folder


def test_a_run_folder_is_never_overwritten(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    with pytest.raises(RunError, match=r"first: the folder is not empty\. Give another folder"):
        RunFolder.create(run.path)
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty").trajectory_folder.is_dir()


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"writing .*file/run: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run")


def test_opening_no_run_lists_those_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path)
    with pytest.raises(RunError, match=r"no such folder\. Runs in .*runs: first\."):
        RunFolder.open(tmp_path / "runs" / "frist")
    (tmp_path / "runs" / "bare").mkdir()
    with pytest.raises(RunError, match=r"holds no config\.yaml"):
        RunFolder.open(tmp_path / "runs" / "bare")
    monkeypatch.chdir(tmp_path / "runs" / "bare")
    with pytest.raises(RunError, match=r"Runs in \S*runs: first\."):
        RunFolder.open(Path("."))


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until it is killed."""
    code = """
        import sys, time
        from pathlib import Path
        from condensegrpo.storage.run_folder import RunFolder
        with RunFolder(Path(sys.argv[1])).locked():
            print("held", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("name", ["lock", "log.txt", "metrics.jsonl"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    run, outside = RunFolder.create(tmp_path / "run"), tmp_path / "outside"
    outside.write_text("kept")
    (run.path / name).symlink_to(outside)

    def write() -> None:
        with run.locked(), RunLog(run.log, steps=1) as log:
            log.notice("begun")
            append_line(run.metrics, "{}")

    with pytest.raises(RunError, match=f"run/{name}: it is a symbolic link, which is not followed. Remove it"):
        write()
    assert outside.read_text() == "kept"


def test_a_run_folder_in_use_by_another_process_names_it_and_death_lets_go(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    with holder(run.path) as process:
        with (
            pytest.raises(RunError, match=rf"run folder in use by another process \(pid {process.pid} on \S+\)"),
            run.locked(),
        ):
            pass
        process.kill()
        process.wait()
    with run.locked():
        assert (run.path / "lock").read_text().startswith(f"pid {os.getpid()} on ")
    with run.locked():  # let go at the end of the block
        pass


# --- a full disk


@pytest.mark.parametrize("folder", ["checkpoints", "origin/.warm-checkpoints"])
@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_checkpoint_saved_again_is_there_whenever_that_was_killed(tmp_path: Path, folder: str, renamed: int) -> None:
    """Two renames replace a folder: between them neither the old nor the new one has its name."""
    run = run_folder(tmp_path)
    target = run.path / folder / "step_000010"
    target.mkdir(parents=True)
    (target / "old").touch()
    program = f"""
        import os, sys
        from pathlib import Path
        from condensegrpo.learner.atomic_folder import published_folder
        sys.addaudithook(lambda event, _: os._exit(9) if event == "os.rename" and next(left) == 0 else None)
        left = iter(range({renamed}, -9, -1))
        with published_folder(Path(sys.argv[1])) as temporary:
            (temporary / "new").touch()
        os._exit(9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(target)], check=False).returncode == 9
    run.remove_leftovers()
    assert [path.name for path in target.parent.iterdir()] == ["step_000010"]
    assert [path.name for path in target.iterdir()] == (["new"] if renamed == 2 else ["old"])


def test_a_full_disk_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"/dev/full: No space left on device\. Free some space .* --resume"):
        JsonlTracker("/dev/full").log(1, {"loss": 1.0})


def test_a_line_that_does_not_fit_leaves_the_lines_before_it_whole(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from condensegrpo.core.errors import RunError
        from condensegrpo.storage.files import append_line, write_atomically
        path, other = Path(sys.argv[1]), Path(sys.argv[2])
        append_line(path, "1")
        write_atomically(other, "old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        for write in (lambda: append_line(path, "2" * 5000), lambda: write_atomically(other, "3" * 5000)):
            try:
                write()
            except RunError as error:
                print(error)
    """
    path, other = tmp_path / "t.parquet", tmp_path / "c.parquet"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path), str(other)], capture_output=True, text=True, check=True
    )
    assert path.read_text() == "1\n"
    assert other.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c.parquet", "t.parquet"]
    assert done.stdout.count(os.strerror(errno.EFBIG)) == 2


def test_a_file_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Is a directory\. Check the folder and its permissions"):
        append_line(tmp_path, "1")
    with pytest.raises(RunError, match=r"No such file or directory"):
        write_credit(tmp_path / "none" / "c.parquet", [])


def test_two_machines_whose_processes_have_one_number_may_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal containers with one folder; the second found its temporary file gone."""
    replace_path = Path.replace

    def later(temporary: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace_path)
        write_atomically(target, "of the other machine")
        return replace_path(temporary, target)

    monkeypatch.setattr(Path, "replace", later)
    write_atomically(tmp_path / "a.png", "of this machine")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.png", "of this machine")]
