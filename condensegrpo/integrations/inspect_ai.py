"""Logs of Inspect: an evaluation as ``.json``, or as ``.eval``, a zip file with one file a sample."""

import math
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pyarrow import BufferReader, CompressedInputStream
from pydantic import AliasPath, Field, TypeAdapter

from condensegrpo.core.errors import DataError
from condensegrpo.core.trajectory import Stop
from condensegrpo.integrations.chat import LoggedError, LoggedMessage, Texts, messages
from condensegrpo.integrations.episodes import LoggedEpisode

GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partial, incorrect, no answer
LIMITS = {"context": Stop.CONTEXT_OVERFLOW, "token": Stop.OUTPUT_LENGTH}  # of other kinds: the turn limit
REASONS = {"max_tokens": Stop.OUTPUT_LENGTH, "model_length": Stop.CONTEXT_OVERFLOW}  # why a reply ended
STOP_REASON = AliasPath("output", "choices", 0, "stop_reason")
ZSTANDARD, LOCAL_LENGTHS = 93, 26  # of zip files: the method, and where a header says how long its parts are


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedScore:
    """What a scorer said."""

    value: object
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSample:
    """A sample of a problem."""

    id: int | str
    input: Texts
    target: str | tuple[str, ...]
    messages: tuple[LoggedMessage, ...]
    scores: Mapping[str, LoggedScore] | None = None
    attachments: Mapping[str, str] = field(default_factory=dict)
    stop_reason: Annotated[str | None, Field(validation_alias=STOP_REASON)] = None  # of the last reply
    limit: Annotated[str | None, Field(validation_alias=AliasPath("limit", "type"))] = None  # what ended it early
    error: LoggedError | None = None
    total_time: float | None = None  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLog:
    """A log as JSON."""

    samples: tuple[LoggedSample, ...]


def read(file: Path) -> Iterator[LoggedEpisode]:
    """The samples of a log."""
    return map(_episode, _samples(file))


def _episode(sample: LoggedSample) -> LoggedEpisode:
    scores = sample.scores or {}
    graded = {name: _grade(score.value) for name, score in scores.items()}
    grades = {name: grade for name, grade in graded.items() if grade is not None}
    spoken = messages(sample.messages, "user", sample.attachments)
    replies = [index for index, message in enumerate(spoken) if message.role == "assistant"]
    begin = replies[0] if replies else len(spoken)
    if not isinstance(sample.input, str):  # it may hold replies; solvers add system messages
        begin = len(sample.input) + _system(sample.messages) - _system(sample.input)
    first = next(iter(grades.values()), 0.0)
    return LoggedEpisode(
        problem=str(sample.id),
        prompt=spoken[:begin],
        completion=spoken[begin:],
        rewards=grades,
        total=first,
        correct=min(max(first, 0.0), 1.0),
        ground_truth=sample.target if isinstance(sample.target, str) else " or ".join(sample.target),
        answer=next((score.answer for score in scores.values()), None),
        stop=_stop(sample),
        detail=sample.error.message if sample.error is not None else "",
        seconds=sample.total_time or 0.0,
    )


def _system(logged: Iterable[LoggedMessage]) -> int:
    return sum(message.role == "system" for message in logged)


def _stop(sample: LoggedSample) -> Stop:
    if sample.error is not None:
        return Stop.ENVIRONMENT_ERROR
    if sample.limit is not None:
        return LIMITS.get(sample.limit, Stop.TURN_LIMIT)
    return REASONS.get(sample.stop_reason or "", Stop.ANSWERED)


def _grade(value: object) -> float | None:
    """A score as a number: C, P, I and N, a truth value, a number, or the mean of several; None: a text, or NaN."""
    if isinstance(value, Mapping | list):
        grades = [_grade(each) for each in (value.values() if isinstance(value, Mapping) else value)]
        known = [grade for grade in grades if grade is not None]
        return sum(known) / len(known) if known else None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    return GRADES.get(value) if isinstance(value, str) else None


def _samples(file: Path) -> tuple[LoggedSample, ...]:
    if not zipfile.is_zipfile(file):
        return TypeAdapter(EvaluationLog).validate_json(file.read_bytes()).samples
    sample = TypeAdapter(LoggedSample)
    with zipfile.ZipFile(file) as log:
        members = sorted((member for member in log.infolist() if member.filename.startswith("samples/")), key=_epoch)
        return tuple(sample.validate_json(_member(log, file, member)) for member in members)


def _epoch(member: zipfile.ZipInfo) -> tuple[int, str]:
    """The order of a sample: samples/ID_epoch_N.json by N, then by id."""
    name, _, epoch = member.filename.removesuffix(".json").rpartition("_epoch_")
    return int(epoch) if epoch.isdecimal() else 0, name


def _member(log: zipfile.ZipFile, file: Path, member: zipfile.ZipInfo) -> bytes:
    """A file of a zip file. Python before 3.14 reads none that is compressed with zstandard, as Inspect's are."""
    if member.compress_type != ZSTANDARD:
        return log.read(member)
    with file.open("rb") as raw:
        raw.seek(member.header_offset + LOCAL_LENGTHS)
        raw.seek(sum(struct.unpack("<HH", raw.read(4))), os.SEEK_CUR)  # the name and what else comes before the data
        packed = raw.read(member.compress_size)
    try:
        unpacked: bytes = CompressedInputStream(BufferReader(packed), "zstd").read()
    except OSError as error:
        raise DataError(f"reading {member.filename} of {file}: {error}. Copy the log again.") from error
    return unpacked
