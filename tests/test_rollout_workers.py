"""Rollouts in worker processes: the same trajectories with any number of them, and a worker that dies costs its own."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

import psutil
import pytest
from command import ROOT
from talk import counting, problem, said, shown
from waiting import eventually
from worker_program import World

from condensegrpo.assembly.build import build, build_components
from condensegrpo.assembly.players import RolloutPlayers, described_workers
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.config.load import load_config, vary
from condensegrpo.config.resumed import Change
from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.core.observer import Silent
from condensegrpo.core.protocols.sampler import AttentionQuery, Sampler, TokenAttention
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams, StopReason
from condensegrpo.episodes.group import ProblemGroup, problem_groups
from condensegrpo.episodes.settings import Workers
from condensegrpo.episodes.workers.messages import PlayReport, Setup
from condensegrpo.episodes.workers.pool import WorkerPool
from condensegrpo.episodes.workers.processes import PROGRAM, ProcessHost, described, fork_workers
from condensegrpo.episodes.workers.ray_actors import RayHost
from condensegrpo.evaluation.evaluate import evaluate_variant
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.training.initial_policy import base_policy

SAMPLES, SEED, STEP = 3, 0, 7


class ByStream:
    """Replies depend on prompt and seed alone, and take their time."""

    version = 3

    def __init__(self) -> None:
        self.asked = threading.Event()

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.asked.set()
        text = shown(prompt_ids)
        if "weights" in text:
            raise KeyError("weights")
        await asyncio.sleep(600 if "hang" in text else (params.seed % 7 + 300 * ("late" in text)) / 1000)
        reply = said(f"{counting(text)} {params.seed % 100}" if "answer" not in counting(text) else counting(text))
        logprobs = tuple(-1 / (1 + place + params.seed % 1000) for place in range(len(reply)))
        return Generation(token_ids=tuple(reply), logprobs=logprobs, finish=FinishReason.STOP)

    async def measure(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        return [-1 / (1 + len(prompt_ids) + token) for token in output_ids]

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        shares = tuple(token % 7 / 1000 for token in query.prompt_ids)
        return TokenAttention(question=shares, calibration=tuple(share / 2 for share in shares))

    def update_weights(self, named_tensors: object, version: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(ProcessHost("worker_program:open_worlds"), ByStream(), model=lambda name: pytest.fail(name))
    yield pool
    pool.close()


def groups(*questions: str) -> tuple[ProblemGroup, ...]:
    return problem_groups([replace(problem(number, each), answer="5") for number, each in enumerate(questions)], STEP)


Outcome = tuple[tuple[ScoredTrajectory, ...], tuple[PlayReport, ...], list[str]]


async def played(pool: WorkerPool, batch: Sequence[ProblemGroup], workers: int, world: World, key: int) -> Outcome:
    ids: list[str] = []
    scored, reports = await pool.play(
        Setup(key, world),
        batch,
        workers=workers,
        samples=SAMPLES,
        stream=(SEED, STEP),
        turn_seconds=60.0,
        on_scored=lambda each: ids.append(each.trajectory.id),
    )
    return scored, reports, ids


def play(pool: WorkerPool, *questions: str, workers: int = 2, world: World = World(), key: int = 0) -> Outcome:  # noqa: B008  a frozen value
    return asyncio.run(played(pool, groups(*questions), workers, world, key))


def timeless(scored: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """Without what the clock says, and the frames of the engine in tracebacks."""
    failures = [each.trajectory.failure for each in scored]
    shown = [None if failure is None else replace(failure, traceback="") for failure in failures]
    return [
        ScoredTrajectory.of(replace(each.trajectory, seconds=0.0, failure=failure), each.score)
        for each, failure in zip(scored, shown, strict=True)
    ]


def here(*questions: str, sampler: Sampler | None = None, world: World = World()) -> list[ScoredTrajectory]:  # noqa: B008  a frozen value
    """The same without workers."""
    player = world.player(sampler or ByStream())
    work = player.play(groups(*questions), samples=SAMPLES, run_seed=SEED, step=STEP, on_scored=lambda _: None)
    return timeless(asyncio.run(work))


# --- the same trajectories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_trajectories_are_those_of_one_process(pool: WorkerPool, workers: int) -> None:
    scored, reports, ids = play(pool, "a", "b", "c", workers=workers)
    assert timeless(scored) == here("a", "b", "c")
    assert {turn.policy_version for each in scored for turn in each.trajectory.turns} == {3}
    assert any(turn.condensation for turn in scored[0].trajectory.turns)
    assert sorted(ids) == [f"7/{group}/{sample}" for group in range(3) for sample in range(SAMPLES)]
    assert len(reports) == workers
    assert (
        sum(report.counts["calls"] for report in reports if isinstance(report.counts, dict)) == 9 * 5
    )  # prompts after the first


def test_attention_and_measured_answers_come_from_the_sampler_of_the_rank(pool: WorkerPool) -> None:
    scored, _, _ = play(pool, "a", "b", world=World(attends=True), key=4)
    assert timeless(scored) == here("a", "b", world=World(attends=True))
    turns = [turn for each in scored for turn in each.trajectory.turns]
    assert any(turn.condensation for turn in turns)
    assert {turn.answer_logprob is None for turn in turns} == {False}


def test_groups_are_played_at_the_same_time_by_several_processes_and_scored_there(pool: WorkerPool) -> None:
    scored, _, _ = play(pool, "a", "b", workers=2, world=World("process"), key=1)
    processes = [each.score.components["process"] for each in scored]
    assert len(set(processes[:SAMPLES])) == len(set(processes[SAMPLES:])) == 1  # whole groups
    assert len({*processes, os.getpid()}) == 3


def test_a_group_reward_sees_the_whole_group(pool: WorkerPool) -> None:
    scored, _, _ = play(pool, "a", "b", "c", workers=2, world=World("siblings"), key=2)
    assert [each.score.total for each in scored] == [3.0] * 9


# --- failures ---------------------------------------------------------------------------------------------------------


def test_failures_keep_their_reason_file_and_line(pool: WorkerPool) -> None:
    scored, _, _ = play(pool, "raise", "weights", "c")
    assert timeless(scored) == here("raise", "weights", "c")
    raised, failed = scored[0].trajectory.failure, scored[SAMPLES].trajectory.failure
    assert raised is not None
    assert raised.location.startswith("tests/worker_program.py:")
    assert failed is not None
    assert (failed.source, failed.error) == ("the sampler", "KeyError")
    assert failed.location.startswith(
        "tests/test_rollout_workers.py:"
    )  # the sampler's code, in the process of the rank


@pytest.mark.parametrize(
    ("question", "reason"),
    [("exit", "ended itself with exit code 3"), ("kill", "was killed by signal 9 (Killed)")],
)
def test_a_worker_that_dies_costs_its_unfinished_trajectories_and_is_replaced(
    pool: WorkerPool, question: str, reason: str
) -> None:
    scored, reports, ids = play(pool, "a", question, "c", workers=2)
    assert timeless(scored)[:3] == here("a")[:3]
    assert len(ids) == 9
    assert len(reports) == 1
    for lost in scored[3:6]:
        assert lost.trajectory.stop is StopReason.ENVIRONMENT_ERROR
        assert lost.score.total == 0
        assert reason in lost.trajectory.detail
    again, _, _ = play(pool, "a", "b", "c", workers=2)
    assert timeless(again) == here("a", "b", "c")


def test_the_rank_goes_on_while_it_waits_for_the_end_of_a_worker(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile the sampler finishes replies that nobody reads any more."""
    scored, _, _ = play(pool, "a", workers=1, world=World("process"), key=1)
    worker = int(scored[0].score.components["process"])
    server = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    released_by = list[str]()

    def release(who: str) -> None:
        released_by.append(who)
        os.kill(server, signal.SIGCONT)

    async def main() -> None:
        batch = asyncio.create_task(played(pool, groups("kill", *["late"] * 5), 1, World(), 0))
        await asyncio.sleep(1)
        assert not batch.done()
        release("the rank")
        await batch

    blocked = threading.Timer(15, release, ["the timer"])
    os.kill(server, signal.SIGSTOP)
    blocked.start()
    asyncio.run(main())
    blocked.cancel()
    assert released_by == ["the rank"]
    assert not caplog.messages


def test_an_idle_worker_that_was_killed_is_replaced_before_a_batch(pool: WorkerPool) -> None:
    scored, _, _ = play(pool, "a", workers=1, world=World("process"), key=1)
    worker = psutil.Process(int(scored[0].score.components["process"]))
    worker.kill()
    # the connection of a zombie is open until its other threads have ended
    assert eventually(lambda: worker.status() == psutil.STATUS_ZOMBIE and worker.num_threads() == 1)
    scored, _, _ = play(pool, "a", workers=1)
    assert timeless(scored) == here("a")


def test_a_world_that_cannot_be_set_up_ends_the_batch(pool: WorkerPool) -> None:
    with pytest.raises(RolloutError, match="setting up a rollout worker: LookupError: no such world"):
        play(pool, "a", world=World(broken=True), key=3, workers=1)


def test_a_problem_that_cannot_be_sent_is_an_error_that_says_what_to_do(pool: WorkerPool) -> None:
    batch = problem_groups([Problem(id="p", question="a", data={"call": lambda: 1})], STEP)
    with pytest.raises(RolloutError, match=r"sending problems to a rollout worker.*rollout\.workers\.processes=0"):
        asyncio.run(played(pool, batch, 1, World(), 0))


class OfTheRank:
    """A value that can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_a_problem_that_a_worker_cannot_read_is_an_error(pool: WorkerPool) -> None:
    batch = problem_groups([Problem(id="p", question="a", data={"value": OfTheRank()})], STEP)
    with pytest.raises(RolloutError, match=r"reading problems in a rollout worker: ValueError: invalid literal"):
        asyncio.run(played(pool, batch, 1, World(), 0))


def test_what_the_rank_raises_for_a_trajectory_ends_the_batch(pool: WorkerPool) -> None:
    def full(_: ScoredTrajectory) -> None:
        raise RolloutError("the disk is full")

    work = pool.play(
        Setup(0, World()), groups("a"), workers=1, samples=1, stream=(0, 7), turn_seconds=60.0, on_scored=full
    )
    with pytest.raises(RolloutError, match="the disk is full"):
        asyncio.run(work)


# --- interruption -----------------------------------------------------------------------------------------------------


def test_a_cancelled_batch_is_given_up_by_the_workers_which_play_the_next_one(pool: WorkerPool) -> None:
    async def interrupted() -> None:
        batch = asyncio.create_task(played(pool, groups("hang", "hang"), 2, World(), 0))
        await asyncio.sleep(0.2)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(interrupted())
    scored, _, _ = play(pool, "a", "b")
    assert timeless(scored) == here("a", "b")


def test_closing_ends_every_process() -> None:
    pool = WorkerPool(ProcessHost("worker_program:open_worlds"), ByStream(), model=lambda name: pytest.fail(name))
    scored, _, _ = play(pool, "a", "b", world=World("process"))
    processes = {int(each.score.components["process"]) for each in scored}
    assert len(processes) == 2
    pool.close()
    pool.close()
    assert eventually(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))


def test_no_worker_outlives_a_rank_that_ended_before_it_read_an_answer(tmp_path: Path) -> None:
    """Its end of the connection is then reset, not closed; the second worker hangs and reads nothing."""
    control, theirs = Pipe()
    opener = "worker_program:blocked"
    program = PROGRAM.format(path=sys.path, module=fork_workers.__module__, control=theirs.fileno(), opener=opener)
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "STARTED": str(tmp_path)},
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )
    theirs.close()
    for number in range(2):
        ours, workers = socket.socketpair()
        with ours, workers:
            control.send(number)
            send_handle(control, workers.fileno(), server.pid)
    while len(list(tmp_path.iterdir())) < 2:
        assert server.poll() is None
        time.sleep(0.05)
    control.send(0)  # end the first worker
    assert control.poll(60)
    control.close()
    assert server.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    for process in tmp_path.iterdir():
        status = Path("/proc", process.name, "status")
        with suppress(FileNotFoundError, ProcessLookupError):  # it was waited for
            while "State:\tZ" not in status.read_text():  # it is being killed
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_an_exit_code_says_what_happened() -> None:
    assert "process 7 was killed by signal 11 (Segmentation fault), as a fault in C code does" in described(7, -11)
    assert "process 7 was killed by signal 9 (Killed), as the kernel does when memory runs out" in described(7, -9)
    assert "process 7 ended itself with exit code 3" in described(7, 3)


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "groups", "trajectories", "cpus", "number"),
    [
        (Workers(), 16, 128, 2, 0),  # a laptop with the quickstart
        (Workers(), 16, 64, 64, 0),
        (Workers(), 16, 128, 8, 2),
        (Workers(), 64, 512, 8, 6),
        (Workers(), 3, 512, 8, 3),
        (Workers(processes=4), 16, 8, 2, 4),
        (Workers(processes=4), 3, 8, 2, 3),
        (Workers(processes=0), 64, 512, 64, 0),
        (Workers(ray=16), 64, 512, 2, 16),
    ],
)
def test_the_number_of_workers(workers: Workers, groups: int, trajectories: int, cpus: int, number: int) -> None:
    assert workers.number(groups=groups, trajectories=trajectories, cpus=cpus) == number


def test_workers_are_processes_or_actors() -> None:
    with pytest.raises(ValueError, match="found processes=2 and ray=3, wanted one of them"):
        Workers(processes=2, ray=3)


def test_a_resume_may_change_the_workers_since_they_change_nothing_that_is_learned() -> None:
    assert not Change(first_step=1, key="rollout.workers.processes", old=None, new=4).learned
    assert Change(first_step=1, key="rollout.staleness", old=0, new=1).learned


def test_a_run_says_where_its_rollouts_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(*overrides: str) -> str:
        return described_workers(build_components(load_config(ROOT / "configs/quickstart.yaml", overrides)))

    assert described("rollout.workers.processes=0") == "rollouts in this process: set by rollout.workers"
    assert described("rollout.workers.ray=1") == "rollouts in 1 Ray actor of each rank: set by rollout.workers"
    many = ("train.problems_per_step=4096",)
    cpus = len(os.sched_getaffinity(0))
    assert f"{cpus} CPU" in described(*many)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # that an engine of another test has set
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert f" {max(1, cpus // 4)} CPU" in described(*many)
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # a task of srun has CPUs of its own
    assert f" {cpus} CPU" in described(*many)
    local = "condenser={name: pipeline, options: {stages: [{name: summary_model, options: {model: some/model}}]}}"
    assert described(*many, local) == "rollouts in this process: condenser or reward holds a model"


# --- the whole program ------------------------------------------------------------------------------------------------


def test_an_evaluation_is_the_same_with_real_components_in_workers(tmp_path: Path, one_thread: None) -> None:
    """Log-probabilities included, though other requests share a batch."""
    config = load_config(ROOT / "configs/quickstart.yaml", ["evaluate.problems=3"])
    source = base_policy(config, build_components(config).task, RunFolder.create(tmp_path / "run"))

    def evaluated(sampler: Sampler, workers: int) -> list[ScoredTrajectory]:
        varied = vary(config, [f"rollout.workers.processes={workers}"])
        scored: list[ScoredTrajectory] = []
        with RolloutPlayers(varied, sampler, source) as players:
            components = build_components(varied)
            first, same = (players.player(components, temperature=1.0).key for _ in range(2))
            assert first == same  # workers make one player of them
            assert first != players.player(components, temperature=0.5).key
            evaluate_variant(
                "held-out",
                components,
                players=players,
                step=0,
                observer=Silent(),
                file=tmp_path / f"{workers}.jsonl",
                on_scored=scored.append,
            )
        return sorted(timeless(scored), key=lambda each: each.trajectory.id)

    with closing(open_sampler(config, source)) as sampler:
        alone, shared = evaluated(sampler, 0), evaluated(sampler, 2)
    assert alone == shared
    assert len(read_trajectories(tmp_path / "2.jsonl").trajectories) == len(alone) == 3


# --- Ray --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make cluster")
@pytest.mark.filterwarnings("ignore")
def test_ray_actors_play_the_same_trajectories_and_one_that_dies_is_replaced() -> None:
    pool = WorkerPool(RayHost("worker_program:open_worlds"), ByStream(), model=lambda name: pytest.fail(name))
    try:
        scored, reports, _ = play(pool, "a", "b", workers=2)
        assert timeless(scored) == here("a", "b")
        assert len(reports) == 2
        scored, _, _ = play(pool, "a", "exit", workers=2)
        assert timeless(scored)[:3] == here("a")
        assert "a Ray actor ended: " in scored[3].trajectory.detail
        scored, _, _ = play(pool, "a", "b", workers=2)
        assert timeless(scored) == here("a", "b")
    finally:
        pool.close()


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make cluster")
@pytest.mark.filterwarnings("ignore")
def test_a_machine_of_a_ray_cluster_that_dies_costs_its_trajectories_and_the_run_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setattr("condensegrpo.episodes.workers.ray_actors.REPLACE_SECONDS", 2.0)
    second, lost = cluster.add_node(num_cpus=1), threading.Event()

    class UntilLost(ByStream):
        """Answers when trajectories were lost with the other machine; the player's limit of a turn is a minute."""

        async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
            self.asked.set()
            await asyncio.to_thread(lost.wait, 3.0)
            return await super().sample(prompt_ids, params)

    async def play_and_lose() -> tuple[tuple[ScoredTrajectory, ...], tuple[PlayReport, ...]]:
        playing = pool.play(
            Setup(0, World()),
            groups("a", "b"),
            workers=2,
            samples=SAMPLES,
            stream=(SEED, STEP),
            turn_seconds=600.0,
            on_scored=lambda _: lost.set(),
        )
        task = asyncio.create_task(playing)
        await asyncio.to_thread(sampler.asked.wait)
        await asyncio.to_thread(cluster.remove_node, second, allow_graceful=False)
        return await task

    sampler = UntilLost()
    pool = WorkerPool(RayHost("worker_program:open_worlds"), sampler, model=lambda name: pytest.fail(name))
    try:
        scored, reports = asyncio.run(play_and_lose())
        whole = [each for each in timeless(scored) if not each.trajectory.detail]
        assert whole in (here("a", "b")[:SAMPLES], here("a", "b")[SAMPLES:])
        assert sum("a Ray actor ended: " in each.trajectory.detail for each in scored) == SAMPLES == len(whole)
        assert len(reports) == 1
        scored, reports, _ = play(pool, "a", "b", workers=2)
        assert (timeless(scored), len(reports)) == (here("a", "b"), 1)
        cluster.add_node(num_cpus=1)
        monkeypatch.setattr("condensegrpo.episodes.workers.ray_actors.REPLACE_SECONDS", 60.0)
        scored, reports, _ = play(pool, "a", "b", workers=2)
        assert (timeless(scored), len(reports)) == (here("a", "b"), 2)
    finally:
        lost.set()
        pool.close()
        cluster.shutdown()


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_ray_that_is_missing_is_an_error_before_anything_is_loaded() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", ["rollout.workers.ray=2"])
    with pytest.raises(ConfigError, match=r"rollout\.workers\.ray: Ray is not installed.*pip install -e '\.\[ray\]'"):
        build(config)
