"""``condensegrpo simulate``: the clock, the server model by hand, the schedule, bad input, and the command."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from random import Random
from typing import cast

import pytest
from builders import scored, trajectory, turn
from command import run

from condensegrpo.algorithms.settings import StopSettings
from condensegrpo.assembly.learning_signal import advantage_estimator
from condensegrpo.config.load import validate
from condensegrpo.config.schema import AlgorithmSettings, RunConfig
from condensegrpo.core.errors import ConfigError, RunError, ServerUnreachable
from condensegrpo.core.observer import Silent
from condensegrpo.core.plugin_task import result_of_task
from condensegrpo.core.trajectory import SamplingParams, Segment, TrainedTurn
from condensegrpo.planning.formulas import Decoder
from condensegrpo.samplers.vllm.settings import RequestSettings
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.replica import WeightsLabel
from condensegrpo.simulation.calibration import SampleTimes, learner_keys, preset_of, sampler_keys
from condensegrpo.simulation.clock import VirtualClock
from condensegrpo.simulation.cluster import Cluster, Spread, plan_cluster, read_cluster
from condensegrpo.simulation.hardware import (
    GPUS,
    MODELS,
    Efficiency,
    ServerTimes,
    learning_flops,
    prompt_flops,
    server_times,
    weight_bytes,
)
from condensegrpo.simulation.server import SimulatedServer, State
from condensegrpo.simulation.simulate import Simulation, passes, simulate, tree_size
from condensegrpo.simulation.workload import StandInPolicy, Workload, stand_in_tokenizer
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import write_trajectory
from condensegrpo.training.rollout import BatchFilter, BatchRollout, RolloutPrefetcher, Round

TREE = {
    "model": {"path": "any"},
    "task": {"name": "ledger"},
    "rollout": {
        "limits": {"max_turns": 3, "max_context_tokens": 2000, "max_output_tokens": 100},
        "tools": {"use": ["calculator"], "format": "tagged"},
    },
    "algorithm": {"advantage": {"estimator": "grpo"}},
    "train": {"problems_per_step": 4, "samples_per_problem": 4},
}
LENGTHS = {"reply_tokens": {"mean": 50}, "question_tokens": 40, "result_tokens": {"mean": 30}, "correct": 0.5}
# every figure by hand: a step is 10 ms, a turn 1 s, a tool call 2 s, an optimiser step 3 s, an update 0.5 s
BY_HAND = {
    "servers": 2,
    "learner_gpus": 2,
    "steps": 4,
    "server": {"step_seconds": 0.01},
    "learning": {"step_seconds": 3.0, "token_seconds": 0.0},
    "weights": {"measured": 0.5},
    "engine": {"turn_seconds": 0.0},
    "workload": {**LENGTHS, "tool_seconds": {"mean": 2.0}},
}
SMALL = {"step_seconds": 0.01, "kv_tokens": 2099}
STEP = 3 * 50 * 0.01 + 2 * 2.0  # seconds of a trajectory: three replies of 50 tokens, two calls between them


def config(**changes: object) -> RunConfig:
    tree = json.loads(json.dumps(TREE))
    for key, value in changes.items():
        section, name = key.split("__")
        tree[section][name] = value
    return validate(tree, source="test")


@cache
def simulated(staleness: int = 0) -> Simulation:
    return simulate(config(rollout__staleness=staleness), Cluster.model_validate(BY_HAND), Silent())


def test_the_clock_jumps_to_the_next_timer_and_stands_between_calls() -> None:
    clock = VirtualClock()
    order = []

    async def after(seconds: float, name: str) -> str:
        await asyncio.sleep(seconds)
        order.append((name, clock.now))
        return name

    later = clock.submit(after(3600.0, "later"))
    assert clock.run(after(10.0, "sooner")) == "sooner"
    assert clock.now == 10.0
    assert later.result() == "later"
    assert order == [("sooner", 10.0), ("later", 3600.0)]
    clock.close()


def test_plug_ins_run_in_the_thread_of_the_clock() -> None:
    async def name() -> str:
        return threading.current_thread().name

    async def plug_in() -> object:
        return await result_of_task(name(), name="a plug-in", step_seconds=1.0, seconds=None)

    clock = VirtualClock()
    assert clock.run(plug_in()) == threading.current_thread().name
    clock.close()


def test_closing_the_clock_cancels_what_runs() -> None:
    clock = VirtualClock()
    future = clock.submit(asyncio.sleep(10.0))
    clock.run(asyncio.sleep(1.0))
    clock.close()
    assert future.cancelled()


def test_everything_that_waits_for_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("condensegrpo.simulation.clock.STALL_SECONDS", 0.01)
    clock = VirtualClock()
    with pytest.raises(RunError, match="everything waits"):
        clock.run(asyncio.Event().wait())
    clock.close()


@cache
def policy() -> StandInPolicy:
    workload, tokenizer = Workload(reply_tokens=Spread(mean=40.0)), stand_in_tokenizer(["<tool>"])
    return StandInPolicy(tokenizer=tokenizer, workload=workload, call="<tool>", max_turns=2, seed=0)


def server_of(clock: VirtualClock, times: ServerTimes) -> SimulatedServer:
    return SimulatedServer("simulated:0", times, policy(), now=lambda: clock.now, load_seconds=1.0)


def served(
    times: ServerTimes, prompts: Sequence[Sequence[int]], *, pause: float = 0.0
) -> tuple[list[float], SimulatedServer]:
    """When the reply to each prompt ends, of 40 tokens each, and the server."""
    clock = VirtualClock()
    server = server_of(clock, times)
    (mark,) = policy().tokenizer.encode(" ###", add_special_tokens=False)

    async def one(index: int, prompt: Sequence[int]) -> float:
        await asyncio.sleep(pause * index)
        params = SamplingParams(max_tokens=100, seed=index, stop_ids=(1,), trajectory=f"1/{index}/0")
        reply = await server.generate((*prompt, mark), params, 1e6)
        assert len(reply.generation.token_ids) == 40
        return clock.now

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))

    ends = clock.run(all_of_them())
    clock.close()
    return ends, server


def test_a_batch_decodes_together_and_a_larger_batch_more_slowly() -> None:
    ends, _ = served(ServerTimes(step_seconds=0.01, sequence_seconds=0.005), [[5] * 9, [6] * 9])
    assert ends == pytest.approx([40 * 0.02] * 2)
    # the second joins after 10 steps of one reply (0.15 s); 30 steps of both; then 10 steps of the second alone
    ends, _ = served(ServerTimes(step_seconds=0.01, sequence_seconds=0.005), [[5] * 9, [6] * 9], pause=0.15)
    assert ends == pytest.approx([0.15 + 30 * 0.02, 0.15 + 30 * 0.02 + 10 * 0.015])


def test_a_step_takes_longer_the_more_is_cached() -> None:
    # 10 tokens of prompt: Σ over 40 steps of 0.01 + 0.001·(10 + s), in the limit of small steps
    ends, _ = served(ServerTimes(step_seconds=0.01, cached_token_seconds=0.001), [[5] * 9])
    assert ends == pytest.approx([40 * 0.01 + 0.001 * (40 * 10 + 40**2 / 2)])


def test_prompts_are_read_one_after_another_and_cached_blocks_are_not_read_again() -> None:
    times = ServerTimes(step_seconds=0.01, prompt_token_seconds=0.1, block=4)
    ends, server = served(times, [[5] * 9, [5] * 9], pause=10.0)
    # 10 tokens; the second time 8 of them are in whole blocks of the cache
    assert ends == pytest.approx([1.0 + 0.4, 10.0 + 0.2 + 0.4])
    assert (server.prompt_tokens, server.cached_tokens) == (20, 8)


def test_a_full_server_preempts_the_newest_reply_and_reads_it_again() -> None:
    # two replies of 10 + 40 tokens; 80 fit: after 30 steps the second one goes, and comes back when the first has ended
    ends, server = served(ServerTimes(step_seconds=0.01, kv_tokens=80), [[5] * 9, [6] * 9])
    assert server.preemptions == 1
    assert ends == pytest.approx([0.4, 0.5], abs=0.02)


def test_requests_beyond_the_largest_batch_wait() -> None:
    ends, _ = served(ServerTimes(step_seconds=0.01, sequences=1), [[5] * 9, [6] * 9])
    assert ends == pytest.approx([0.4, 0.8])


def test_a_lost_server_fails_its_requests() -> None:
    clock = VirtualClock()
    server = server_of(clock, ServerTimes(step_seconds=1.0))
    params = SamplingParams(max_tokens=100, stop_ids=(1,), trajectory="1/0/0")
    reply = clock.submit(server.generate((5,), params, inf))
    lost = clock.submit(server.lose(5.0))
    with pytest.raises(ServerUnreachable):
        reply.result()
    assert not clock.run(server.healthy())
    lost.result()
    assert clock.run(server.healthy())
    assert clock.now == 5.0
    clock.close()


def test_without_staleness_sampling_learning_and_updates_add_up() -> None:
    simulation = simulated()
    for step in simulation.steps:
        assert step.sampling == pytest.approx(STEP, abs=0.1)  # each reply's own number may split into other tokens
        assert (step.learning, step.sync, step.trajectories) == (3.0, 0.5, 16)
        assert step.staleness == {0: 16}
        assert step.stops == {"answered": 16}
    assert simulation.seconds == pytest.approx(STEP + 3.5, abs=0.1)
    assert simulation.learner["learning"] == pytest.approx(3.0 / simulation.seconds)
    assert sum(simulation.servers.values()) == pytest.approx(1.0)
    assert simulation.servers[State.BUSY] == pytest.approx(1.5 / simulation.seconds, abs=0.02)
    assert simulation.gpu_hours == pytest.approx(4 * simulation.seconds / 3600 / 16 * 1000)


def test_with_staleness_1_a_step_takes_as_long_as_its_longer_half() -> None:
    simulation = simulated(1)
    assert simulation.seconds == pytest.approx(STEP + 0.5, abs=0.1)  # learning (3 s) is hidden, the update is not
    assert simulation.staleness == {1: 1.0}


def test_staleness_2_hides_the_wait_for_every_second_batch() -> None:
    simulation = simulated(2)
    assert set(simulation.staleness) <= {0, 1, 2}
    assert simulation.failed == 0


def test_the_same_seed_gives_the_same_figures() -> None:
    uneven = {**BY_HAND, "workload": {**LENGTHS, "reply_tokens": {"mean": 50, "sigma": 0.7}}}
    first, second = (simulate(config(), Cluster.model_validate(uneven), Silent()) for _ in range(2))
    assert first.steps == second.steps
    assert len({step.sampling for step in first.steps}) == 4
    assert first.servers[State.TAIL] > 0  # one server has ended while the other one has not


def test_a_lost_server_costs_time_and_no_trajectory() -> None:
    losing = {**BY_HAND, "losses": [{"server": 0, "at": 1.0, "seconds": 4.0}]}
    simulation = simulate(config(), Cluster.model_validate(losing), Silent())
    assert simulation.failed == 0
    assert simulation.steps[0].sampling > STEP
    assert simulation.steps[3].sampling == pytest.approx(STEP, abs=0.1)
    assert simulation.servers[State.LOST] == 0.0  # it came back before the steps that count


def test_a_lost_server_costs_its_share_and_no_more() -> None:
    # a step of decoding takes 10 ms for each reply: 16 replies at a time on 4 servers take 3 · 50 · 0.04 s, on 2 twice
    each = {"step_seconds": 1e-6, "sequence_seconds": 0.01}
    even = {**BY_HAND, "servers": 4, "steps": 1, "server": each, "workload": {**LENGTHS, "tool_seconds": {"mean": 0}}}
    losses = [{"server": index, "at": 0.0, "seconds": 1000.0} for index in (1, 3)]
    all_there, half = (
        simulate(config(), Cluster.model_validate({**even, "losses": lost}), Silent()) for lost in ((), losses)
    )
    assert all_there.steps[0].sampling == pytest.approx(6.0, rel=0.05)
    assert half.steps[0].sampling == pytest.approx(12.0, rel=0.05)
    assert half.failed == 0


def test_trajectories_spread_evenly_over_servers_and_stay_with_theirs() -> None:
    clock, servers = VirtualClock(), list[SimulatedServer]()
    mark = policy().tokenizer.encode(" ###", add_special_tokens=False)

    def client(url: str, token: str) -> SimulatedServer:
        del url, token
        servers.append(server_of(clock, ServerTimes(step_seconds=0.01)))
        return servers[-1]

    async def both_replies(pool: ReplicaPool, trajectory: str) -> None:
        for seed in (0, 1):
            await pool.sample(
                (5, *mark), SamplingParams(max_tokens=100, seed=seed, stop_ids=(1,), trajectory=trajectory)
            )

    async def play() -> None:
        pool = ReplicaPool(WeightsLabel(label="default", folder=None), RequestSettings())
        await pool.open([("a", None), ("b", None), ("c", None)], token="", shape={}, start_seconds=1.0, client=client)
        await asyncio.gather(*(both_replies(pool, f"2/{index}/0") for index in range(30)))

    clock.run(play())
    assert [server.output_tokens for server in servers] == [10 * 2 * 40] * 3
    assert not any(server.trajectories for server in servers)  # each served the last reply of those that it began
    clock.close()


@dataclass
class TimedRollout:
    """Batches of four trajectories, which are scored 1, 1, 1 and 10 seconds after their batch begins."""

    clock: VirtualClock
    begun: dict[int, float] = field(default_factory=dict)

    def first_round(self, step: int) -> Round:
        return Round(step=step, chosen=(0,), new=1)

    def size(self, batch: Round) -> int:
        return 4 * batch.new

    async def run(self, batch: Round, on_scored: Callable[[], None]) -> tuple[()]:
        self.begun[batch.step] = self.clock.now
        for seconds in (1.0, 0.0, 0.0, 9.0):
            await asyncio.sleep(seconds)
            on_scored()
        return ()


def test_the_next_batch_of_the_same_weights_begins_when_half_of_the_last_one_is_scored() -> None:
    clock = VirtualClock()
    rollout = TimedRollout(clock)
    keep_all = BatchFilter(stops=StopSettings(), estimator=advantage_estimator(config()), resample_rounds=0)
    with RolloutPrefetcher(
        cast(BatchRollout, rollout), keep_all, staleness=3, steps=9, observer=Silent(), batches={}, loop=clock
    ) as prefetcher:
        prefetcher.take(1)
        assert (rollout.begun, clock.now) == ({1: 0.0}, 10.0)  # what comes next is sampled under the same weights
        prefetcher.finish()
        assert rollout.begun == {1: 0.0, 2: 10.0, 3: 11.0, 4: 12.0}
        assert clock.now == 22.0


def test_the_tree_of_rows_counts_shared_tokens_once() -> None:
    def row(*ids: int) -> Segment:
        turn = TrainedTurn(turn=0, start=len(ids) - 1, logprobs=(-1.0,), advantage=1.0, weight=1.0)
        return Segment(token_ids=ids, turns=(turn,), trajectory="1/0/0", first_turn=0)

    assert tree_size([row(1, 2, 3), row(1, 2, 4)]) == (4, 1 + 2 + 3 + 3)


def test_frozen_weights_have_no_gradient() -> None:
    """6 · 22 weights · 5 tokens + 12 · 2 · 15 pairs + 6 · 20 · 3 trained, and 4 in place of 6."""
    # weights: 2 · (2·2 + 2·2 + 3)
    sizes = {"hidden": 2, "layers": 1, "heads": 1, "kv_heads": 1, "head_size": 2, "ffn": 1, "vocabulary": 10}
    model = Decoder(**sizes, normed_heads=False, tied=True)
    size = {"tokens": 5, "pairs": 15, "trained": 3}
    assert learning_flops(model, **size, frozen=False) == 660 + 360 + 360
    assert learning_flops(model, **size, frozen=True) == 440 + 360 + 240
    penalised = AlgorithmSettings.model_validate({"kl": {"coefficient": 0.1}})  # the reference's forward pass
    assert (passes(penalised, frozen=False), passes(penalised, frozen=True)) == (pytest.approx(4 / 3), 1.5)


def test_presets_have_the_bytes_of_their_models() -> None:
    sizes = {name: weight_bytes(model) / 2 for name, model in MODELS.items()}
    # parameters of Qwen2.5 by its model cards, biases and norms (less than 1 %) left out
    assert sizes == pytest.approx({"1.5B": 1.54e9, "7B": 7.61e9, "32B": 32.5e9}, rel=0.01)
    times = server_times(GPUS["H100"], MODELS["7B"], Efficiency(step_overhead=0.0, bandwidth=1.0), tensor_parallel=1)
    assert times.step_seconds == pytest.approx(14.1e9 / 3.35e12, rel=0.01)


def test_times_of_a_gpu_give_back_the_shares_of_its_data_sheet() -> None:
    gpu, model = GPUS["H100"], MODELS["1.5B"]
    shares = Efficiency(learner=0.4, prefill=0.6, bandwidth=0.5, step_overhead=0.002, reply_overhead=1e-5)
    times = server_times(gpu, model, shares, tensor_parallel=1)

    def sampled(replies: int, prompt: int) -> SampleTimes:
        step = times.step_seconds + replies * (times.sequence_seconds + (prompt + 50) * times.cached_token_seconds)
        first = replies * prompt_flops(model, prompt) / (0.6 * gpu.flops)
        return SampleTimes(replies=replies, prompt=prompt, steps=100, first=first, step=step)

    three = {"single": sampled(1, 16), "short": sampled(64, 16), "long": sampled(64, 1000)}
    keys = sampler_keys(model, "H100", **three)
    assert sampler_keys(model, "H100", **{**three, "long": replace(three["long"], first=1e-6)}) == {}
    size = {"rows": 8, "context": 900, "outputs": 100, "passes": 2, "frozen": False}
    arithmetic = learning_flops(model, tokens=8000, pairs=8 * 500_500, trained=800, frozen=False) / (
        2 * gpu.flops * 0.4
    )
    keys = {**keys, **learner_keys(model, "H100", ranks=2, **size, seconds=(0.3 + arithmetic, 0.3 + 2 * arithmetic))}
    efficiency = {f"efficiency.{key}": pytest.approx(value, rel=1e-4) for key, value in shares}
    assert keys == {"gpu": "H100", "learning.step_seconds": pytest.approx(0.6), **efficiency}
    # of a device without a data sheet: seconds, those of an H100 by hand
    assert sampler_keys(model, None, **three) == {
        "server.step_seconds": pytest.approx(0.002 + 3.09e9 / (0.5 * 3.35e12), rel=0.01),
        "server.sequence_seconds": pytest.approx(1e-5 + 3.09e9 / (0.6 * 989e12), rel=0.01),
        "server.cached_token_seconds": pytest.approx(28_672 / (0.5 * 3.35e12)),
        "server.prompt_token_seconds": pytest.approx(2.75e9 / (0.6 * 989e12), rel=0.02),
    }
    assert learner_keys(model, None, ranks=2, **size, seconds=(4.0, 5.0)) == {
        "learning.step_seconds": 6.0,
        "learning.token_seconds": 2 / 8000,
    }
    for noise in ((1.0, 0.99), (1.0, 1.04), (1e-6, 2e-6)):  # the last is faster than the data sheet
        assert learner_keys(model, "H100", ranks=2, **size, seconds=noise) == {}


def test_times_that_shares_of_the_data_sheet_do_not_give_are_given_back_as_seconds() -> None:
    """Keys and values are read at 27 % of the bandwidth here, at which the weights alone would take 3.4 ms."""
    sampled = partial(SampleTimes, steps=100, first=0.5)
    single, short, long = (
        sampled(replies=replies, prompt=prompt, step=step)
        for replies, prompt, step in ((1, 16, 3e-3), (64, 16, 4e-3), (64, 1000, 6e-3))
    )
    keys = sampler_keys(MODELS["1.5B"], "H100", single=single, short=short, long=long)
    times = ServerTimes.model_validate({key.removeprefix("server."): value for key, value in keys.items()})
    for each in (single, short, long):
        reply = times.sequence_seconds + each.cached * times.cached_token_seconds
        assert times.step_seconds + each.replies * reply == pytest.approx(each.step)


@pytest.mark.parametrize(
    ("name", "gigabytes", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "H100"),
        ("NVIDIA A100-SXM4-80GB", 85.1, "A100"),
        ("NVIDIA H200", 150.1, "H200"),
        ("NVIDIA H100 PCIe", 85.0, None),
        ("NVIDIA A100-PCIE-80GB", 85.0, None),
        ("NVIDIA A100-SXM4-40GB", 42.3, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 85.0, None),
        ("NVIDIA H100 64GB", 68.1, None),
        ("NVIDIA GH200 480GB", 102.0, None),
        ("NVIDIA L4", 23.7, None),
    ],
)
def test_a_gpu_is_known_by_its_name_unless_it_has_another_data_sheet(
    name: str, gigabytes: float, preset: str | None
) -> None:
    assert preset_of(name, gigabytes * 1e9) == preset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "H10"}, "reading gpu: found 'H10'"),
        ({"model": "70B"}, "reading model: found '70B'"),
        ({"gpus": 4, "tensor_parallel": 8}, "checking tensor_parallel: found 8 GPUs a server, and gpus=4"),
        ({"gpus": 4, "servers": 4, "learner_gpus": 1}, "checking gpus: found 4, wanted at least 5"),
        ({}, "reading gpus: found neither gpus nor servers"),
        ({"servers": 1, "server": SMALL}, "checking tensor_parallel: found 1, with which a server has room"),
        ({"servers": 1, "workload": {"reply_tokens": {"mean": 101}}}, "checking workload.reply_tokens.mean: found 101"),
        ({"servers": 1, "workload": {**LENGTHS, "turns": {"mean": 4}}}, "checking workload.turns.mean: found 4"),
        ({"servers": 1, "workload": LENGTHS, "losses": [{"server": 1, "at": 0, "seconds": 1}]}, "checking losses"),
    ],
)
def test_a_cluster_that_cannot_be_names_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_cluster(Cluster.model_validate(changes), config())


def test_a_file_with_an_unknown_key_names_it(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gpu: H100\nworkload: {reply_token: {mean: 3}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"workload\.reply_token"):
        read_cluster(file)


def test_a_condenser_that_needs_a_model_is_refused() -> None:
    attention = validate({**TREE, "condenser": {"name": "attention"}}, source="test")
    with pytest.raises(ConfigError, match="simulating the condenser attention: it needs a model"):
        simulate(attention, Cluster.model_validate(BY_HAND), Silent())


def test_a_run_folder_without_trajectories_is_refused(tmp_path: Path) -> None:
    cluster = Cluster.model_validate({**BY_HAND, "workload": {**LENGTHS, "recorded": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"reading workload\.recorded: found no trajectory"):
        simulate(config(), cluster, Silent())


def test_a_run_gives_the_seconds_of_a_learned_token_and_of_an_update(tmp_path: Path) -> None:
    measured = Cluster.model_validate({**BY_HAND, "measured": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"reading measured: found no step with seconds/learn, seconds/sync"):
        plan_cluster(measured, config())
    times = ((6.0, 9.0), (2.0, 3.0), (2.0, 1.0))
    steps = [
        {"step": 1, "tokens/computed": 1000, "seconds/learn": learn, "seconds/sync": sync} for learn, sync in times
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps), encoding="utf-8")
    plan = plan_cluster(measured, config())
    assert (plan.learning_seconds(0.0, 500), plan.load_seconds) == (1.0, 3.0)


def test_recorded_trajectories_give_turns_and_lengths_of_replies(tmp_path: Path) -> None:
    file = RunFolder(tmp_path).trajectories(1)
    file.parent.mkdir()
    write_trajectory(file, scored(trajectory(turn([1], [2] * 60), turn([1], [2] * 40)), 1.0))
    cluster = Cluster.model_validate({**BY_HAND, "steps": 1, "workload": {**LENGTHS, "recorded": str(tmp_path)}})
    (step,) = simulate(config(), cluster, Silent()).steps
    assert step.output_tokens == 16 * (60 + 40)


def test_recorded_seconds_of_tools_are_drawn(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.trajectories(1).parent.mkdir()
    cluster = Cluster.model_validate({**BY_HAND, "steps": 1, "workload": {**LENGTHS, "recorded_tools": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"reading workload\.recorded_tools: found no trajectory with a turn"):
        simulate(config(), cluster, Silent())
    write_trajectory(run.trajectories(1), scored(trajectory(turn([1], [2]), turn([1], [2])), 1.0))
    with pytest.raises(ConfigError, match=r"reading workload\.recorded_tools: found no seconds of a tool"):
        simulate(config(), cluster, Silent())
    timed = [replace(turn([1], [2]), tool_seconds=seconds) for seconds in (7.0, 7.0, 100.0)]
    write_trajectory(run.trajectories(2), scored(trajectory(*timed), 1.0))
    (step,) = simulate(config(), cluster, Silent()).steps
    assert step.sampling == pytest.approx(3 * 50 * 0.01 + 2 * 7.0, abs=0.1)  # the last reply waits for nothing
    assert Spread(mean=0.0, values=(2.0, 5.0)).draw(Random(0)) in {2.0, 5.0}


@pytest.mark.parametrize("condenser", ["summary", "observation_mask"])
def test_condensers_work_in_a_simulated_run(condenser: str) -> None:
    tight = validate(
        {
            **TREE,
            "condenser": {"name": condenser},
            "rollout": {
                "limits": {"max_turns": 6, "max_context_tokens": 420, "max_output_tokens": 100},
                "tools": {"use": ["calculator"], "format": "native"},
                "condense": {"when": "over_budget", "share": 0.8},
            },
        },
        source="test",
    )
    short = {**LENGTHS, "summary_tokens": {"mean": 20}}
    cluster = Cluster.model_validate({**BY_HAND, "steps": 1, "workload": short})
    simulation = simulate(tight, cluster, Silent())
    assert simulation.steps[0].stops == {"answered": 16}


def test_the_command_prints_a_sweep_as_json(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(BY_HAND), encoding="utf-8")
    picture = tmp_path / "sweep.svg"
    sweep = ("--sweep", "servers=1,2", "--sweep", "staleness=0,1", "--plot", str(picture), "--json")
    small = ("train.problems_per_step=2", "train.samples_per_problem=2")
    done = run("simulate", "search_mt_grpo", *small, "--cluster", str(file), *sweep)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [each["point"] for each in results] == [
        {"servers": servers, "staleness": staleness} for servers in ("1", "2") for staleness in ("0", "1")
    ]
    assert picture.stat().st_size > 0
    ended = [line for line in done.stderr.split("\n") if "s/step" in line]
    assert [line.partition(": ")[0] for line in ended] == [
        f"servers={servers}, staleness={staleness}" for servers in (1, 2) for staleness in (0, 1)
    ]
    wrong = run("simulate", "search_mt_grpo", "--sweep", "servers")
    assert (wrong.returncode, "reading --sweep" in wrong.stderr) == (2, True)
    twice = run("simulate", "search_mt_grpo", "--sweep", "servers=1,2", "--sweep", "servers=4")
    assert (twice.returncode, "servers is swept already" in twice.stderr) == (2, True)
