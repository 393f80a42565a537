"""Runs a study whose arms share one warm start for each seed, made of the demonstrations of all its arms in turn:

    python studies/methods.py studies/methods_reads.yaml                    # again to continue; --pilots: of its pilots
    python studies/methods.py studies/methods_coins.yaml --tokens 16000     # a run ends once it sampled so many tokens
    python studies/methods.py studies/methods_reads.yaml --collect docs/results/methods/methods_reads.json

A warm start of a run shows what its own condenser shows. Here all runs of a seed start from one policy that saw every
method's, as a general model would have, and the system message names the method. The runs follow one another in this
process; each records the seconds of CPU that it took in ``cpu.jsonl``.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from condensegrpo import api
from condensegrpo.assembly.build import build
from condensegrpo.assembly.demonstrations import DemonstratedTurn, Demonstrations, demonstrations
from condensegrpo.assembly.runtime import renderer_for
from condensegrpo.config.load import HELD_OUT
from condensegrpo.config.resumed import store_configuration
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.task import Demonstration
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.display.console import quiet_libraries
from condensegrpo.metrics.trajectories import fetches
from condensegrpo.storage.evaluations import stored_evaluations
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.studies.lab.study import LabStudy, load_lab_study
from condensegrpo.training.initial_policy import WarmStart, base_policy
from condensegrpo.training.run_setup import prepare_run
from condensegrpo.training.sweep import StudyRun, runs_of

LAST = 5  # steps of training whose success is shown


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
    WarmStart(
        components=parts[0],
        media=None,
        renderer=renderers[0],
        demonstrations=mixed,
        observer=Observer(),
        stopping=lambda: False,
    ).run(source, shared.path / "origin" / "warm")
    return shared.path / "origin"


def start_from(origin: Path, run: StudyRun) -> None:
    """Make the folder of a run as if it had been stopped after its warm start."""
    if not run.folder.config.is_file():
        shutil.rmtree(run.folder.path, ignore_errors=True)
        folder = RunFolder.create(run.folder.path)
        shutil.copytree(origin, folder.path / "origin")
        store_configuration(folder, run.config, first_step=0)


def last_evaluation(run: StudyRun, tokens: int | None) -> Path | None:
    """The trajectories of the evaluation that ends a run; None: it is not finished.

    A run that sampled its ``tokens`` ends before the last step of its configuration: it is evaluated as by ``eval``.
    """
    if run.finished:
        return run.folder.evaluation(run.config.train.steps, HELD_OUT)
    if tokens is None or sampled_tokens(run) < tokens:
        return None
    stored = [each for each in stored_evaluations(run.folder) if each.step == run.step]
    return run.folder.evaluation(run.step, stored[-1].name) if stored else None


def sampled_tokens(run: StudyRun) -> int:
    """The tokens that a run sampled in its steps so far, those of evaluations not counted."""
    train = run.config.train
    means = [line["output_tokens"] for line in read_metrics(run.folder.metrics) if "seconds/rollout" in line]
    return round(sum(means) * train.problems_per_step * train.samples_per_problem)


def train_until(run: StudyRun, tokens: int | None) -> None:
    """Continue a run until its last step, or until the step in which it has sampled so many tokens; evaluate it."""

    def spent() -> bool:
        return tokens is not None and sampled_tokens(run) >= tokens

    prepared = prepare_run(run.config, continued=run.folder)
    with prepared.folder() as folder:
        finished = prepared.train(folder, observer=Observer(), stopping=spent)
    if not finished:
        api.evaluate(run.folder.path, observer=Observer())


def main(study: LabStudy, out: Path, tokens: int | None = None) -> None:
    """Run what is not finished."""
    for seed in study.seeds:
        runs = [run for run in runs_of(study, out) if run.seed == seed]
        began = time.process_time()
        origin = make_warm_start(runs)
        record(out, f"warm-seed{seed}", began)
        for run in runs:
            if last_evaluation(run, tokens) is None:
                began = time.process_time()
                start_from(origin, run)
                train_until(run, tokens)
                record(out, run.name, began)


def record(out: Path, name: str, began: float) -> None:
    """Add the seconds of CPU since ``began``, and say so."""
    line = json.dumps({"run": name, "seconds": round(time.process_time() - began, 1)})
    with (out / "cpu.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    print(time.strftime("%H:%M:%S"), line, flush=True)


def collected(study: LabStudy, out: Path, tokens: int | None = None) -> dict[str, Any]:
    """The figures of every finished run by arm and seed, and the names of the others."""
    lines = [json.loads(line) for line in (out / "cpu.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = {
        name: sum(line["seconds"] for line in lines if line["run"] == name) for name in {x["run"] for x in lines}
    }
    arms: dict[str, dict[str, dict[str, Any]]] = {arm: {} for arm in study.arms}
    runs = runs_of(study, out)
    ended = {run.name: file for run in runs if (file := last_evaluation(run, tokens)) is not None}
    for run in (run for run in runs if run.name in ended):
        arms[run.arm][str(run.seed)] = {
            "before": figures(run.folder.evaluation(0, HELD_OUT)),
            "after": figures(ended[run.name]),
            **training(run),
            "cpu_seconds": round(seconds[run.name], 1),
        }
    warm = {name: value for name, value in sorted(seconds.items()) if name.startswith("warm-")}
    missing = [run.name for run in runs if run.name not in ended]
    return {
        "problems": runs[0].config.evaluate.problems,
        "warm_start_cpu_seconds": warm,
        "not_finished": missing,
        "arms": arms,
    }


def training(run: StudyRun) -> dict[str, float]:
    """Steps, tokens sampled in all of them, and the success of the last ones."""
    lines = [line for line in read_metrics(run.folder.metrics) if "seconds/rollout" in line]
    return {
        "steps": run.step,
        "sampled_tokens": sampled_tokens(run),
        "training_success": _mean(line["success"] for line in lines[-LAST:]),
    }


def figures(evaluation: Path) -> dict[str, float]:
    """Means over the problems of an evaluation."""
    scored = read_trajectories(evaluation)
    names = ("context_tokens", "prompt_tokens", "prompt_tokens_uncached", "output_tokens", "condensations", "summaries")
    means = {
        "success": _mean(each.figures.correct for each in scored),
        "calls": _mean(each.figures.turns for each in scored),
    }
    means |= {name: _mean(getattr(each.figures, name) for each in scored) for name in names}
    means["turns"] = _mean(each.figures.replies for each in scored)
    means["accepted_calls"] = _mean(each.figures.tool_successes for each in scored)
    means["refetches"] = _mean(fetches(each.trajectory).refetches for each in scored)
    means["lost_facts"] = _mean(each.figures.lost_fact for each in scored)
    return means | _stops(scored)


def _stops(scored: Sequence[ScoredTrajectory]) -> dict[str, float]:
    stops = [each.figures.stop.value for each in scored]
    return {f"stop/{stop}": round(stops.count(stop) / len(stops), 4) for stop in sorted(set(stops))}


def _mean(values: Iterator[float]) -> float:
    return round(fmean(values), 4)


if __name__ == "__main__":
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--pilots", action="store_true")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="run nothing: write the figures of finished runs")
    parser.add_argument("--tokens", type=int, help="that end a run, also for --collect; default: its steps do")
    given = parser.parse_args()
    chosen = load_lab_study(given.study)
    chosen = chosen.pilot_study() if given.pilots else chosen
    out = Path("runs") / chosen.name
    if given.collect is None:
        main(chosen, out, given.tokens)
    else:
        given.collect.write_text(json.dumps(collected(chosen, out, given.tokens), indent=1) + "\n", encoding="utf-8")
