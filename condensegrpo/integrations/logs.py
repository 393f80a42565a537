"""Logs of TRL, verifiers and Inspect as trajectories, so that ``condensegrpo inspect`` shows them.

    trl          completions_00010.parquet: step, prompt, completion, a column a reward function, advantage
    verifiers    traces.jsonl: a graph of messages for each agent; before 0.4 results.jsonl: a row a rollout
    inspect-ai   an evaluation as .json, or .eval (a zip file): samples with id, epoch, input, target, messages, scores

A library has a file of its own, which says what is read of its log as dataclasses. Prompts and completions are texts or
lists of chat messages. None of these logs has token ids: every prompt gets the one id 0 and every reply none, and the
detail of each trajectory says so.
"""

import hashlib
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from condensegrpo.core.errors import DataError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Score, Trajectory, Turn
from condensegrpo.integrations import inspect_ai, trl, verifiers
from condensegrpo.integrations.episodes import TEXT_ONLY, LogFormat, LoggedEpisode

FAULTS = (ValueError, OSError, LookupError, zipfile.BadZipFile, zlib.error, struct.error)  # of other or damaged files
LONGEST_PROBLEM = 80  # characters


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
    reader = {LogFormat.TRL: trl, LogFormat.VERIFIERS: verifiers, LogFormat.INSPECT_AI: inspect_ai}[form]
    episodes = list[LoggedEpisode]()
    for file in files:
        try:
            episodes += reader.read(file)
        except FAULTS as error:
            raise DataError(
                f"reading {file} as a log of {form.value}: {_fault(error)}. Is it a log of {form.value}? "
                f"docs/how-to/inspect-trajectories.md says what is read."
            ) from error
    if not episodes:
        raise DataError(f"reading {path} as a log of {form.value}: found no episode.")
    return tuple(_imported(episodes, f"imported from {form.value}: {TEXT_ONLY}"))


def _fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}"


def _imported(episodes: Iterable[LoggedEpisode], note: str) -> Iterator[ImportedTrajectory]:
    """The trajectories of some episodes: those of one problem in one step are a group."""
    indices = dict[tuple[int, str], int]()  # of the groups, by step and problem
    groups, samples = Counter[int](), Counter[str]()
    for episode in episodes:
        key = (episode.step, episode.problem)
        if key not in indices:
            indices[key] = groups[episode.step]
            groups[episode.step] += 1
        group = f"{episode.step}/{indices[key]}"
        scored = _scored(episode, group, samples[group], note)
        samples[group] += 1
        advantages = None if episode.advantage is None else (episode.advantage,) * len(scored.trajectory.turns)
        yield ImportedTrajectory(step=episode.step, scored=scored, advantages=advantages)


def _scored(episode: LoggedEpisode, group: str, sample: int, note: str) -> ScoredTrajectory:
    turns = tuple(_turns(episode))
    question = next((message.text for message in reversed(episode.prompt) if message.role == "user"), None)
    last_reply = turns[-1].reply.text if turns and episode.stop.gives_answer else None
    trajectory = Trajectory(
        id=f"{group}/{sample}",
        problem_id=_problem_id(episode.problem),
        group_id=group,
        sample=sample,
        question=question,
        ground_truth=episode.ground_truth,
        turns=turns,
        stop=episode.stop,
        answer=episode.answer or last_reply,
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
    return ScoredTrajectory.of(trajectory, score)


def _problem_id(problem: str) -> str:
    """A problem, if it is long its end and a hash: many prompts begin with the same instructions."""
    if len(problem) <= LONGEST_PROBLEM:
        return problem
    return (
        f"…{problem[-LONGEST_PROBLEM // 2 :]} {hashlib.sha256(problem.encode(errors='surrogatepass')).hexdigest()[:8]}"
    )


def _turns(episode: LoggedEpisode) -> Iterator[Turn]:
    """A turn for every reply of the completion, with what followed it."""
    messages = (*episode.prompt, *episode.completion)
    replies = [at for at in range(len(episode.prompt), len(messages)) if messages[at].role == "assistant"]
    for at, end in pairwise([*replies, len(messages)]):
        results = messages[at + 1 : end]
        attempts = len(messages[at].tool_calls)
        failed = sum(message.text.startswith("Error") for message in results if message.role == "tool")
        answered = attempts - failed if results else 0
        yield Turn(
            prompt_ids=(0,),
            output_ids=(),
            logprobs=(),
            policy_version=episode.step,
            context=messages[:at],
            reply=messages[at],
            observations=results,
            tool_attempts=attempts,
            tool_successes=max(answered, 0),
        )
