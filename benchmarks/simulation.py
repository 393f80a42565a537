"""Predicted against measured: the steps of real runs on this machine, and of the same runs in the simulation.

    python benchmarks/simulation.py RUNS_FOLDER [CASE ...]      # such as "vllm, uneven"; runs in the folder are reused

It prints the table of docs/results/simulation.md, and the load of the machine that belongs to it.

Sampler, learner, threads and processes of a run are real. Task, tools, reward and the texts of replies are the
simulation's stand-ins, so that both have the same lengths: the real model samples as many tokens as the stand-in for
the policy writes, and these are put in their place. Two cases calibrate the times of sampler, learner and weights.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import condensegrpo as cg
from condensegrpo.config.load import named_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.observer import Silent
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.episodes.toolformats import Tagged
from condensegrpo.learner.new_model import new_model
from condensegrpo.learner.settings import NewModel
from condensegrpo.samplers.transformers import TransformersSampler
from condensegrpo.samplers.vllm.sampler import VllmSampler
from condensegrpo.samplers.vllm.settings import ServerSettings
from condensegrpo.samplers.vllm_server.sampler import VllmServerSampler
from condensegrpo.simulation.cluster import Cluster, EngineTimes, Spread, Workload
from condensegrpo.simulation.hardware import ServerTimes
from condensegrpo.simulation.simulate import simulate
from condensegrpo.simulation.workload import (
    StandInPolicy,
    StandInReward,
    StandInTask,
    call_text,
    stand_in_tokenizer,
    stand_in_tool,
)
from condensegrpo.storage.trackers import read_metrics

LIMITS = {"max_turns": 3, "max_context_tokens": 640, "max_output_tokens": 96}
PROBLEMS, SAMPLES, TOOL = 4, 4, "look_up"
STEPS = 4  # of a case; compared are all but the first, and but the last that nothing is sampled beside
OFF = 0.02  # of the seconds of a step, that a calibration may miss
EVEN, UNEVEN = 0.0, 0.7  # sigma of the lengths of replies and the seconds of tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run."""

    sampler: str  # transformers, vllm or vllm_server
    servers: int = 1
    staleness: int = 0
    sigma: float = EVEN
    tool_seconds: float = 8.0
    calibrates: bool = False

    @property
    def workload(self) -> Workload:
        """Its episodes."""
        return Workload(
            reply_tokens=Spread(mean=40.0, sigma=self.sigma),
            question_tokens=48,
            result_tokens=Spread(mean=32.0),
            tool_seconds=Spread(mean=self.tool_seconds, sigma=self.sigma),
        )


CASES = {
    "embedded": Case(sampler="transformers", calibrates=True),
    "embedded, staleness 1": Case(sampler="transformers", staleness=1),
    "embedded, staleness 2, uneven": Case(sampler="transformers", staleness=2, sigma=UNEVEN),
    "embedded, uneven": Case(sampler="transformers", sigma=UNEVEN),
    "embedded, slow tools": Case(sampler="transformers", tool_seconds=20.0),
    "server": Case(sampler="vllm_server", calibrates=True),
    "vllm, uneven": Case(sampler="vllm", sigma=UNEVEN),
    "server, staleness 1, uneven": Case(sampler="vllm_server", staleness=1, sigma=UNEVEN),
    "two servers, staleness 1": Case(sampler="vllm_server", servers=2, staleness=1),
    "vllm, staleness 1": Case(sampler="vllm", staleness=1),
}


class Substituting:
    """Samples as many tokens as the stand-in writes, and returns what it wrote."""

    def __init__(self, inner: Sampler, policy: StandInPolicy) -> None:
        self._inner, self._policy = inner, policy

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The stand-in's reply, in the time of a real one."""
        written = self._policy(prompt_ids, params)
        real = replace(params, max_tokens=len(written.token_ids), stop_ids=(), stop_strings=())
        await self._inner.sample(prompt_ids, real)
        return written

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Update the real sampler."""
        self._inner.update_weights(named_tensors, version)

    @property
    def version(self) -> int:
        """Of the real sampler."""
        return self._inner.version

    def close(self) -> None:
        """The caller closes the real sampler."""


class SubstitutingServers(Substituting):
    """The same, of a sampler that stages weights."""

    def __init__(self, inner: VllmServerSampler, policy: StandInPolicy) -> None:
        super().__init__(inner, policy)
        self._servers = inner

    def stage_weights(self, named_tensors: NamedTensors, version: int) -> Callable[[], None]:
        """Stage them for the servers."""
        return self._servers.stage_weights(named_tensors, version)


def model_folder(folder: Path) -> Path:
    """A model with the tokenizer of the simulation."""
    if not folder.exists():
        call = call_text(Tagged(), TOOL)
        tokenizer = stand_in_tokenizer([call])
        size = NewModel(hidden_size=64, ffn_size=128, layers=2, heads=2, max_positions=1024)
        new_model(tokenizer, size, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def configuration(case: Case, name: str, runs: Path) -> RunConfig:
    """The run of a case."""
    limits = [f"rollout.limits.{key}={value}" for key, value in LIMITS.items()]
    return named_config(
        "quickstart",
        [
            *limits,
            f"name={name.replace(', ', '-').replace(' ', '_')}",
            f"runs_dir={runs}",
            "model.new=null",
            f"model.path={model_folder(runs / 'model')}",
            "model.dtype=float32",
            "condenser={name: last_k, options: {keep_last: 2}}",
            "warm_start.steps=0",
            "rollout.tools={use: [], format: tagged, seconds: 120}",
            f"rollout.staleness={case.staleness}",
            "evaluate={problems: 1, variants: {}}",
            f"train.steps={STEPS + case.staleness}",
            f"train.problems_per_step={PROBLEMS}",
            f"train.samples_per_problem={SAMPLES}",
            *("train.eval_every=0", "train.save_every=0"),
            "learner.threads=1",
            "algorithm.importance.cap=2",
        ],
    )


@contextmanager
def opened(case: Case, model: Path, policy: StandInPolicy) -> Iterator[Substituting]:
    """The real sampler of a case, behind the stand-in."""
    room = LIMITS["max_context_tokens"] + LIMITS["max_output_tokens"]
    if case.sampler == "vllm_server":
        settings = ServerSettings(kv_cache_gib=0.25)
        servers = VllmServerSampler(str(model), max_model_len=room, replicas=case.servers, server=settings)
        inner: Sampler = servers
        shown: Substituting = SubstitutingServers(servers, policy)
    else:
        in_process = case.sampler == "vllm"
        inner = VllmSampler(str(model), max_model_len=room) if in_process else TransformersSampler(str(model))
        shown = Substituting(inner, policy)
    try:
        yield shown
    finally:
        inner.close()


def measured(case: Case, name: str, runs: Path) -> list[dict[str, float]]:
    """The metrics of the steps of a real run that are compared."""
    config = configuration(case, name, runs)
    folder = runs / config.name
    if not (folder / "metrics.jsonl").exists():
        model = runs / "model"
        tokenizer = stand_in_tokenizer([call_text(Tagged(), TOOL)])
        policy = StandInPolicy(
            tokenizer=tokenizer,
            workload=case.workload,
            call=call_text(Tagged(), TOOL),
            max_turns=LIMITS["max_turns"],
            seed=config.seed,
        )
        count = 4 * PROBLEMS
        with opened(case, model, policy) as sampler:
            cg.train(
                config,
                sampler=sampler,
                task=StandInTask(workload=case.workload, count=count),
                reward=StandInReward(correct=0.5, seed=config.seed),
                tools=[stand_in_tool(TOOL, case.workload, config.seed)],
            )
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "seconds" in line]
    compared = [line for line in lines if 2 <= line["step"] <= STEPS]
    if len(compared) < STEPS - 1:
        raise SystemExit(
            f"reading {folder}: found {len(lines)} steps, wanted {STEPS}. Remove it to run the case again."
        )
    return compared


def predicted(case: Case, name: str, runs: Path, cluster: Cluster) -> float:
    """Seconds a step of the simulated run, over the same steps."""
    config = configuration(case, name, runs)
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"tools": replace(config.rollout.tools, use=(TOOL,))})}
    )
    of_case = cluster.model_copy(update={"servers": case.servers, "workload": case.workload, "steps": STEPS})
    return fmean(step.seconds for step in simulate(config, of_case, Silent()).steps[1:])


def calibrated(case: Case, name: str, runs: Path, lines: Sequence[dict[str, float]]) -> Cluster:
    """The cluster whose predicted seconds of a step are those of a real run, by the time of a decoding step.

    Raises:
        SystemExit: no decoding step gives them.
    """

    def cluster(step_seconds: float) -> Cluster:
        return Cluster(
            servers=case.servers,
            learner_gpus=1,
            measured=str(runs / configuration(case, name, runs).name),
            server=ServerTimes(step_seconds=step_seconds),
            engine=EngineTimes(turn_seconds=0.002, processes=1),
        )

    goal, low, high = fmean(line["seconds"] for line in lines), 1e-4, 1.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(case, name, runs, cluster(middle)) < goal else (low, middle)
    found = cluster((low * high) ** 0.5)
    if abs(predicted(case, name, runs, found) / goal - 1) > OFF:
        raise SystemExit(
            f"calibrating on {name}: found {goal:.1f} s a step, and no decoding step of 0.1 ms to 1 s gives that. "
            f"Remove the run from {runs}, and measure it again on an idle machine."
        )
    return found


def main() -> None:
    """Measure the cases, calibrate on two of them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUNS_FOLDER", type=Path)
    parser.add_argument("cases", metavar="CASE", nargs="*", help=f"all by default: {'; '.join(CASES)}")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"found no case {unknown[0]!r}, wanted some of: {'; '.join(CASES)}")
    clusters: dict[bool, Cluster] = {}
    print("| run | measured s/step | predicted | error |\n|---|---|---|---|")
    for name, case in CASES.items():
        if options.cases and name not in options.cases and not case.calibrates:
            continue
        lines = measured(case, name, options.runs)
        if case.calibrates:
            clusters[case.sampler == "transformers"] = calibrated(case, name, options.runs, lines)
        seconds = fmean(line["seconds"] for line in lines)
        guess = predicted(case, name, options.runs, clusters[case.sampler == "transformers"])
        kind = "calibrated" if case.calibrates else f"{guess / seconds - 1:+.0%}"
        print(f"| {name} | {seconds:.2f} | {guess:.2f} | {kind} |", flush=True)
    print(f"\nload, mean of 1, 5 and 15 minutes: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    print(json.dumps({str(key): cluster.model_dump(mode="json") for key, cluster in clusters.items()}))


if __name__ == "__main__":
    main()
