"""Metrics, trajectories and turns as DataFrames of pandas or polars, which are imported when first needed."""

import importlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from condensegrpo.core.errors import ConfigError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import SpanStatus
from condensegrpo.inspection.records import IndexedTrajectory
from condensegrpo.storage.trajectories import Credit

Library = Literal["pandas", "polars"]
LIBRARIES: tuple[Library, ...] = ("pandas", "polars")
Row = Mapping[str, object]


def frame(rows: Sequence[Row], library: Library | None = None) -> Any:  # noqa: ANN401  a DataFrame of either library
    """A DataFrame of some rows. Columns are in the order of their first appearance; what a row lacks is null.

    Args:
        library: by default pandas, or polars where pandas is not installed.
    """
    if library not in (None, *LIBRARIES):
        raise ConfigError(f"making a DataFrame: found library={library!r}, wanted {' or '.join(LIBRARIES)}.")
    columns = dict.fromkeys(name for row in rows for name in row)
    data = {name: [row.get(name) for row in rows] for name in columns}
    for name in [library] if library else LIBRARIES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return module.DataFrame(data) if name == "pandas" else module.DataFrame(data, strict=False)
    raise ConfigError(
        f"making a DataFrame: {library or ' or '.join(LIBRARIES)} is not installed. Run pip install "
        f"{library or LIBRARIES[0]}."
    )


def step_rows(lines: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """One row a step of the lines of ``metrics.jsonl``: training and evaluation after the same step together."""
    rows = dict[float, dict[str, float]]()
    for line in lines:
        rows.setdefault(line["step"], {}).update(line)
    return [{**row, "step": int(step)} for step, row in sorted(rows.items())]


def trajectory_row(record: IndexedTrajectory) -> dict[str, object]:
    """The figures of one trajectory, the texts of lists, and its credit."""
    figures = record.figures
    return {
        "id": figures.id,
        "problem": figures.problem_id,
        "group": figures.group_id,
        "sample": figures.sample,
        "question": record.question,
        "ground_truth": record.ground_truth,
        "answer": record.answer,
        "correct": figures.correct,
        "score": figures.total,
        "format_valid": figures.format_valid,
        "stop": figures.stop.value,
        "turns": figures.turns,
        "context_tokens": figures.context_tokens,
        "picture_tokens": figures.picture_tokens,
        "prompt_tokens": figures.prompt_tokens,
        "prompt_tokens_uncached": figures.prompt_tokens_uncached,
        "output_tokens": figures.output_tokens,
        "condensations": figures.condensations,
        "tool_errors": figures.tool_errors,
        "lost_fact": figures.lost_fact,
        "seconds": figures.seconds,
        "advantage": record.advantage,  # mean over turns
        "handling": record.handling,
        **{f"reward/{name}": value for name, value in figures.components.items()},
    }


def turn_rows(scored: ScoredTrajectory, credit: Credit | None) -> Iterator[dict[str, object]]:
    """The figures of every turn of one trajectory."""
    for index, turn in enumerate(scored.trajectory.turns):
        units = dict.fromkeys(SpanStatus, 0)
        for span in turn.condensation.spans if turn.condensation else ():
            units[span.status] += span.units
        condensed = turn.condensation
        yield {
            "trajectory": scored.trajectory.id,
            "turn": index,
            "kind": turn.kind,
            "policy_version": turn.policy_version,
            "frozen": turn.frozen,
            "prompt_tokens": len(turn.prompt_ids),
            "picture_tokens": turn.picture_tokens,
            "output_tokens": len(turn.output_ids),
            "condensed_from": condensed.tokens_before if condensed else None,  # tokens; null: not condensed
            "reason": condensed.reason if condensed else None,
            **{f"units_{status.value}": count if condensed else None for status, count in units.items()},
            "logprob": math.fsum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else None,  # mean, nats
            "advantage": credit.advantages[index] if credit and index < len(credit.advantages) else None,
            "weight": credit.weights[index] if credit and index < len(credit.weights) else None,  # of one token
            "tool_attempts": turn.tool_attempts,
            "tool_successes": turn.tool_successes,
            "tool_seconds": turn.tool_seconds,  # of the environment, where no tool was called; null: not known
            "reply": turn.reply.transcript,
            "observations": "\n".join(message.text for message in turn.observations),
            "pictures": "\n".join(f"media/{sha256}" for sha256 in turn.media),  # of the prompt, in the run folder
        }
