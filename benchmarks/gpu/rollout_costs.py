"""Where a rollout's time goes: our engine on vLLM against bare ``LLM.generate``, setting by setting.

    cd benchmarks && python -m gpu.rollout_costs --out OUT                5 minutes: 0.14 B parameters, 256 trajectories

Bare vLLM gets the same prompts and lengths turn after turn. Its settings: with CUDA graphs or without (eager), seeded
requests (a generator each) or not, log-probabilities or none, the engine in this process or in one beside it. OUT/
rollout_costs.jsonl has a line for every rollout. ``step_ms`` is the time over the fewest steps that sample these
replies, ``cpu`` the seconds of all threads of the process. Ours also sleeps and takes weights that lie on the GPU.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from rollout_sides import Setting, Wave, bare, opened_sampler, weights_of
from rollout_world import World, chatter, engine, play, waves
from sides import Run

from condensegrpo.learner.devices import synchronize
from gpu.policy import SHAPES, random_policy
from gpu.record import Record, device, dtype, parser, recording, side


def ours(setting: Setting, sampler_name: str) -> Run:
    """The trajectory engine on a sampler; a run plays a world, lets the sampler sleep and gives it weights."""
    sampler = opened_sampler(setting, sampler_name)
    weights = [(name, tensor.to(device())) for name, tensor in weights_of(setting.folder)]

    def run(world: World) -> dict[str, float]:
        parts = engine(setting.folder, sampler, world)
        moments = [(time.monotonic(), time.process_time())]

        def passed() -> tuple[float, float]:
            synchronize()
            moments.append((time.monotonic(), time.process_time()))
            (before, cpu_before), (now, cpu_now) = moments[-2:]
            return now - before, cpu_now - cpu_before

        play(parts, world)
        seconds, cpu = passed()
        sampler.sleep(keep_weights=False)
        slept, _ = passed()
        sampler.update(weights, sampler.version + 1)
        updated, _ = passed()
        return {"seconds": seconds, "cpu": cpu, "sleep": slept, "update": updated}

    return run


CHATTER = 2000  # words that the prompts of bare vLLM are of


class Params(NamedTuple):
    """The sampling parameters that bare vLLM is tried with."""

    seeded: bool = True
    logprobs: int | None = 0


def bare_timed(setting: Setting, *, eager: bool | None, own_process: bool) -> Run:
    """``LLM.generate``; a run is given waves and parameters."""
    if own_process:  # which a daemon may not have
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # its stub has no _config
    generate = bare(setting, eager=eager, own_process=own_process)

    def run(request: tuple[Sequence[Wave], Params]) -> dict[str, float]:
        recorded, params = request
        began, cpu = time.monotonic(), time.process_time()
        generate(recorded, **params._asdict())
        return {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}

    return run


AS_OURS = Params()
ALL = {
    "seeded, logprobs": AS_OURS,
    "unseeded, logprobs": Params(seeded=False),
    "seeded, no logprobs": Params(logprobs=None),
    "unseeded, no logprobs": Params(seeded=False, logprobs=None),
}


class Variant(NamedTuple):
    """A process that is measured."""

    start: Callable[[Setting], Run]
    params: Mapping[str, Params] | None = None  # that bare vLLM is tried with; None: it is ours


def variants(gpu: bool) -> dict[str, Variant]:
    """By name, the most important first. A CPU has no CUDA graphs, and one process."""
    made = {
        "ours": Variant(partial(ours, sampler_name="vllm")),
        "bare": Variant(partial(bare_timed, eager=None, own_process=False), ALL),
    }
    if gpu:
        made |= {
            "ours, eager": Variant(partial(_eager, sampler_name="vllm")),
            "bare, eager": Variant(partial(bare_timed, eager=True, own_process=False), ALL),
            "bare, own process": Variant(
                partial(bare_timed, eager=None, own_process=True), {"seeded, logprobs": AS_OURS}
            ),
        }
    return made | {"ours on transformers": Variant(partial(ours, sampler_name="transformers"))}


def _eager(setting: Setting, sampler_name: str) -> Run:
    return ours(replace(setting, options={"engine": {"enforce_eager": True}}), sampler_name)


def measure(
    record: Record, name: str, variant: Variant, setting: Setting, worlds: Sequence[World], rounds: int
) -> None:
    """The rollouts of one process, the first of which is not timed."""
    with closing(side(partial(variant.start, setting))) as sampler:
        began: float | None = time.monotonic()
        for world in worlds:
            recorded = waves(play(engine(setting.folder, chatter(CHATTER), world), world))
            steps = max(map(sum, world.lengths()))
            for number in range(1 + rounds):
                for params, given in (variant.params or {"": None}).items():
                    found = sampler.run(world if given is None else (recorded, given))
                    if began is not None:
                        record.note("opened", variant=name, seconds=time.monotonic() - began, with_first_rollout=True)
                        began = None
                    record.note(
                        "rollout",
                        variant=name,
                        params=params,
                        timed=number > 0,
                        spread=world.spread,
                        sampled=sum(map(sum, world.lengths())),
                        tokens_per_second=sum(map(sum, world.lengths())) / found["seconds"],
                        step_ms=1e3 * found["seconds"] / steps,
                        **found,
                    )


def world_options(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The policy, and how much is said; on a CPU a toy is the default."""
    gpu = torch.cuda.is_available()
    made.add_argument("--shape", choices=list(SHAPES), default="0.14b" if gpu else "toy")
    made.add_argument("--trajectories", type=int, default=256 if gpu else 8)
    made.add_argument("--turns", type=int, default=4 if gpu else 2)
    made.add_argument("--reply", type=int, default=48 if gpu else 8, help="tokens, or their median")
    made.add_argument("--question", type=int, default=120 if gpu else 8, help="words")
    made.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.45], help="σ of log-normal lengths; 0: even")
    return made


def worlds_of(options: argparse.Namespace) -> list[World]:
    """One for each spread."""
    return [
        World(
            trajectories=options.trajectories,
            turns=options.turns,
            reply=(options.reply, options.reply),
            spread=spread,
            question=options.question,
        )
        for spread in options.spreads
    ]


def setting_of(policy: Path, worlds: Sequence[World]) -> Setting:
    """With room for the longest context."""
    said = max(max(map(sum, world.lengths())) for world in worlds)
    asked, turns = worlds[0].question, worlds[0].turns
    return Setting(
        folder=policy,
        world=worlds[0],
        dtype=dtype(),
        threads=1,  # as vLLM itself has on a GPU
        longest=asked + said + turns * (worlds[0].reading + 16),
    )


def parse() -> argparse.Namespace:
    """The options."""
    names = list(variants(torch.cuda.is_available()))
    made = world_options(parser(__doc__, seconds=300))
    made.add_argument("--variants", nargs="+", choices=names, default=names[:-1])
    return made.parse_args()


def main() -> None:
    """The variants one after another."""
    options = parse()
    with recording("rollout_costs", options) as record:
        worlds = worlds_of(options)
        setting = setting_of(random_policy(options.models, options.shape), worlds)
        for name in options.variants:
            if "transformers" not in name and find_spec("vllm") is None:
                record.note("left out", variant=name, why="vLLM is not installed")
                continue
            with record.attempt(variant=name):
                measure(record, name, variants(torch.cuda.is_available())[name], setting, worlds, options.rounds)


if __name__ == "__main__":
    main()
