"""A simulated run: the steps of ``training/train.py`` in virtual time, and what they took."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from condensegrpo.algorithms.credit import rows_of
from condensegrpo.algorithms.prefix_tree import sorted_rows
from condensegrpo.algorithms.staleness import sampler_gets_weights, staleness_of
from condensegrpo.assembly.build import build_components
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.objects import configured
from condensegrpo.assembly.runtime import renderer_with, trajectory_engine
from condensegrpo.assembly.scorers import names_of
from condensegrpo.config.load import BFLOAT16_CAP
from condensegrpo.config.schema import AlgorithmSettings, Plugin, RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.holds_model import any_holds_model
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Segment
from condensegrpo.episodes.collect import OnScored
from condensegrpo.episodes.group import ProblemGroup
from condensegrpo.episodes.player import LocalPlayer
from condensegrpo.simulation.clock import VirtualClock
from condensegrpo.simulation.cluster import Cluster, ClusterPlan, plan_cluster, recorded_replies
from condensegrpo.simulation.hardware import learning_flops
from condensegrpo.simulation.sampler import SimulatedSampler
from condensegrpo.simulation.server import SimulatedServer, State
from condensegrpo.simulation.workload import (
    StandInPolicy,
    StandInReward,
    StandInTask,
    call_text,
    stand_in_tokenizer,
    stand_in_tool,
)
from condensegrpo.training.learn_step import give_credit
from condensegrpo.training.rollout import RolloutPrefetcher, StepBatch, batch_filter, batch_rollout

EPOCH_STEPS = 4  # a stand-in task has the problems of so many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One optimiser step, in virtual seconds."""

    step: int
    seconds: float
    sampling: float  # that the learner waited for trajectories
    learning: float
    sync: float  # that it waited for weights to be staged, for the end of sampling, and for weights to be loaded
    trajectories: int
    output_tokens: int
    computed_tokens: int  # by the learner, a shared prefix once
    staleness: Mapping[int, int]  # trajectories by the age of their oldest turn, in steps
    stops: Mapping[str, int]  # trajectories by why they ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a simulated run took, over the steps after the first ones, in which the pipeline fills."""

    plan: ClusterPlan
    steps: tuple[StepTimes, ...]  # all of them
    counted: int  # the last steps, that the figures are of
    servers: Mapping[State, float]  # share of the servers' time by what they did
    engine_cores: float  # of the rollout engine, busy on average
    engine_wait: float  # seconds that a turn waited for the engine, on average
    cache_hits: float  # share of prompt tokens that were in a prefix cache
    preemptions: int  # of replies, over the whole run

    @property
    def window(self) -> tuple[StepTimes, ...]:
        """The steps that count."""
        return self.steps[-self.counted :]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return fmean(step.seconds for step in self.window)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens."""
        return sum(step.output_tokens for step in self.window) / (self.seconds * self.counted)

    @property
    def learner(self) -> Mapping[str, float]:
        """Share of the learner's time by what it did: learning, or waiting for trajectories or weights."""
        names = ("learning", "sampling", "sync")
        return {name: fmean(getattr(step, name) for step in self.window) / self.seconds for name in names}

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of 1,000 trajectories."""
        return self.plan.gpus * self.seconds / 3600 * 1000 / fmean(step.trajectories for step in self.window)

    @property
    def staleness(self) -> Mapping[int, float]:
        """Share of trajectories by staleness."""
        counts: Counter[int] = sum((Counter(step.staleness) for step in self.window), Counter())
        return {age: count / counts.total() for age, count in sorted(counts.items())}

    @property
    def failed(self) -> int:
        """Trajectories of all steps that ended with an error."""
        return sum(count for step in self.steps for stop, count in step.stops.items() if stop.endswith("_error"))


def simulate(config: RunConfig, cluster: Cluster, observer: Observer) -> Simulation:
    """Simulate the steps of a run; the same configuration, cluster and seed give the same figures.

    Raises:
        ConfigError: the cluster does not fit together or to the configuration, or a part needs a model.
    """
    plan = plan_cluster(cluster, config)
    components, policy = _stand_ins(config, plan)
    rollout, clock = components.config.rollout, VirtualClock()
    sampler = SimulatedSampler(clock, plan, policy)
    renderer = renderer_with(components, policy.tokenizer, stop_ids=())
    player = _Player(
        environment=components.task.environment,
        engine=trajectory_engine(components, renderer=renderer, sampler=sampler, temperature=rollout.temperature),
        reward=components.reward,
        servers=sampler.servers,
    )
    with RolloutPrefetcher(
        batch_rollout(components, player, write=lambda step, scored: None),
        batch_filter(components),
        staleness=rollout.staleness,
        steps=cluster.steps + rollout.staleness,  # so that the last step too has one that is sampled meanwhile
        observer=observer,
        batches={},
        loop=clock,
    ) as prefetcher:
        return _run(components, sampler, prefetcher)


def _run(components: Components, sampler: SimulatedSampler, prefetcher: RolloutPrefetcher) -> Simulation:
    plan, engine = sampler.plan, sampler.engine
    skipped = min(1 + components.config.rollout.staleness, plan.cluster.steps - 1)
    steps: list[StepTimes] = []
    before, busy = dict.fromkeys(State, 0.0), 0.0
    for step in range(1, plan.cluster.steps + 1):
        steps.append(_step(step, components, sampler, prefetcher))
        if step == skipped:
            before, busy = _usage(sampler.servers), engine.busy_seconds
    used = _usage(sampler.servers)
    counted = len(steps) - skipped
    seconds = sum(step.seconds for step in steps[skipped:])
    turns = engine.busy_seconds / (plan.cluster.engine.turn_seconds or 1.0)
    prompts = sum(server.prompt_tokens for server in sampler.servers)
    return Simulation(
        plan=plan,
        steps=tuple(steps),
        counted=counted,
        servers={state: (used[state] - before[state]) / (seconds * plan.servers) for state in State},
        engine_cores=(engine.busy_seconds - busy) / seconds,
        engine_wait=engine.waited_seconds / turns if turns else 0.0,
        cache_hits=sum(server.cached_tokens for server in sampler.servers) / max(prompts, 1),
        preemptions=sum(server.preemptions for server in sampler.servers),
    )


def _step(step: int, components: Components, sampler: SimulatedSampler, prefetcher: RolloutPrefetcher) -> StepTimes:
    """One step, in the order of ``training.train``."""
    clock, plan = sampler.clock, sampler.plan
    began = clock.now
    batch = prefetcher.take(step)
    sampled = clock.now
    flops, tokens = _learning(components, plan, batch)
    clock.run(asyncio.sleep(plan.learning_seconds(flops, tokens)))
    learned = clock.now
    if sampler_gets_weights(step, components.config.rollout.staleness):
        prefetcher.update_sampler(sampler, (), step, clock=lambda: clock.now)
    trajectories = [scored.trajectory for scored in batch.trajectories]
    return StepTimes(
        step=step,
        seconds=clock.now - began,
        sampling=sampled - began,
        learning=learned - sampled,
        sync=clock.now - learned,
        trajectories=len(trajectories),
        output_tokens=sum(trajectory.output_tokens for trajectory in trajectories),
        computed_tokens=tokens,
        staleness=Counter(staleness_of(trajectory, step) for trajectory in trajectories),
        stops=Counter(trajectory.stop.value for trajectory in trajectories),
    )


def _usage(servers: Sequence[SimulatedServer]) -> dict[State, float]:
    """Seconds of all servers by state, up to this moment."""
    for server in servers:
        server.usage.enter(server.usage.state)
    return {state: sum(server.usage.seconds[state] for server in servers) for state in State}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Player(LocalPlayer):
    """Tells the servers what they wait for."""

    servers: Sequence[SimulatedServer]
    played: list[int] = field(default_factory=list)  # the steps of the batches that are played

    async def play(
        self, batch: Sequence[ProblemGroup], *, samples: int, run_seed: int, step: int, on_scored: OnScored
    ) -> tuple[ScoredTrajectory, ...]:
        """As ``LocalPlayer``."""
        self.played.append(step)
        self._idle_for(State.TAIL)
        try:
            return await LocalPlayer.play(
                self, batch, samples=samples, run_seed=run_seed, step=step, on_scored=on_scored
            )
        finally:
            self.played.remove(step)
            if not self.played:
                self._idle_for(State.LEARNER)

    def _idle_for(self, state: State) -> None:
        for server in self.servers:
            server.idle_for(state)


def _stand_ins(config: RunConfig, plan: ClusterPlan) -> tuple[Components, StandInPolicy]:
    """The components of the configuration with stand-ins for task, reward and tools, and the policy."""
    workload, seed = plan.cluster.workload, config.seed
    batch = config.train.problems_per_step
    if plan.cluster.problems_per_server is not None:
        batch = plan.cluster.problems_per_server * plan.servers
    overrides = [
        *("evaluate.variants={}", "trackers=[]", "rollout.answer_form=null", "rollout.stop_when_confident=null"),
        f"train.problems_per_step={batch}",
    ]
    if config.rollout.staleness and not config.algorithm.importance.cap:  # as in bfloat16, which GPUs compute in
        overrides.append(f"algorithm.importance.cap={BFLOAT16_CAP}")
    named = [tool.name if isinstance(tool, Plugin) else tool for tool in config.rollout.tools.use]
    names = [name.rpartition(":")[2] for name in named]
    replaced, objects = configured(
        config,
        overrides,
        {
            "task": StandInTask(workload=workload, count=EPOCH_STEPS * batch),
            "reward": StandInReward(correct=workload.correct, seed=seed),
            "tools": [stand_in_tool(name, workload, seed) for name in names],
        },
    )
    components = build_components(replaced, objects=objects)
    if names_of(components.condenser) or any_holds_model(components.condenser):
        raise ConfigError(
            f"simulating the condenser {config.condenser.name}: it needs a model, and the simulation has none. Set "
            f"condenser.name to one that works on texts, such as observation_mask."
        )
    recorded = recorded_replies("workload.recorded", workload.recorded) if workload.recorded else ()
    form, most, calls = components.toolbox.format, config.rollout.limits.max_turns, config.rollout.tools.max_turns
    call = call_text(form, names[0]) if names else ""
    texts = [call, *form.instructions(components.toolbox.schemas).split("\n")]
    return components, StandInPolicy(
        tokenizer=stand_in_tokenizer(texts),
        workload=workload,
        call=call,
        max_turns=most if calls is None or not names else min(most, calls + 1),  # the last one answers
        seed=seed,
        recorded=[tuple(len(turn.output_ids) for turn in turns) for turns in recorded],
    )


def _learning(components: Components, plan: ClusterPlan, batch: StepBatch) -> tuple[float, int]:
    """Floating-point operations of the optimiser steps on a batch, and the tokens of one pass."""
    algorithm = components.config.algorithm
    credit = give_credit(
        batch.kept,
        components.estimator,
        replace(algorithm.aggregation, max_tokens=components.config.longest_output),
        stops=algorithm.stops,
        whitened=algorithm.advantage.whiten,
    )
    rows = rows_of(batch.kept, credit.advantage_NK, credit.weight_NK, idle=bool(algorithm.kl.coefficient))
    tokens, pairs = tree_size(rows)
    frozen, trained = components.config.model.lora is not None, sum(row.trained for row in rows)
    one = learning_flops(plan.decoder, tokens=tokens, pairs=pairs, trained=trained, frozen=frozen)
    return one * passes(algorithm, frozen=frozen), tokens


def passes(algorithm: AlgorithmSettings, *, frozen: bool) -> float:
    """Passes of a batch, forward and backward; a forward pass alone, for a reference or old ratios, is a third.

    It is half of a pass where weights are ``frozen``, and adapters are trained.
    """
    forwards = bool(algorithm.kl.coefficient) + (bool(algorithm.importance.cap) and algorithm.updates_per_batch > 1)
    return algorithm.updates_per_batch + forwards / (2 if frozen else 3)


def tree_size(rows: Sequence[Segment]) -> tuple[int, int]:
    """The tokens of some rows, and the pairs of a token and one that it sees, prefixes that a group shares once.

    Example: rows 1 2 3 and 1 2 4 have 4 tokens, which see 1, 2, 3 and 3: 9 pairs.
    """
    groups: dict[str, list[Sequence[int]]] = defaultdict(list)
    for row in rows:
        groups[row.trajectory.rpartition("/")[0]].append(row.token_ids)
    tokens = pairs = 0
    for members in groups.values():
        for index, shared in zip(*sorted_rows(members), strict=True):
            length = len(members[index])
            tokens += length - shared
            pairs += (length * (length + 1) - shared * (shared + 1)) // 2
    return tokens, pairs
