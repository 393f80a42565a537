"""What the application lists on the left besides groups: matches of a condition or a search, problems over the steps.

Knows nothing of the screen: what takes long runs in a thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from condensegrpo.cli.inspect_app import rows
from condensegrpo.cli.inspect_app.selection import Listing
from condensegrpo.core.wording import counted
from condensegrpo.display.theme import one_line
from condensegrpo.inspection import views
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.records import IndexedTrajectory

LONGEST_PROBLEM = 30  # characters of a name in a title
WORST = 200  # problems that are listed


class Listed(NamedTuple):
    """Trajectories of any steps, with their rows."""

    title: str
    records: Sequence[IndexedTrajectory]
    rows: Sequence[Text]
    listing: Listing | None = None  # the condition that they match, if it was one


def matching(index: Index, listing: Listing, so_far: str) -> Listed:
    """The trajectories for which a condition holds; ``so_far`` is said of those that the index knows.

    Raises:
        CondenseError: the condition cannot be read, or a file.
    """
    batch = None if listing.file is None else index.batch(listing.file)
    matches = views.find(index, batch, where=listing.where, sort=listing.sort)
    more = f", the first {views.MOST:,}" if matches.total > views.MOST else ""
    title = f"{listing.title}: {matches.total:,}{more}{so_far}"
    if not matches.total:
        title += f". No trajectory has {listing.where}; the open one stays"
    return Listed(title, matches.records, [rows.match_row(record) for record in matches.records], listing)


def worse(index: Index, so_far: str) -> Listed:
    """The problems that got worse, each by its least correct trajectory of the last visit."""
    changes = views.got_worse(index)
    last = [(change, change.visits[-1]) for change in changes[:WORST]]
    worst = [(change, index.at(visit.batch, visit.worst)) for change, visit in last]
    listed = [(change, record) for change, record in worst if record is not None]
    title = f"{counted(len(changes), 'problem')} got worse: first half of the steps → last half{so_far}"
    return Listed(title, [record for _, record in listed], [rows.change_row(*pair) for pair in listed])


def visits(index: Index, problem: str) -> Listed:
    """The groups of a problem in all steps."""
    followed = index.follow(problem)
    line = rows.sparkline([group.success for _, group in followed], rows.SPARKS)
    drawn = [rows.group_row(group, f"{batch.evaluation or 'step'} {batch.number}") for batch, group in followed]
    return Listed(f"{one_line(problem, LONGEST_PROBLEM)} {line}", [group.siblings[0] for _, group in followed], drawn)


def hits(query: str, found: Sequence[views.Hit], more: str) -> Listed:
    """What a search found; ``more`` is said of how many."""
    drawn = [
        rows.match_row(hit.record, hit.excerpt if hit.turn is None else f"turn {hit.turn}: {hit.excerpt}")
        for hit in found
    ]
    most = "+" if len(found) == views.MOST else ""  # where a search stops
    return Listed(f"{query!r}: {len(found):,}{most}{more}", [hit.record for hit in found], drawn)
