"""Prints which kinds the last notes of the studies of hidden demand hold, by how often a kind is asked for:

    python docs/scripts/demand_notes.py runs/h_demand/grpo-seed* --steps 1 20 40 60

A row for each step: the share of trajectories whose last note has the fact of the kind of rank 1, 2, …, 8, and the
success of those whose last note has the kind that is asked for; means over the runs.
"""

import argparse
from pathlib import Path
from statistics import fmean

from condensegrpo.config.load import load_config
from condensegrpo.storage.trajectories import read_trajectories
from condensegrpo.studies.tasks.demand import KINDS, HiddenDemand, facts_in


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 20, 40, 60])
    arguments = parser.parse_args()
    print(f"| step | {' | '.join(f'rank {rank}' for rank in range(1, len(KINDS) + 1))} | right if noted |")
    print("| --- " * (len(KINDS) + 2) + "|")
    for step in arguments.steps:
        shares = [shares_of(run, step) for run in arguments.runs]
        print(f"| {step} | {' | '.join(f'{fmean(column):.2f}' for column in zip(*shares, strict=True))} |")


def shares_of(run: Path, step: int) -> list[float]:
    """The shares of one run, by rank, and the success of the trajectories that noted what is asked for."""
    task = load_config(run / "config.yaml").task
    order = HiddenDemand(**{name: task.options[name] for name in ("demand", "moved") if name in task.options}).order
    held, right = [], []
    for scored in read_trajectories(run / f"trajectories/step_{step:06d}.parquet"):
        if notes := [turn.reply for turn in scored.trajectory.turns if turn.kind == "condense"]:
            held.append(facts_in([notes[-1]]))
            if scored.trajectory.question[0] in held[-1]:
                right.append(scored.figures.correct)
    return [*(fmean(kind in facts for facts in held) for kind in order), fmean(right)]


if __name__ == "__main__":
    main()
