"""The page of ``condensegrpo inspect --html`` and of the key x: which trajectories it holds, how large it becomes."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import typer

from condensegrpo.cli.inspect_choice import Choice
from condensegrpo.core.errors import DataError
from condensegrpo.core.wording import counted
from condensegrpo.inspection import views
from condensegrpo.inspection.batches import TrajectoryBatch, trajectory_files
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.inspector_page import write_inspector
from condensegrpo.inspection.records import IndexedTrajectory, LinePlace
from condensegrpo.inspection.samples import spread

if TYPE_CHECKING:
    from condensegrpo.cli.inspect_app.selection import Selection

MEGABYTE = 10**6
COMFORTABLE, LARGEST = 30 * MEGABYTE, 200 * MEGABYTE  # of stored lines; the page is about as large

Batches = Sequence[tuple[TrajectoryBatch, Sequence[IndexedTrajectory]]]


def export(file: Path, index: Index, single: Path | None, choice: Choice) -> None:
    """Write the page of one trajectory file, or of all of the index, and print what it holds.

    Raises:
        CondenseError: no trajectory is left, there are too many, or a file cannot be read or written.
    """
    files = tuple(trajectory_files(index.path)) if single is None else (single,)
    chosen = chosen_batches(index, files, choice)
    write_html(file, index, chosen, limited=single is not None or choice.where is not None)


def write_html(
    file: Path,
    index: Index,
    chosen: Batches,
    *,
    limited: bool,
    comfortable: int = COMFORTABLE,
    largest: int = LARGEST,
) -> None:
    """Write the page of some trajectories and print what it holds.

    Args:
        limited: whether the reader chose them; else only as many steps are taken as are comfortable.
        comfortable: bytes of stored lines that a browser opens at once.
        largest: bytes of stored lines that a browser opens at all.

    Raises:
        DataError: no trajectory is left, or there are more than a browser can open.
    """
    if not chosen:
        raise DataError(f"writing {file}: no trajectory is left. Try another step or a wider condition.")
    taken, most = chosen, len(chosen)
    while not limited and _size(taken) > comfortable and most > 1:
        most //= 2
        taken = spread(chosen, most)
    if _size(taken) > largest:
        raise DataError(
            f"writing {file}: {_count(taken)} trajectories of {_size(taken) // MEGABYTE} MB are more than a browser "
            f"opens, at most {largest // MEGABYTE} MB. Take fewer with --step, --group, --view or --where."
        )
    size = write_inspector(file, index, taken)
    of = sum(batch.trajectories for batch, _ in chosen)
    typer.echo(f"{file}: {_count(taken)} of {counted(of, 'trajectory', 'trajectories')}, {size / MEGABYTE:.1f} MB")
    if len(taken) < len(chosen):
        typer.echo(
            f"{len(taken)} of {len(chosen)} steps and evaluations, spread over the run; --step, --view or --where "
            "takes all that they select"
        )
    if size > 2 * comfortable:
        typer.echo("a browser opens a page of this size slowly; --step, --group, --view or --where makes it smaller")


def write_selection(selection: "Selection", listed: Sequence[IndexedTrajectory] | None) -> str:
    """Write the page of what is listed and of the open group, as far as a browser opens it at once.

    Args:
        selection: what the application shows.
        listed: trajectories of any steps; None: those of the batch.

    Returns:
        What was written, and the address at which it opens here; empty: nothing is open.

    Raises:
        CondenseError: a line is damaged, or a file cannot be read or written.
    """
    opened, group, index = selection.opened, selection.group, selection.index
    if opened is None or group is None:
        return ""
    every = [*(index.records(selection.batch) if listed is None else listed)]
    if sum(record.place.size for record in every) > COMFORTABLE:
        every = []
    chosen: dict[Path, dict[LinePlace, IndexedTrajectory]] = {}
    for record in (*every, *group.siblings):
        chosen.setdefault(record.place.file, {})[record.place] = record
    name = re.sub(r"[^\w.-]+", "-", opened.record.id)
    page = Path(f"inspect-{index.path.resolve().stem}-{name}.html")
    batches = [(batch, [*chosen[batch.file].values()]) for batch in index.batches() if batch.file in chosen]
    size = write_inspector(page, index, batches)
    shown = {
        "step": opened.batch.number,
        "evaluation": opened.batch.evaluation,
        "t": opened.record.id,
        "turn": selection.turn,
    }
    address = urlencode({key: value for key, value in shown.items() if value is not None}, safe="/")
    many = counted(_count(batches), "trajectory", "trajectories")
    return f"{page.absolute()}: {many}, {size / MEGABYTE:.1f} MB. With #{address} behind its address it opens here."


def chosen_batches(index: Index, files: Sequence[Path], choice: Choice) -> Batches:
    """The chosen trajectories of some files, of named ones their whole groups; files without any are left out."""
    index.update(files)
    chosen = []
    several = (batch for batch in index.batches() if batch.file in files)  # without those that hold nothing yet
    for batch in several if len(files) > 1 else map(index.batch, files):
        records = tuple(index.records(batch))
        groups = {record.figures.group_id for record in choice.named(records)}
        meant = [record for record in records if record.figures.group_id in groups]
        if matches := views.select(meant, where=choice.where, most=len(records)).records:
            chosen.append((batch, matches))
    return chosen


def _size(chosen: Batches) -> int:
    return sum(record.place.size for _, records in chosen for record in records)


def _count(chosen: Batches) -> int:
    return sum(len(records) for _, records in chosen)
