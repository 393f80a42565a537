"""What verifiers saves of an evaluation: ``traces.jsonl`` since 0.4, ``results.jsonl`` before."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AliasPath, Field, TypeAdapter

from condensegrpo.core.trajectory import Stop
from condensegrpo.integrations.chat import LoggedError, LoggedMessage, Texts, messages
from condensegrpo.integrations.episodes import LoggedEpisode, numbers
from condensegrpo.storage.rows import read_file

TURN_LIMIT = "max_turns"  # begins the stop condition of an episode that used all its turns


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRollout:
    """A row of ``results.jsonl``."""

    example_id: int | str
    prompt: Texts
    completion: Texts
    reward: float | None
    answer: object = None
    metrics: Mapping[str, object] | None = None
    is_truncated: bool | None = None
    stop_condition: str | None = None
    error: object = None
    seconds: Annotated[float | None, Field(validation_alias=AliasPath("timing", "total"))] = None
    milliseconds: Annotated[float | None, Field(validation_alias=AliasPath("timing", "total_ms"))] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """A message of the graph."""

    message: LoggedMessage
    parent: int | None = None  # the index of the message before it
    sampled: bool = False  # by the model


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReward:
    """A part of the reward."""

    score: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTrace:
    """What one agent did."""

    nodes: tuple[TraceNode, ...]
    rewards: Mapping[str, TraceReward | None]
    metrics: Mapping[str, object] | None = None
    stop_condition: str | None = None
    errors: tuple[LoggedError, ...] = ()
    key: Annotated[str | None, Field(validation_alias=AliasPath("task", "key"))] = None
    id: Annotated[str | None, Field(validation_alias=AliasPath("task", "data", "id"))] = None
    idx: Annotated[int | None, Field(validation_alias=AliasPath("task", "data", "idx"))] = None
    answer: Annotated[object, Field(validation_alias=AliasPath("task", "data", "answer"))] = None

    @property
    def path(self) -> tuple[TraceNode, ...]:
        """The conversation of the last message; what was compacted, and what subagents said, stands in others."""
        index, path = len(self.nodes) - 1 if self.nodes else None, list[TraceNode]()
        while index is not None:
            path.append(self.nodes[index])
            index = self.nodes[index].parent
        return tuple(reversed(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEpisode:
    """A line of ``traces.jsonl``: an episode with a trace for every agent."""

    traces: tuple[SavedTrace, ...]


def read(file: Path) -> Iterator[LoggedEpisode]:
    """The episodes of a file."""
    rollouts, episodes = TypeAdapter(SavedRollout), TypeAdapter(SavedEpisode)
    for row in read_file(file):
        if "traces" in row:
            yield from map(_of_trace, episodes.validate_python(row).traces)
        else:
            yield _of_rollout(rollouts.validate_python(row))


def _of_rollout(row: SavedRollout) -> LoggedEpisode:
    total = numbers({"reward": row.reward}).get("reward", 0.0)
    return LoggedEpisode(
        problem=str(row.example_id),
        prompt=messages(row.prompt, "user"),
        completion=messages(row.completion, "assistant"),
        rewards=numbers(row.metrics),
        total=total,
        correct=float(total >= 1),
        ground_truth=_ground_truth(row.answer),
        stop=_stop(failed=bool(row.error), condition=row.stop_condition, truncated=bool(row.is_truncated)),
        detail=json.dumps(row.error, ensure_ascii=False) if row.error else "",
        seconds=(row.seconds or 0.0) if row.milliseconds is None else row.milliseconds / 1000,
    )


def _of_trace(trace: SavedTrace) -> LoggedEpisode:
    path = trace.path
    begin = next((index for index, node in enumerate(path) if node.sampled), len(path))
    known = {
        name: reward for name, reward in trace.rewards.items() if reward is not None and math.isfinite(reward.score)
    }
    total = sum(reward.score * reward.weight for reward in known.values())
    return LoggedEpisode(
        problem=str(trace.key or trace.id or trace.idx),
        prompt=messages(tuple(node.message for node in path[:begin]), "user"),
        completion=messages(tuple(node.message for node in path[begin:]), "assistant"),
        rewards={name: reward.score for name, reward in known.items()} | numbers(trace.metrics),
        total=total,
        correct=float(total >= 1),
        ground_truth=_ground_truth(trace.answer),
        stop=_stop(failed=bool(trace.errors), condition=trace.stop_condition, truncated=False),
        detail="; ".join(f"{error.type}: {error.message}" for error in trace.errors),
    )


def _ground_truth(answer: object) -> str | None:
    """An answer as text; many logs have an empty one where there is none, and 0 is one."""
    return str(answer) if answer or answer == 0 else None


def _stop(*, failed: bool, condition: str | None, truncated: bool) -> Stop:
    if failed:
        return Stop.ENVIRONMENT_ERROR
    if (condition or "").startswith(TURN_LIMIT):
        return Stop.TURN_LIMIT
    return Stop.OUTPUT_LENGTH if truncated else Stop.ANSWERED
