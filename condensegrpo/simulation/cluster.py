"""The cluster file of a simulation: GPUs, servers, learner, and how long and how many replies, tools and turns are."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import Field

from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import Section, apply_overrides, parse, read_yaml
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.trajectory import Turn
from condensegrpo.core.wording import did_you_mean
from condensegrpo.planning.formulas import Decoder
from condensegrpo.simulation.hardware import GPUS, MODELS, Efficiency, Gpu, ServerTimes, server_times, weight_bytes
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trackers import read_metrics
from condensegrpo.storage.trajectories import read_trajectories

Preset = TypeVar("Preset")
NAME_A_RUN = "Name the folder of a run that has sampled, or remove the key."


class Spread(Section):
    """A log-normal distribution by its mean; with sigma 0 every draw is the mean. With values every draw is of them."""

    mean: Annotated[float, Ge(0)]
    """Mean of the draws."""
    sigma: Annotated[float, Ge(0), Le(3)] = 0.0
    """Standard deviation of the logarithm."""
    values: tuple[Annotated[float, Ge(0)], ...] = ()
    """Drawn in place of mean and sigma."""

    def draw(self, random: Random) -> float:
        """mean · exp(σ·z − σ²/2), or one of the values."""
        if self.values:
            return random.choice(self.values)
        return self.mean * exp(self.sigma * random.gauss(0.0, 1.0) - self.sigma**2 / 2) if self.sigma else self.mean


class Workload(Section):
    """What an episode is like: the stand-ins for policy, task and tools."""

    reply_tokens: Spread = Spread(mean=300.0)
    """Tokens of a reply, its tool call or answer included; more than max_output_tokens are cut off."""
    turns: Spread | None = None
    """Replies of an episode, rounded, at most max_turns; the last one is the answer. null: max_turns."""
    question_tokens: Annotated[int, Ge(1)] = 64
    """Tokens of a question."""
    result_tokens: Spread = Spread(mean=150.0)
    """Tokens of the result of a tool, or of what the environment says to a reply."""
    tool_seconds: Spread = Spread(mean=0.5)
    """Duration of a call, or of a step of the environment."""
    summary_tokens: Spread = Spread(mean=200.0)
    """Tokens of a text that a condenser asks the policy for."""
    correct: Annotated[float, Ge(0), Le(1)] = 0.5
    """Share of episodes whose answer is right."""
    recorded: str | None = None
    """A run folder: turns and tokens of replies are those of its trajectories in place of the distributions."""
    recorded_tools: str | None = None
    """A run folder: each draw of tool_seconds is what tools or environment took in one of its turns."""


class LearnerTimes(Section):
    """How long an optimiser step takes; either figure replaces what GPUs and MFU predict."""

    step_seconds: Annotated[float, Ge(0)] = 1.0
    """Of a step, beside its arithmetic: packing, gathering, the optimiser."""
    token_seconds: Annotated[float, Ge(0)] | None = None
    """Of a computed token, over all GPUs; None: by the FLOPs of the packed rows and the MFU."""


class Transfer(Section):
    """How new weights reach the servers."""

    through: Literal["nccl", "folder"] = "nccl"
    """nccl: one broadcast to all servers; folder: written while servers sample, then read by all of them."""
    storage: Annotated[float, Gt(0)] = 20e9
    """Bytes a second that the folder's storage gives to all readers together."""
    seconds: Annotated[float, Ge(0)] = 1.0
    """Of an update, beside the bytes."""
    measured: Annotated[float, Ge(0)] | None = None
    """Measured seconds of a whole update, in place of what bytes and bandwidth predict."""


class EngineTimes(Section):
    """The rollout engine's own processor time."""

    turn_seconds: Annotated[float, Ge(0)] = 0.002
    """Of a turn: rendering, parsing, the HTTP request."""
    processes: Annotated[int, Ge(1)] | None = None
    """Processes that play episodes; None: one for each GPU of the learner."""


class Loss(Section):
    """A server that is gone for a while."""

    server: Annotated[int, Ge(0)]
    """Its index."""
    at: Annotated[float, Ge(0)]
    """Seconds from the start."""
    seconds: Annotated[float, Gt(0)]
    """Until it answers again."""


class Cluster(Section):
    """A cluster and a workload."""

    gpu: str = "H100"
    """A100, H100 or H200."""
    model: str = "7B"
    """Size of the policy: 1.5B, 7B or 32B."""
    gpus: int | None = Field(default=None, ge=1)
    """All GPUs; null: those of servers and learner."""
    servers: int | None = Field(default=None, ge=1)
    """vLLM servers; null: as many as the GPUs that the learner leaves."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of a server."""
    learner_gpus: int | None = Field(default=None, ge=1)
    """GPUs of the learner; null: half of all, or as many as the servers have."""
    problems_per_server: int | None = Field(default=None, ge=1)
    """Problems of a batch for each server, in place of train.problems_per_step: the batch grows with the cluster."""
    steps: int = Field(default=6, ge=1)
    """Optimiser steps that are simulated."""
    efficiency: Efficiency = Efficiency()
    server: ServerTimes | None = None
    """Measured times of a server; null: by GPU and model."""
    measured: str | None = None
    """A run folder: learning and weights take the seconds of its steps, for each computed token and each update."""
    learning: LearnerTimes = LearnerTimes()
    weights: Transfer = Transfer()
    engine: EngineTimes = EngineTimes()
    workload: Workload = Workload()
    losses: tuple[Loss, ...] = ()
    """Servers that are lost during the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A cluster with everything chosen that its file leaves open."""

    cluster: Cluster
    gpu: Gpu
    decoder: Decoder
    servers: int
    learner_gpus: int
    times: ServerTimes
    engine_processes: int

    @property
    def gpus(self) -> int:
        """All GPUs that the run holds."""
        return self.cluster.gpus or self.servers * self.cluster.tensor_parallel + self.learner_gpus

    @property
    def stage_seconds(self) -> float:
        """Of preparing new weights while the servers sample."""
        transfer = self.cluster.weights
        written = transfer.through == "folder" and transfer.measured is None
        return weight_bytes(self.decoder) / transfer.storage if written else 0.0

    @property
    def load_seconds(self) -> float:
        """Of an update, in which no server samples."""
        transfer, size = self.cluster.weights, weight_bytes(self.decoder)
        if transfer.measured is not None:
            return transfer.measured
        moved = size * self.servers / transfer.storage if transfer.through == "folder" else size / self.gpu.network
        return transfer.seconds + moved

    def learning_seconds(self, flops: float, tokens: int) -> float:
        """Of an optimiser step."""
        times = self.cluster.learning
        if times.token_seconds is not None:
            return times.step_seconds + tokens * times.token_seconds
        peak = self.learner_gpus * self.gpu.flops * self.cluster.efficiency.learner
        return times.step_seconds + flops / peak


def read_cluster(file: Path | None, overrides: Sequence[str] = ()) -> Cluster:
    """A cluster file with ``key=value`` overrides; without a file, the defaults with these.

    Raises:
        ConfigError: it cannot be read, or a key is unknown or has a wrong value.
    """
    tree, source = ({}, "the cluster") if file is None else (read_yaml(file), f"the cluster {file}")
    return parse(Cluster, apply_overrides(tree, overrides), source=source, overrides=overrides)


def plan_cluster(cluster: Cluster, config: RunConfig) -> ClusterPlan:
    """What a cluster file leaves open, and whether it fits together and to a configuration.

    Raises:
        ConfigError: unknown hardware, fewer GPUs than servers and learner take, a model or lengths that do not fit, a
            run folder without timings.
    """
    if cluster.measured is not None:
        cluster = _with_times_of(cluster, Path(cluster.measured))
    if cluster.workload.recorded_tools is not None:
        cluster = _with_recorded_tools(cluster, cluster.workload.recorded_tools)
    gpu, decoder = _known("gpu", cluster.gpu, GPUS), _known("model", cluster.model, MODELS)
    servers, learner_gpus = _shares(cluster)
    size = cluster.tensor_parallel
    times = cluster.server or server_times(gpu, decoder, cluster.efficiency, tensor_parallel=size)
    _check_lengths(cluster, config, times)
    lost = [loss.server for loss in cluster.losses if loss.server >= servers]
    if lost:
        raise ConfigError(f"checking losses: found server {lost[0]}, and the servers are 0 to {servers - 1}.")
    return ClusterPlan(
        cluster=cluster,
        gpu=gpu,
        decoder=decoder,
        servers=servers,
        learner_gpus=learner_gpus,
        times=times,
        engine_processes=cluster.engine.processes or learner_gpus,
    )


def _with_times_of(cluster: Cluster, folder: Path) -> Cluster:
    """A cluster whose learner and transfer take what the steps of a run took, by their medians."""
    names = {"seconds/learn", "seconds/sync", "tokens/computed"}
    lines = [line for line in read_metrics(RunFolder(folder).metrics) if names <= line.keys()]
    if not lines:
        raise ConfigError(
            f"reading measured: found no step with {', '.join(sorted(names))} in {folder}. Name the folder of a run "
            f"that has trained, or remove the key."
        )
    token_seconds = median(line["seconds/learn"] / max(line["tokens/computed"], 1.0) for line in lines)
    sync = median(line["seconds/sync"] for line in lines)
    times = {
        "learning": LearnerTimes(step_seconds=0.0, token_seconds=token_seconds),
        "weights": Transfer(measured=sync),
    }
    return cluster.model_copy(update=times)


def _with_recorded_tools(cluster: Cluster, folder: str) -> Cluster:
    """A cluster whose tools take the seconds of a run's turns; last ones are left out: the simulation ends there."""
    key, workload = "workload.recorded_tools", cluster.workload
    turns = [turn for turns in recorded_replies(key, folder) for turn in turns[:-1]]
    seconds = tuple(turn.tool_seconds for turn in turns if turn.tool_seconds is not None)
    if not seconds:
        raise ConfigError(f"reading {key}: found no seconds of a tool or of an environment in {folder}. {NAME_A_RUN}")
    drawn = workload.model_copy(update={"tool_seconds": Spread(mean=fmean(seconds), values=seconds)})
    return cluster.model_copy(update={"workload": drawn})


def recorded_replies(key: str, folder: str) -> list[list[Turn]]:
    """The turns in which the policy acted, of each trajectory of a run.

    Raises:
        ConfigError: there are none.
    """
    run = RunFolder(Path(folder))
    trajectories = (
        each.trajectory for step in run.steps() for each in read_trajectories(run.trajectories(step)).trajectories
    )
    replies = [[turn for turn in trajectory.turns if turn.kind == "act"] for trajectory in trajectories]
    if not any(replies):
        raise ConfigError(f"reading {key}: found no trajectory with a turn in {folder}. {NAME_A_RUN}")
    return [turns for turns in replies if turns]


def _known(key: str, name: str, known: dict[str, Preset]) -> Preset:
    if name not in known:
        raise ConfigError(
            f"reading {key}: found {name!r}. {did_you_mean(name, known)}Known are {', '.join(known)}. For other "
            f"hardware give measured times under server and learning."
        )
    return known[name]


def _shares(cluster: Cluster) -> tuple[int, int]:
    """The number of servers, and the GPUs of the learner."""
    size, servers, learner = cluster.tensor_parallel, cluster.servers, cluster.learner_gpus
    if cluster.gpus is None:
        if servers is None:
            raise ConfigError(
                "reading gpus: found neither gpus nor servers. Set one in the cluster file, or with --set gpus=8."
            )
        return servers, learner or servers * size
    if cluster.gpus < size:
        raise ConfigError(f"checking tensor_parallel: found {size} GPUs a server, and gpus={cluster.gpus} in all.")
    if learner is None:
        learner = max(1, cluster.gpus // 2 if servers is None else cluster.gpus - servers * size)
    servers = servers or (cluster.gpus - learner) // size
    if servers < 1 or servers * size + learner > cluster.gpus:
        raise ConfigError(
            f"checking gpus: found {cluster.gpus}, wanted at least {max(servers, 1) * size + learner}: "
            f"{max(servers, 1)} × {size} for servers (servers, tensor_parallel) and {learner} for the learner "
            f"(learner_gpus)."
        )
    return servers, learner


def _check_lengths(cluster: Cluster, config: RunConfig, times: ServerTimes) -> None:
    limits, workload = config.rollout.limits, cluster.workload
    if times.kv_tokens < limits.turn_tokens:
        raise ConfigError(
            f"checking tensor_parallel: found {cluster.tensor_parallel}, with which a server has room for the keys and "
            f"values of {max(times.kv_tokens, 0):,} tokens; a prompt and its reply have up to {limits.turn_tokens:,} "
            f"(rollout.limits). Raise tensor_parallel, or take a GPU with more memory."
        )
    for key, value, limit, setting in (
        ("reply_tokens.mean", workload.reply_tokens.mean, limits.max_output_tokens, "max_output_tokens"),
        ("summary_tokens.mean", workload.summary_tokens.mean, limits.max_output_tokens, "max_output_tokens"),
        ("turns.mean", workload.turns.mean if workload.turns else 1, limits.max_turns, "max_turns"),
        ("question_tokens", workload.question_tokens, limits.max_context_tokens, "max_context_tokens"),
    ):
        used = key != "summary_tokens.mean" or config.condenser.name == "summary"
        if used and value > limit and not (workload.recorded and key != "question_tokens"):
            raise ConfigError(
                f"checking workload.{key}: found {value:g}, and rollout.limits.{setting} is {limit}. Set it to at most "
                f"{limit}, or raise rollout.limits.{setting}."
            )
