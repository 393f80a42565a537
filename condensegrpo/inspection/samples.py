"""Three trajectories of each evaluation and training step, short enough for a page."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from condensegrpo.core.errors import DataError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.wording import plural
from condensegrpo.inspection.batches import files_in
from condensegrpo.inspection.filters import Fields
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.panes import TurnView, turns
from condensegrpo.inspection.records import verdict
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import Credit

MOST_STEPS = 60  # of training, and of evaluations; of more, every second, fourth, eighth …
MOST_CHARACTERS = 12_000  # of a trajectory; of longer ones, the first turns and the last one
LONGEST_TEXT = 3_000  # characters of one message

T = TypeVar("T")
Sample = Mapping[str, Any]  # a trajectory as the page draws it; see ``sample``


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """The samples of one file."""

    step: int
    evaluation: str | None  # its name; None: a training batch
    count: int  # trajectories in the file
    trajectories: tuple[Sample, ...]

    @property
    def texts(self) -> Iterable[str]:
        """The texts that may name pictures."""
        for each in self.trajectories:
            yield each["question"] or ""
            yield from (text for turn in each["turns"] for text in turn["observations"])


class SampleReader:
    """Reads the samples of a run, of every file once as long as it does not change."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._read: dict[tuple[Path, int, int], SampleSet | None] = {}

    def read(self) -> tuple[SampleSet, ...]:
        """The samples of evaluations and training steps, by step."""
        evaluated = sorted(self._run.evaluation_folder.glob("step_*"))
        files = [file for folder in spread(evaluated, MOST_STEPS) for file in files_in(folder)]
        files += [self._run.trajectories(step) for step in spread(self._run.steps(), MOST_STEPS)]
        keys = [(file, about.st_size, about.st_mtime_ns) for file in files for about in [file.stat()]]
        before = self._read
        self._read = {key: before[key] if key in before else _samples(self._run, key[0]) for key in keys}
        return tuple(sorted(filter(None, self._read.values()), key=lambda each: each.step))


def spread(items: Sequence[T], most: int) -> tuple[T, ...]:
    """All items, or every second, fourth … and the last: those of a longer list are among them, if it is no longer."""
    stride = 1
    while len(items) > most * stride:
        stride *= 2
    return tuple(item for index, item in enumerate(items) if index % stride == 0 or index == len(items) - 1)


def _samples(run: RunFolder, file: Path) -> SampleSet | None:
    """The samples of a file; None: it holds no trajectory, or cannot be read."""
    try:
        batch = Index(file).batch(file)
        chosen = [(reason, batch.at(number)) for reason, number in _chosen([*batch.fields(("correct", "context"))])]
        samples = tuple(sample(reason, record.read(), record.credit) for reason, record in chosen)
    except DataError:  # the inspector names the fault; a report shows the rest
        return None
    step = int("".join(filter(str.isdecimal, file.stem if file.parent == run.trajectory_folder else file.parent.name)))
    return SampleSet(step=step, evaluation=batch.evaluation, count=batch.trajectories, trajectories=samples)


def _chosen(records: Sequence[tuple[int, Fields]]) -> Iterable[tuple[str, int]]:
    """A correct one, one that is not, and that of the largest context, if there are."""
    correct = {number: float(fields["correct"] or 0) >= 1 for number, fields in records}
    contexts = {number: float(fields["context"] or 0) for number, fields in records}
    preferences = (
        ("the first correct", [number for number, yes in correct.items() if yes]),
        ("the first not correct", [number for number, yes in correct.items() if not yes]),
        ("the largest context", sorted(correct, key=lambda number: -contexts[number])),
        ("another", [*correct]),
        ("another", [*correct]),
    )
    taken: dict[int, tuple[str, int]] = {}
    for reason, some in preferences:
        free = [number for number in some if number not in taken]
        if free and len(taken) < 3:
            taken[free[0]] = (reason, free[0])
    return taken.values()


def sample(reason: str, scored: ScoredTrajectory, credit: Credit | None) -> Sample:
    """The values that the page shows of a trajectory, ``chosen`` for a reason; numbers of omitted turns are missing."""
    trajectory = scored.trajectory
    views = turns(scored, credit, budget=0, tokenizer=None)
    used, shown = 0, []
    for turn in map(_turn, views):
        used += len(turn["reply"]) + sum(map(len, turn["observations"]))
        if used <= MOST_CHARACTERS or turn["turn"] == len(views) - 1:
            shown.append(turn)
    # what stands for the pictures of the first prompt
    pictures = [part.text for view in views[:1] for message in view.messages for part in message.media]
    texts = {name: getattr(trajectory, name) for name in ("detail", "question", "ground_truth", "answer")}
    known = {name: None if text is None else _short(text) for name, text in texts.items()}
    return {
        "chosen": reason,
        "verdict": verdict(scored.figures),
        "figures": scored.figures,
        "price": scored.figures.price,  # of the figures, which the page gets without their properties
        **known,
        "question": " ".join([known["question"] or "", *pictures]) if pictures else known["question"],
        "turns": shown,
    }


def _turn(view: TurnView) -> dict[str, Any]:
    condensed = ""  # by what and from what to what; empty: the prompt continues the last one
    if declared := view.condensation:
        condensed = f"{declared.condenser}: {declared.tokens_before} → {plural(declared.tokens_after, 'token')}"
    return {
        "turn": view.turn,
        "kind": view.kind,
        "context_tokens": view.context.tokens,
        "output_tokens": view.output_tokens,
        "condensed": condensed,
        "strip": view.context.strip,
        "advantage": view.advantage,
        "reply": _short(view.reply),
        "observations": [_short(message.text) for message in view.observations],
    }


def _short(text: str) -> str:
    """A text, or its beginning with the number of characters that are left out."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}… ({len(text) - LONGEST_TEXT} more characters)"
