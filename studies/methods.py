"""Runs a study whose arms share one warm start for each seed, made of the demonstrations of all its arms in turn:

    python studies/methods.py studies/methods_reads.yaml           # again to continue; behind it seeds, or --pilots
    condensegrpo sweep studies/methods_reads.yaml                  # writes the results

A warm start of a run shows what its own condenser shows. Here all runs of a seed start from one policy that saw every
method's, as a general model would have, and the system message names the method. The runs follow one another in this
process; each records the seconds of CPU that it took in ``cpu.jsonl``.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from condensegrpo import api
from condensegrpo.assembly.build import build
from condensegrpo.assembly.demonstrations import DemonstratedTurn, Demonstrations, demonstrations
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.assembly.runtime import open_sampler, renderer_for
from condensegrpo.config.resumed import store_configuration
from condensegrpo.config.study import Study, load_study
from condensegrpo.core.observer import Silent
from condensegrpo.core.protocols.task import Demonstration
from condensegrpo.display.quiet import quiet_libraries
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.initial_policy import base_policy
from condensegrpo.training.sweep import StudyRun, runs_of
from condensegrpo.training.warm_start import Probe, warm_start


@dataclass(frozen=True, slots=True)
class Mixed:
    """The turns of several sources, one of each in turn; of those that only read on, one in three."""

    sources: Sequence[Demonstrations]

    def turns(self, seed: int, *, skipped: int = 0) -> Iterator[DemonstratedTurn]:
        """Without end; ``skipped`` is 0: a mixed warm start that was interrupted begins again."""
        streams = [self._of(source.turns(seed)) for source in self.sources]
        while True:
            yield from map(next, streams)

    def sound(self, turn: Demonstration, reply: str) -> bool | None:
        """Whether a reply has the words of the expert's."""
        return reply.split() == turn.reply.split()

    @staticmethod
    def _of(turns: Iterator[DemonstratedTurn]) -> Iterator[DemonstratedTurn]:
        passed = 0
        for turn in turns:
            passed += (plain := turn.shown.reply.startswith("<read>"))
            if not plain or passed % 3 == 0:
                yield turn


def make_warm_start(runs: Sequence[StudyRun]) -> Path:
    """The folder ``origin`` of one seed's runs; made once."""
    shared = RunFolder(runs[0].folder.path.with_name(f"warm-seed{runs[0].seed}"))
    if (shared.path / "origin" / "warm").is_dir():
        return shared.path / "origin"
    shutil.rmtree(shared.path, ignore_errors=True)
    shared = RunFolder.create(shared.path)
    parts = [build(run.config) for run in runs]
    config = runs[0].config
    source = base_policy(config, parts[0].task, shared)
    renderers = [renderer_for(components, source) for components in parts]
    mixed = Mixed([demonstrations(each, renderer, source) for each, renderer in zip(parts, renderers, strict=True)])
    warm_start(
        source,
        shared.path / "origin" / "warm",
        demonstrations=mixed,
        open_learner=partial(
            open_learner, config, optimizer=config.warm_start.optimiser, lora=None, total_steps=config.warm_start.steps
        ),
        settings=config.warm_start,
        max_tokens=config.learner.tokens_per_micro_batch,
        probe=Probe(
            demonstrations=mixed,
            renderer=renderers[0],
            stop_strings=(),
            seed=config.seed,
            open_sampler=partial(open_sampler, config),
            turns=config.warm_start.probe_turns,
            max_output_tokens=config.rollout.limits.max_output_tokens,
            temperature=config.rollout.temperature,
        ),
        observer=Silent(),
        stopping=lambda: False,
    )
    return shared.path / "origin"


def start_from(origin: Path, run: StudyRun) -> None:
    """Make the folder of a run as if it had been stopped after its warm start."""
    if not run.folder.config.is_file():
        shutil.rmtree(run.folder.path, ignore_errors=True)
        folder = RunFolder.create(run.folder.path)
        shutil.copytree(origin, folder.path / "origin")
        store_configuration(folder, run.config, first_step=0)


def main(study: Study, seeds: Sequence[int], out: Path) -> None:
    """Run what is not finished of some seeds."""
    for seed in seeds:
        runs = [run for run in runs_of(study, out) if run.seed == seed]
        began = time.process_time()
        origin = make_warm_start(runs)
        record(out, f"warm-seed{seed}", began)
        for run in runs:
            if not run.finished:
                began = time.process_time()
                start_from(origin, run)
                api.train(run.folder.path, resume=True, observer=Silent())
                record(out, run.name, began)


def record(out: Path, name: str, began: float) -> None:
    """Add the seconds of CPU since ``began``, and say so."""
    line = json.dumps({"run": name, "seconds": round(time.process_time() - began, 1)})
    with (out / "cpu.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    quiet_libraries()
    _, name, *options = sys.argv
    chosen = load_study(Path(name))
    if options == ["--pilots"]:
        chosen, options = chosen.pilot_study(), []
    main(chosen, [int(seed) for seed in options] or chosen.seeds, Path("runs") / chosen.name)
