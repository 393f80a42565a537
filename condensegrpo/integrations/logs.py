"""Logs of TRL, verifiers and Inspect as trajectories, so that ``inspect-trajectory`` shows them.

    trl          completions_00010.parquet: step, prompt, completion, a column a reward function, advantage
    verifiers    results.jsonl: example_id, prompt, completion, answer, reward, metrics, is_truncated, error, …
    inspect-ai   an evaluation as .json, or .eval (a zip file): samples with id, epoch, input, target, messages, scores

Prompts and completions are texts or lists of chat messages. None of these logs has token ids: every prompt gets the one
id 0 and every reply none, and the detail of each trajectory says so.
"""

import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message, Role, ToolCall
from condensegrpo.core.trajectory import Score, ScoredTrajectory, Stop, Trajectory, Turn
from condensegrpo.storage.rows import read_file

Json = Mapping[str, Any]
ROLES = {"developer": "system", "function": "tool", **{role: role for role in get_args(Role)}}
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # Inspect: correct, partial, incorrect, no answer
LIMITS = {"context": Stop.CONTEXT_OVERFLOW, "token": Stop.OUTPUT_LENGTH}  # Inspect; of other kinds: the turn limit
REASONS = {"max_tokens": Stop.OUTPUT_LENGTH, "model_length": Stop.CONTEXT_OVERFLOW}  # Inspect: why a reply ended
SIZED = ("step", "advantage")  # columns of TRL with numbers that are no rewards
TEXT_ONLY = "text without token ids: token counts, log-probabilities and condensations are not known"


class LogFormat(StrEnum):
    """A library whose logs can be read."""

    TRL = "trl"
    VERIFIERS = "verifiers"
    INSPECT_AI = "inspect-ai"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEpisode:
    """What a log holds of one episode."""

    problem: str  # equal in all samples of one problem
    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    rewards: Mapping[str, float]  # by name
    total: float
    correct: float
    step: int = 0  # optimiser step; 0: an evaluation
    advantage: float | None = None  # None: not in the log
    ground_truth: str | None = None
    answer: str | None = None
    stop: Stop = Stop.ANSWERED
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrajectory:
    """A trajectory of a log, with what it was trained with."""

    step: int
    scored: ScoredTrajectory
    advantages: tuple[float, ...] | None  # (K,); None: not in the log


def read_log(path: Path, form: LogFormat) -> tuple[ImportedTrajectory, ...]:
    """The trajectories of a log, in its order.

    Args:
        path: a file; of TRL also the folder of its files.

    Raises:
        DataError: the file is missing, damaged, empty or of another format.
    """
    files = sorted(path.glob("completions_*")) if path.is_dir() and form is LogFormat.TRL else [path]
    reader = {LogFormat.TRL: _trl, LogFormat.VERIFIERS: _verifiers, LogFormat.INSPECT_AI: _inspect_ai}[form]
    episodes = list[LoggedEpisode]()
    for file in files:
        try:
            episodes += reader(file)
        except (KeyError, TypeError, AttributeError, ValueError, OSError, NotImplementedError) as error:
            raise DataError(
                f"reading {file} as a log of {form.value}: {type(error).__name__}: {error}. Is it a log of "
                f"{form.value}? docs/how-to/inspect-trajectories.md says what is read."
            ) from error
    if not episodes:
        raise DataError(f"reading {path} as a log of {form.value}: found no episode.")
    return tuple(_imported(episodes, f"imported from {form.value}: {TEXT_ONLY}"))


def _trl(file: Path) -> Iterator[LoggedEpisode]:
    for row in read_file(file):
        names = [name for name in row if name not in SIZED and isinstance(row[name], float)]
        rewards = {name: row[name] for name in names if math.isfinite(row[name])}
        prompt = _messages(row["prompt"], "user")
        yield LoggedEpisode(
            problem="\n".join(message.content for message in prompt),
            prompt=prompt,
            completion=_messages(row["completion"], "assistant"),
            rewards=rewards,
            total=sum(rewards.values()),
            correct=float(sum(rewards.values()) >= 1),
            step=int(row["step"]),
            advantage=float(row["advantage"]) if row.get("advantage") is not None else None,
        )


def _verifiers(file: Path) -> Iterator[LoggedEpisode]:
    for row in read_file(file):
        error, total = row.get("error"), float(row["reward"])
        stop = Stop.OUTPUT_LENGTH if row.get("is_truncated") else Stop.ANSWERED
        if str(row.get("stop_condition") or "").startswith("max_turns"):
            stop = Stop.TURN_LIMIT
        metrics = row.get("metrics") or {}
        yield LoggedEpisode(
            problem=str(row["example_id"]),
            prompt=_messages(row["prompt"], "user"),
            completion=_messages(row["completion"], "assistant"),
            rewards={name: float(value) for name, value in metrics.items() if isinstance(value, int | float)},
            total=total,
            correct=float(total >= 1),
            ground_truth=str(row["answer"]) if row.get("answer") else None,
            stop=Stop.ENVIRONMENT_ERROR if error else stop,
            detail=json.dumps(error, ensure_ascii=False) if error else "",
            seconds=_seconds(row.get("timing")),
        )


def _inspect_ai(file: Path) -> Iterator[LoggedEpisode]:
    for sample in _samples(file):
        graded = ((name, _grade(score["value"])) for name, score in (sample.get("scores") or {}).items())
        scores = {name: value for name, value in graded if value is not None}
        first: Json = next(iter((sample.get("scores") or {}).values()), {})
        asked, spoken = sample["input"], _messages(sample["messages"], "user", sample.get("attachments"))
        replies = [place for place, message in enumerate(spoken) if message.role == "assistant"]
        begin = len(asked) if isinstance(asked, list) else replies[0] if replies else len(spoken)
        target, correct = sample["target"], next(iter(scores.values()), 0.0)
        yield LoggedEpisode(
            problem=str(sample["id"]),
            prompt=spoken[:begin],
            completion=spoken[begin:],
            rewards=scores,
            total=correct,
            correct=min(max(correct, 0.0), 1.0),
            ground_truth=target if isinstance(target, str) else " or ".join(target),
            answer=first.get("answer"),
            stop=_stop(sample),
            detail=str((sample.get("error") or {}).get("message") or ""),
            seconds=float(sample.get("total_time") or 0.0),
        )


def _samples(file: Path) -> Iterable[Json]:
    """The samples of a log of Inspect; an .eval file has one file a sample."""
    if not zipfile.is_zipfile(file):
        samples: Sequence[Json] = json.loads(file.read_text(encoding="utf-8"))["samples"]
        return samples
    with zipfile.ZipFile(file) as log:
        return [json.loads(log.read(name)) for name in sorted(log.namelist()) if name.startswith("samples/")]


def _stop(sample: Json) -> Stop:
    if sample.get("error"):
        return Stop.ENVIRONMENT_ERROR
    if limit := sample.get("limit"):
        return LIMITS.get(limit["type"], Stop.TURN_LIMIT)
    choices = (sample.get("output") or {}).get("choices") or [{}]
    return REASONS.get(choices[0].get("stop_reason"), Stop.ANSWERED)


def _grade(value: object) -> float | None:
    """A score as a number: C, P, I and N of Inspect, a truth value, a number, or the mean of several; None: a text."""
    if isinstance(value, Mapping | list):
        grades = [_grade(each) for each in (value.values() if isinstance(value, Mapping) else value)]
        known = [grade for grade in grades if grade is not None]
        return sum(known) / len(known) if known else None
    if isinstance(value, int | float):
        return float(value)
    return GRADES.get(value) if isinstance(value, str) else None


def _seconds(timing: object) -> float:
    """The duration of an episode of verifiers: ``total_ms``, or ``total`` in seconds."""
    if not isinstance(timing, Mapping):
        return 0.0
    return float(timing["total_ms"]) / 1000 if "total_ms" in timing else float(timing.get("total") or 0.0)


def _messages(given: object, role: Role, attachments: Mapping[str, str] | None = None) -> tuple[Message, ...]:
    """The messages of a text or of a list of chat messages."""
    if isinstance(given, str):
        return (Message(role=role, content=given),)
    if not isinstance(given, Iterable):
        raise TypeError(f"found {given!r:.60}, wanted a text or a list of messages")
    return tuple(_message(each, attachments or {}) for each in given)


def _message(given: Json, attachments: Mapping[str, str]) -> Message:
    calls = tuple(_call(each) for each in given.get("tool_calls") or () if each is not None)
    content = _content(given.get("content"), attachments)
    written = (f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>' for call in calls)
    role: Any = ROLES.get(given["role"], "user")
    return Message(
        role=role,
        content="\n".join(part for part in (content, *written) if part),
        tool_calls=calls,
        tool_call_id=given.get("tool_call_id"),
        name=given.get("name") or (given.get("function") if role == "tool" else None),
    )


def _content(given: object, attachments: Mapping[str, str]) -> str:
    """The text of a message: a text, or parts with text, reasoning or something else."""
    if given is None or isinstance(given, str):
        return attachments.get((given or "").removeprefix("attachment://"), given or "")
    if not isinstance(given, Iterable):
        raise TypeError(f"found {given!r:.60}, wanted a text or a list of parts")
    parts = list[str]()
    for part in given:
        if part["type"] == "reasoning":
            parts.append(f"<think>{part['reasoning']}</think>")
        else:
            parts.append(_content(part["text"], attachments) if part["type"] == "text" else f"[{part['type']}]")
    return "\n".join(parts)


def _call(given: object) -> ToolCall:
    """A tool call as OpenAI writes it, or as Inspect does; verifiers stores it as a text of JSON."""
    call: Any = json.loads(given) if isinstance(given, str) else given
    function = call["function"]
    named = function if isinstance(function, Mapping) else {"name": function, "arguments": call["arguments"]}
    arguments = named["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=str(call.get("id") or ""), name=str(named["name"]), arguments=text)


def _imported(episodes: Iterable[LoggedEpisode], note: str) -> Iterator[ImportedTrajectory]:
    """The trajectories of some episodes: those of one problem in one step are a group."""
    places = dict[tuple[int, str], int]()  # of the groups, by step and problem
    groups, samples = Counter[int](), Counter[str]()
    for episode in episodes:
        key = (episode.step, episode.problem)
        if key not in places:
            places[key] = groups[episode.step]
            groups[episode.step] += 1
        group = f"{episode.step}/{places[key]}"
        scored = _scored(episode, group, samples[group], note)
        samples[group] += 1
        advantages = None if episode.advantage is None else (episode.advantage,) * len(scored.trajectory.turns)
        yield ImportedTrajectory(step=episode.step, scored=scored, advantages=advantages)


def _scored(episode: LoggedEpisode, group: str, sample: int, note: str) -> ScoredTrajectory:
    turns = tuple(_turns(episode))
    asked = next((message.content for message in reversed(episode.prompt) if message.role == "user"), None)
    said = turns[-1].reply.content if turns and episode.stop.gives_answer else None
    trajectory = Trajectory(
        id=f"{group}/{sample}",
        problem_id=episode.problem[:80],
        group_id=group,
        sample=sample,
        question=asked,
        ground_truth=episode.ground_truth,
        turns=turns,
        stop=episode.stop,
        answer=episode.answer or said,
        seconds=episode.seconds,
        detail="; ".join(text for text in (episode.detail, note) if text),
    )
    score = Score(
        total=episode.total,
        components=episode.rewards,
        format_valid=episode.stop.gives_answer,
        correct=episode.correct,
        context_tokens=trajectory.max_context_tokens,
    )
    return ScoredTrajectory(trajectory=trajectory, score=score)


def _turns(episode: LoggedEpisode) -> Iterator[Turn]:
    """A turn for every reply of the completion, with what followed it."""
    messages = (*episode.prompt, *episode.completion)
    places = [at for at in range(len(episode.prompt), len(messages)) if messages[at].role == "assistant"]
    for at, end in zip(places, [*places[1:], len(messages)], strict=True):
        results = messages[at + 1 : end]
        attempts = len(messages[at].tool_calls)
        failed = sum(message.content.startswith("Error") for message in results if message.role == "tool")
        yield Turn(
            prompt_ids=(0,),
            output_ids=(),
            logprobs=(),
            policy_version=episode.step,
            context=messages[:at],
            reply=messages[at],
            observations=results,
            tool_attempts=attempts,
            tool_successes=max(attempts - failed, 0),
        )
