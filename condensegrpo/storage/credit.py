"""Credit files: the advantages and token weights that the trajectories of one step were trained with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from condensegrpo.core.errors import TrajectoryFileError
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.records import read_records, record_line


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditTerm:
    """What an advantage is the sum of: one value for all turns, or one a turn; null where a turn does not have it."""

    name: str  # as in the estimator's formula
    values: tuple[float | None, ...]  # (1,) or (K,)
    numbers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # that it comes from, by name; (1,) or (K,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What each turn of one trajectory was trained with."""

    trajectory: str  # Trajectory.id
    advantages: tuple[float, ...]  # (K,) of every trained token of the turn
    weights: tuple[float, ...]  # (K,) of one trained token of the turn in the optimiser step; 0.0: not trained
    handling: Literal["train", "mask", "penalise", "drop"] = "train"  # by its stop; drop: by dynamic sampling
    terms: tuple[CreditTerm, ...] = ()  # that the advantages are the sum of, before whitening; empty: none were given

    def __post_init__(self) -> None:
        if len(self.advantages) != len(self.weights):
            raise ValueError(
                f"credit needs one weight per advantage: {len(self.advantages)} advantages, {len(self.weights)} weights"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CreditLine:
    credit: Credit


def write_credit(path: Path, step: Iterable[Credit]) -> None:
    """Write the credit of all trajectories of a step; replaces the file."""
    write_atomically(path, "".join(f"{record_line({'credit': credit})}\n" for credit in step))


def read_credit(path: Path) -> dict[str, Credit]:
    """The credit of a step, by trajectory id.

    Raises:
        TrajectoryFileError: the file is missing, or a line is damaged or of another version; names file and line.
    """
    lines, problems = read_records(_CreditLine, path)
    if problems:  # the file is written at once, so no line may be cut off
        raise TrajectoryFileError(f"reading {path}: {problems[0]}.")
    return {line.credit.trajectory: line.credit for line in lines}
