import errno
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from builders import assistant, condensation, ledger_episode, scored, trajectory, turn, user
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.core.errors import DataError, RunError, TrajectoryFileError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.scored_trajectory import ScoredTrajectory, TrajectoryStats
from condensegrpo.core.shared_sequence import shared, shared_ids
from condensegrpo.core.trajectory import MAX_REWARD, Condensation, Score, Span, SpanStatus, StopReason, Trajectory, Turn
from condensegrpo.display.run_log import RunLog
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import append_line, replace_file
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder, read_metrics
from condensegrpo.storage.trajectories import Credit, read_credit, read_trajectories, write_credit, write_trajectory

TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # every code point, lone surrogates included
FLOAT = st.floats(allow_nan=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.builds(ToolCall, id=TEXT, name=TEXT, arguments=TEXT)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXT,
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
        turn_rewards=draw(st.dictionaries(TEXT, FLOAT, max_size=2)),
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
FIGURES = st.builds(
    TrajectoryStats,
    seconds=FINITE,
    total=FINITE,
    components=st.dictionaries(TEXT, FINITE, max_size=3),
    turn_reward=FINITE,
    correct=FINITE,
    confidence=st.none() | FINITE,
    information=st.lists(st.none() | FINITE, max_size=3).map(tuple),
    information_lost=st.none() | FINITE,
)


def example(id: str = "p0/0") -> ScoredTrajectory:  # noqa: A002  the field's name
    return scored(trajectory(turn([1, 2], [10]), turn([1, 2, 10, 3], [11, 12]), id=id), 0.5)


def run_folder(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs" / "first")
    run.config.write_text("name: first\n")
    return run


# --- trajectories


@settings(max_examples=40)
@given(st.builds(ScoredTrajectory, trajectory=TRAJECTORIES, score=SCORES, figures=FIGURES))
def test_any_trajectory_reads_back_equal(one: ScoredTrajectory) -> None:
    line = dump_line(one)
    assert line.isascii()
    assert "\n" not in line
    assert decode(ScoredTrajectory, json.loads(line)) == one


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


@settings(max_examples=100)
@given(episodes())
def test_an_episode_reads_back_equal_whatever_its_turns_share(one: Trajectory) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_trajectory(Path(folder) / "t.jsonl", scored(one, 1.0))
        assert read_trajectories(Path(folder) / "t.jsonl").trajectories == (scored(one, 1.0),)


def long_episode(turns: int) -> ScoredTrajectory:
    """Every prompt continues the last; replies and observations are the same in every turn."""
    ids, context, played = shared_ids(range(1000, 1100)), shared([user("start")]), list[Turn]()
    for _ in range(turns):
        observed = (user("+1"),)
        played.append(replace(turn([1], [7, 8], observations=observed), prompt_ids=ids, context=context))
        ids, context = ids.extended((7, 8, 9)), context.extended((played[-1].reply, *observed))
    return scored(trajectory(*played), 1.0)


def test_a_line_grows_by_what_is_new_in_a_turn_and_holds_a_message_once(tmp_path: Path) -> None:
    sizes, path = [], tmp_path / "t.jsonl"
    for turns in (64, 128, 256):
        path.unlink(missing_ok=True)
        write_trajectory(path, long_episode(turns))
        sizes.append(path.stat().st_size)
        (read,) = read_trajectories(path).trajectories
        assert read == long_episode(turns)
        assert len({id(each.prompt_ids._storage) for each in read.trajectory.turns}) == 1  # type: ignore[attr-defined]  # a shared sequence, declared as a tuple
        assert len({id(each.context._storage) for each in read.trajectory.turns}) == 1  # type: ignore[attr-defined]  # a shared sequence, declared as a tuple
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.02)
    line = json.loads(path.read_text())["trajectory"]
    assert len(line["messages"]) == 1 + 2 * 256
    assert line["turns"][255]["context"] == [[0, 511]]
    assert line["turns"][255]["added_ids"] == [9]


def test_a_file_gives_back_what_was_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    odd = scored(
        replace(ledger_episode([], []), answer=None, detail="lone \udc80 surrogate \x1b[31m"), 0.0, correct=0.0
    )
    for one in (example("b"), odd, example("a")):
        write_trajectory(path, one)
    result = read_trajectories(path)
    assert result.trajectories == (example("b"), odd, example("a"))
    assert result.problems == ()


def test_a_trajectory_line_is_versioned_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectory(path, example())
    line = json.loads(path.read_text())
    assert line["version"] == 1
    assert line["trajectory"]["turns"][1]["output_ids"] == [11, 12]
    assert line["trajectory"]["stop"] == "answered"
    assert line["score"]["components"] == {"correct": 1.0}


def test_a_line_from_before_scores_had_turn_rewards_reads_as_paying_none(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectory(path, example())
    line = json.loads(path.read_text())
    del line["score"]["turn_rewards"]
    path.write_text(json.dumps(line) + "\n")
    assert read_trajectories(path).trajectories == (example(),)


def test_a_truncated_last_line_is_reported_not_fatal(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectory(path, example("a"))
    write_trajectory(path, example("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    result = read_trajectories(path)
    assert [one.trajectory.id for one in result.trajectories] == ["a"]
    assert len(result.problems) == 1
    assert result.problems[0].startswith("line 2 is cut off after ")


def test_a_last_line_that_only_misses_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectory(path, example("a"))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_trajectories(path).trajectories == (example("a"),)
    assert read_trajectories(path).problems == ()


def test_appending_after_a_cut_off_line_does_not_bury_it_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectory(path, example("a"))
    with path.open("a") as file:
        file.write('{"version": 1, "traj' + "x" * 200_000)
    write_trajectory(path, example("b"))
    assert [one.trajectory.id for one in read_trajectories(path).trajectories] == ["a", "b"]


def test_a_file_that_is_one_cut_off_line_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"version"')
    write_trajectory(path, example("b"))
    assert read_trajectories(path).trajectories == (example("b"),)


def damage(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Rewrite line 2 of three."""
    for name in "abc":
        write_trajectory(path, example(name))
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(change(json.loads(lines[1])))
    path.write_text("\n".join(lines) + "\n")


def at(line: object, *place: object, value: object) -> object:
    """``line`` with ``value`` at a place."""
    node = line
    for key in place[:-1]:
        node = node[key]  # type: ignore[index]  # nested JSON
    node[place[-1]] = value  # type: ignore[index]  # nested JSON
    return line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: {**line, "version": 5}, "found version 5, wanted 1"),
        (lambda line: {"trajectory": line["trajectory"]}, "found version None, wanted 1"),
        (lambda line: [line], "found list, wanted an object"),
        (lambda line: {**line, "extra": 1}, "unknown field 'extra'"),
        (lambda line: {"version": 1, "score": line["score"]}, "_TrajectoryLine misses trajectory"),
        (lambda line: at(line, "trajectory", "stop", value="bored"), "trajectory.stop: wanted one of answered"),
        (lambda line: at(line, "trajectory", "answer", value=7), "trajectory.answer: wanted text, found 7"),
        (lambda line: at(line, "trajectory", "seconds", value=True), "trajectory.seconds: wanted a number, found True"),
        (lambda line: at(line, "trajectory", "turns", value={}), "trajectory.turns: wanted a list, found {}"),
        (
            lambda line: at(line, "trajectory", "turns", 1, "output_ids", 0, value="11"),
            "trajectory.turns[1].output_ids[0]: wanted a whole number, found '11'",
        ),
        (
            lambda line: at(line, "trajectory", "turns", 1, "logprobs", value=[-0.5]),
            "2 tokens, 1 logprobs",
        ),
        (lambda line: at(line, "trajectory", "turns", 0, "kind", value="nap"), "turns[0].kind: wanted one of"),
        (lambda line: at(line, "trajectory", "messages", value=[{}]), "trajectory.messages[0]: Message misses role"),
        (
            lambda line: at(line, "trajectory", "turns", 1, "context", value=[[0, 9]]),
            "trajectory.turns[1].context: wanted runs [first, end] of 2 messages, found [0, 9]",
        ),
        (
            lambda line: at(line, "trajectory", "turns", 1, "observations", value=[0]),
            "trajectory.turns[1].observations[0]: wanted a list, found 0",
        ),
        (
            lambda line: at(line, "trajectory", "turns", 1, "reply", value=2),
            "trajectory.turns[1].reply: wanted the place of one of 2 messages, found 2",
        ),
        (
            lambda line: at(line, "trajectory", "turns", 0, "added_ids", value=[1]),
            "trajectory.turns[0].added_ids: there is no prompt before it",
        ),
        (
            lambda line: at(line, "trajectory", "turns", 1, "added_ids", value=[-1]),
            "trajectory.turns[1].added_ids: wanted token ids, found a number that is none",
        ),
        (
            lambda line: at(line, "trajectory", "turns", 1, value={"reply": 0, "added_ids": []}),
            "trajectory.turns[1]: Turn misses",
        ),
        (lambda line: at(line, "score", "components", value=[]), "score.components: wanted an object"),
        (lambda line: at(line, "score", "total", value=float("nan")), "total is nan, wanted a finite number"),
    ],
)
def test_a_bad_line_in_the_middle_names_file_line_and_place(
    tmp_path: Path, change: Callable[[dict[str, object]], object], said: str
) -> None:
    path = tmp_path / "t.jsonl"
    damage(path, change)
    with pytest.raises(TrajectoryFileError) as caught:
        read_trajectories(path)
    assert f"{path}, line 2" in str(caught.value)
    assert said in str(caught.value)


def test_a_whole_line_that_is_no_json_is_an_error_even_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectory(path, example())
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n")
    with pytest.raises(TrajectoryFileError, match="line 2: not a line of JSON"):
        read_trajectories(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryFileError, match=r"none\.jsonl: No such file"):
        read_trajectories(tmp_path / "none.jsonl")


def test_a_field_with_a_default_may_be_absent() -> None:
    written = json.loads(dump_line(example()))
    del written["trajectory"]["detail"]
    assert decode(ScoredTrajectory, written) == example()


def test_a_value_that_is_no_data_is_refused_when_writing() -> None:
    with pytest.raises(TypeError, match="set cannot be stored as JSON"):
        dump_line({"found": {1, 2}})


def test_a_writer_that_is_killed_leaves_every_earlier_line_readable(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from builders import ledger_episode, scored
        from condensegrpo.storage.trajectories import write_trajectory
        print("writing", flush=True)
        while True:
            write_trajectory(Path(sys.argv[1]), scored(ledger_episode(["<note> 3 </note>"] * 9, ["+1"] * 9), 1.0))
    """
    path = tmp_path / "t.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(code), str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not path.is_file() or path.stat().st_size < 200_000:
            assert process.poll() is None
        process.kill()
    before = len(read_trajectories(path).trajectories)
    assert before >= 2
    write_trajectory(path, example("after"))
    result = read_trajectories(path)
    assert (len(result.trajectories), result.problems) == (before + 1, ())


def test_two_ranks_that_append_to_one_file_lose_nothing(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from condensegrpo.storage.files import append_line, replace_file
        for number in range(50):
            append_line(Path(sys.argv[1]), f'"{sys.argv[2]} {number} {"x" * 20_000}"')
    """
    path = tmp_path / "t.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    ranks = [subprocess.Popen([*command, rank]) for rank in "01"]
    assert [rank.wait() for rank in ranks] == [0, 0]
    lines = [json.loads(line).split()[:2] for line in path.read_text().splitlines()]
    assert sorted(lines) == sorted([rank, str(number)] for rank in "01" for number in range(50))


# --- credit


@settings(max_examples=30)
@given(st.dictionaries(TEXT, st.lists(st.tuples(FLOAT, FLOAT), max_size=4), max_size=4))
def test_credit_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, given_credit: dict[str, list[tuple[float, float]]]
) -> None:
    path = tmp_path_factory.mktemp("credit") / "c.jsonl"
    expected = {
        name: Credit(trajectory=name, advantages=tuple(a for a, _ in pairs), weights=tuple(w for _, w in pairs))
        for name, pairs in given_credit.items()
    }
    write_credit(path, expected.values())
    assert read_credit(path) == expected


def test_credit_is_replaced_not_appended_and_leaves_no_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_credit(path, [Credit(trajectory="a", advantages=(1.0,), weights=(0.1,))])
    write_credit(path, [Credit(trajectory="b", advantages=(2.0,), weights=(0.2,))])
    assert list(read_credit(path)) == ["b"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_became_of_a_trajectory_reads_back_and_credit_without_it_trained(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_credit(path, [Credit(trajectory="a", advantages=(), weights=(), handling="drop")])
    assert read_credit(path)["a"].handling == "drop"
    path.write_text(path.read_text().replace(',"handling":"drop"', ""))
    assert read_credit(path)["a"].handling == "train"
    path.write_text('{"version":1,"credit":{"trajectory":"a","advantages":[],"weights":[],"handling":"lost"}}\n')
    with pytest.raises(TrajectoryFileError, match=r"credit\.handling: wanted one of train, mask, penalise, drop"):
        read_credit(path)


def test_damaged_credit_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_credit(path, [Credit(trajectory="a", advantages=(1.0, 2.0), weights=(0.1, 0.2))])
    path.write_text(path.read_text().replace("[0.1,0.2]", "[0.1]"))
    with pytest.raises(
        TrajectoryFileError, match="line 1: credit: credit needs one weight per advantage: 2 advantages, 1 weights"
    ):
        read_credit(path)
    path.write_text('{"version"')
    with pytest.raises(TrajectoryFileError, match="line 1 is cut off"):
        read_credit(path)


# --- metrics


def test_metrics_read_back_without_a_cut_off_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path).log(1, {"success": 0.25})
    JsonlTracker(path).log(2, {"success": 0.5, "eval/success": 0.75})
    with path.open("a") as file:
        file.write('{"step": 3, "succ')
    assert read_metrics(path) == ({"step": 1, "success": 0.25}, {"step": 2, "success": 0.5, "eval/success": 0.75})


def test_no_metrics_file_is_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == ()


def test_a_bad_metrics_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": "two"}\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"line 2: step: wanted a number, found 'two'"):
        read_metrics(path)


def test_truncating_forgets_what_lies_after_the_resumed_step(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    for step in (9, 10, 11, 12):
        write_trajectory(run.trajectories(step), example())
        write_credit(run.credit(step), [])
        JsonlTracker(run.metrics).log(step, {"loss": float(step)})
    JsonlTracker(run.metrics).log(10, {"eval/success": 0.5})
    with run.metrics.open("a") as file:
        file.write('{"step": 13, ')
    run.truncate_after(10)
    assert run.steps() == (9, 10)
    assert sorted(file.name for file in run.credit_folder.iterdir()) == ["step_000009.jsonl", "step_000010.jsonl"]
    assert [line["step"] for line in read_metrics(run.metrics)] == [9, 10, 10]
    JsonlTracker(run.metrics).log(11, {"loss": 1.0})
    assert read_metrics(run.metrics)[-1] == {"step": 11, "loss": 1.0}


def test_a_resumed_copy_is_written_to_although_its_empty_folders_were_not_copied(tmp_path: Path) -> None:
    """Object stores have no folders: a run of no steps comes back without those of trajectories and credit."""
    run = RunFolder(tmp_path)
    run.truncate_after(0)
    write_trajectory(run.trajectories(1), example())
    write_credit(run.credit(1), [])
    assert run.steps() == (1,)


# --- the run folder


def test_the_names_inside_a_run_folder(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    assert run.trajectories(123) == run.path / "trajectories" / "step_000123.jsonl"
    assert run.credit(123) == run.path / "credit" / "step_000123.jsonl"
    assert run.trajectory_folder.is_dir()
    assert run.credit_folder.is_dir()
    assert run.checkpoints.is_dir()
    assert run.steps() == ()
    assert RunFolder.open(run.path) == run


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
    path, other = tmp_path / "t.jsonl", tmp_path / "c.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path), str(other)], capture_output=True, text=True, check=True
    )
    assert path.read_text() == "1\n"
    assert other.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c.jsonl", "t.jsonl"]
    assert done.stdout.count(os.strerror(errno.EFBIG)) == 2


def test_a_file_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Is a directory\. Check the folder and its permissions"):
        append_line(tmp_path, "1")
    with pytest.raises(RunError, match=r"No such file or directory"):
        write_credit(tmp_path / "none" / "c.jsonl", [])


def test_a_condensation_survives_the_file(tmp_path: Path) -> None:
    declared = condensation("dk", [13, 12], before=40, after=27)
    one = scored(trajectory(turn([1], [2]), turn([5], [6], condensation=declared)), 1.0)
    write_trajectory(tmp_path / "t.jsonl", one)
    read = read_trajectories(tmp_path / "t.jsonl").trajectories[0].trajectory.turns[1].condensation
    assert read == declared
    assert read is not None
    assert [span.status for span in read.spans] == [SpanStatus.DROPPED, SpanStatus.KEPT]


def test_two_machines_whose_processes_have_one_number_may_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal containers with one folder; the second found its temporary file gone."""
    replace_path = Path.replace

    def later(temporary: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace_path)
        replace_file(target, "of the other machine")
        return replace_path(temporary, target)

    monkeypatch.setattr(Path, "replace", later)
    replace_file(tmp_path / "a.png", "of this machine")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.png", "of this machine")]
