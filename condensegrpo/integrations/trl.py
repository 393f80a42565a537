"""The completions that TRL's trainers log: a row a completion, with a column a reward function."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from condensegrpo.integrations.chat import Texts, messages
from condensegrpo.integrations.episodes import LoggedEpisode, numbers
from condensegrpo.storage.rows import read_file

SIZED = ("step", "advantage")  # columns with numbers that are no rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The columns that every table has."""

    step: int
    prompt: Texts
    completion: Texts
    advantage: float | None = None


def read(file: Path) -> Iterator[LoggedEpisode]:
    """The episodes of ``completions_00010.parquet``, or of the same rows as JSON lines."""
    rows = TypeAdapter(Completion)
    for row in read_file(file):
        logged = rows.validate_python(row)
        rewards = {name: value for name, value in numbers(row).items() if name not in SIZED}
        prompt = messages(logged.prompt, "user")
        yield LoggedEpisode(
            problem="\n".join(message.text for message in prompt),
            prompt=prompt,
            completion=messages(logged.completion, "assistant"),
            rewards=rewards,
            total=sum(rewards.values()),
            correct=float(sum(rewards.values()) >= 1),
            step=logged.step,
            advantage=logged.advantage,
        )
