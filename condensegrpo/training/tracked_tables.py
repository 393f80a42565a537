"""What trackers show as tables: evaluations with intervals, and a sample of trajectories."""

from collections.abc import Sequence
from itertools import starmap
from pathlib import Path

from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.table import Table
from condensegrpo.core.trajectory import Trajectory, Turn
from condensegrpo.episodes.toolcalls import shortened
from condensegrpo.storage.trajectories import sample_trajectories

TRAJECTORIES = 16  # of an evaluation, in a table
CHARACTERS = 4000  # of a cell
BOUNDS = ("_low", "_high")
EVALUATION_COLUMNS = ("evaluation", "problems", "samples", "metric", "value", "low", "high")
COLUMNS = (
    *("trajectory", "question", "ground truth", "answer", "correct", "reward", "stop", "turns", "largest context"),
    *("contexts", "condensed spans"),
)


def tracked_evaluations(evaluations: Sequence[Evaluation]) -> Table:
    """A row for each metric of each evaluation, with its 95 % interval where it has one."""
    rows = []
    for each in evaluations:
        figures = each.figures()
        for metric, value in figures.items():
            if not metric.endswith(BOUNDS):
                low, high = (figures.get(f"{metric}{bound}") for bound in BOUNDS)
                rows.append((each.name, each.problems, each.samples, metric, value, low, high))
    return Table(columns=EVALUATION_COLUMNS, rows=tuple(rows))


def trajectory_table(file: Path) -> Table:
    """A sample of the trajectories of a file, from the first to the last that finished."""
    return Table(columns=COLUMNS, rows=tuple(map(_row, sample_trajectories(file, TRAJECTORIES))))


def _row(scored: ScoredTrajectory) -> tuple[str | int | float | None, ...]:
    trajectory, figures = scored.trajectory, scored.figures
    return (
        figures.id,
        trajectory.question,
        trajectory.ground_truth,
        trajectory.answer,
        figures.correct,
        figures.total,
        figures.stop.value,
        figures.turns,
        figures.context_tokens,
        shortened("\n\n".join(starmap(_context, enumerate(trajectory.turns))), CHARACTERS),
        shortened("\n".join(_spans(trajectory)), CHARACTERS),
    )


def _context(number: int, turn: Turn) -> str:
    """The messages that a turn saw, and its reply."""
    messages = "\n".join(f"{message.role}: {message.text}" for message in (*turn.context, turn.reply))
    return f"turn {number} ({len(turn.prompt_ids)} tokens)\n{messages}"


def _spans(trajectory: Trajectory) -> list[str]:
    """``turn 2, last_k: 55 → 31 tokens; turns 0–1 dropped (24 tokens)``, a line for each condensation."""
    lines = []
    for number, turn in enumerate(trajectory.turns):
        if declared := turn.condensation:
            spans = "; ".join(
                f"turns {span.first}–{span.last} {span.status} ({span.tokens} tokens)" for span in declared.spans
            )
            tokens = f"{declared.tokens_before} → {declared.tokens_after} tokens"
            lines.append(f"turn {number}, {declared.condenser}: {tokens}; {spans}")
    return lines
