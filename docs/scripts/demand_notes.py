"""Prints which kinds the last notes of the studies of hidden demand hold, by how often a kind is asked for:

    python docs/scripts/demand_notes.py runs/h_demand/grpo-seed* --steps 1 20 40 60

A row for each step: the share of trajectories whose last note has the fact of the kind of rank 1, 2, …, 8, a mean over
the runs.
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
    print(f"| step | {' | '.join(f'rank {rank}' for rank in range(1, len(KINDS) + 1))} |")
    print("| --- " * (len(KINDS) + 1) + "|")
    for step in arguments.steps:
        shares = [shares_of(run, step) for run in arguments.runs]
        print(f"| {step} | {' | '.join(f'{fmean(column):.2f}' for column in zip(*shares, strict=True))} |")


def shares_of(run: Path, step: int) -> list[float]:
    """The shares of one run, by rank."""
    task = load_config(run / "config.yaml").task
    order = HiddenDemand(**{name: task.options[name] for name in ("demand", "moved") if name in task.options}).order
    notes = [
        [turn.reply for turn in scored.trajectory.turns if turn.kind == "condense"]
        for scored in read_trajectories(run / f"trajectories/step_{step:06d}.parquet")
    ]
    held = [facts_in([written[-1]]) for written in notes if written]
    return [fmean(kind in facts for facts in held) for kind in order]


if __name__ == "__main__":
    main()
