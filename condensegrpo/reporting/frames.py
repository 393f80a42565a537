"""Metrics, trajectories and turns as DataFrames of pandas or polars, which are imported when first needed."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from condensegrpo.core.errors import ConfigError
from condensegrpo.core.trajectory import SpanStatus
from condensegrpo.inspection.panes import TurnView
from condensegrpo.inspection.records import IndexedTrajectory

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


FIGURES = {  # columns, and the fields of conditions that they show
    **dict.fromkeys(("id", "problem", "group", "sample", "question", "ground_truth", "answer", "correct", "score")),
    "format_valid": "format",
    "stop": None,
    "turns": None,
    "context_tokens": "context",
    "picture_tokens": "pictures",
    "prompt_tokens": "read",
    "prompt_tokens_uncached": "uncached",
    "output_tokens": "output",
    **dict.fromkeys(("price", "condensations", "tool_errors", "lost_fact", "seconds", "advantage")),
}


def trajectory_row(record: IndexedTrajectory) -> dict[str, object]:
    """The figures of one trajectory, the texts of lists, and its credit."""
    fields = record.fields
    return {
        **{column: fields[field or column] for column, field in FIGURES.items()},
        "stop": record.figures.stop.value,
        "handling": record.handling,
        **{f"reward/{name}": value for name, value in record.figures.components.items()},
    }


def turn_rows(trajectory: str, turns: Iterable[TurnView]) -> Iterator[dict[str, object]]:
    """The figures of every turn of one trajectory."""
    for turn in turns:
        condensed, units = turn.condensation, dict.fromkeys(SpanStatus, 0)
        for span in condensed.spans if condensed else ():
            units[span.status] += span.units
        yield {
            "trajectory": trajectory,
            "turn": turn.turn,
            "kind": turn.kind,
            "policy_version": turn.policy_version,
            "frozen": turn.frozen,
            "prompt_tokens": turn.context.tokens,
            "picture_tokens": turn.picture_tokens,
            "output_tokens": turn.output_tokens,
            "condensed_from": condensed.tokens_before if condensed else None,  # tokens; null: not condensed
            "reason": condensed.reason if condensed else None,
            **{f"units_{status.value}": count if condensed else None for status, count in units.items()},
            "logprob": turn.logprob,  # mean, nats
            "advantage": turn.advantage,
            "weight": turn.weight,  # of one token
            "tool_attempts": turn.tool_attempts,
            "tool_successes": turn.tool_successes,
            "tool_seconds": turn.tool_seconds,
            "reply": turn.reply,
            "observations": "\n".join(message.text for message in turn.observations),
            "pictures": "\n".join(f"media/{sha256}" for sha256 in turn.media),  # of the prompt, in the run folder
        }
